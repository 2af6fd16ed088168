"""The C++ kernels of the step: built when asked for, kept in a cache folder, loaded from there.

Nothing is compiled at import or by ``impl="auto"``. :func:`build_cpu` compiles ``step_cpu.cpp`` once for this torch,
these flags and this source; from then on every process of the same user finds the library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path

import torch

from geonorm.errors import UserError

SOURCE = Path(__file__).with_name("step_cpu.cpp")
NAME = "geonorm_step_cpu"
_INSTRUCTIONS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}
# Whether the operations are registered in this process; None until somebody asked.
_loaded: bool | None = None


def cache_folder() -> Path:
    """Where the library of this torch, these flags and this source lies, built or not.

    Below ``TORCH_EXTENSIONS_DIR`` where that is set, as all of torch's extensions, else ``~/.cache/geonorm``
    (``XDG_CACHE_HOME``).
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root is None:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "geonorm")
    parts = (
        SOURCE.read_text(encoding="utf-8"),
        torch.__version__,
        str(torch.version.git_version),
        sys.platform,
        platform.machine(),
        " ".join(_flags()),
    )
    return Path(root) / f"{NAME}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def why_not_cpp() -> str | None:
    """Why ``impl="auto"`` does not use the C++ kernels on a CPU, in one line; None if it does. Compiles nothing."""
    if os.environ.get("GEONORM_CPP") == "0":
        return "the environment sets GEONORM_CPP=0; unset it"
    if _load_built():
        return None
    return "they are not built for this torch and this machine; build them once with geonorm.ops.build_cpu()"


def build_cpu() -> Path:
    """Build the C++ kernels of the step for this machine, if they are not there yet, and load them. About a minute.

    Needs a C++ compiler, ninja and setuptools. Processes that ask at once wait for the first of them. Afterwards
    ``impl="auto"`` takes the kernels in eager mode on a CPU, in this process and in later ones.

    Returns:
        The library.

    Raises:
        UserError: a tool is missing, the platform is not Linux or macOS, or the compiler failed. The message names the
            remedy or the compiler's first complaint.
    """
    folder = cache_folder()
    if not _load_built(again=True):
        _compile(folder)
        if not _load_built(again=True):
            raise UserError(f"the library in {folder} cannot be loaded; delete that folder and build again")
    return _library(folder)


def _flags() -> list[str]:
    # The instructions that torch itself found here, named one by one: with -march=native a home folder that machines
    # share would hand a library to one that cannot run it.
    capability = torch.backends.cpu.get_cpu_capability()
    flags = ["-O3", "-fno-math-errno", "-fno-trapping-math"]
    if capability in _INSTRUCTIONS:
        flags += [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}", *_INSTRUCTIONS[capability]]
    else:
        flags.append("-DCPU_CAPABILITY=DEFAULT")
    return flags if sys.platform == "darwin" else [*flags, "-fopenmp"]


def _library(folder: Path) -> Path:
    return folder / f"{NAME}.so"


def _finished(folder: Path) -> Path:
    """Written last: a library without it was cut short."""
    return folder / "finished"


def _load_built(again: bool = False) -> bool:
    """Load and register the library if it is there; whether it is now. Looks once a process, unless told to again."""
    global _loaded
    if _loaded is None or (again and not _loaded):
        folder = cache_folder()
        _loaded = _finished(folder).is_file() and _library(folder).is_file()
        if _loaded:
            from geonorm.ops import registered

            if not hasattr(torch.ops.geonorm, "sphere_step_cpp"):
                try:
                    torch.ops.load_library(str(_library(folder)))
                except OSError:
                    _loaded = False
                    return False
            registered.register_cpp()
    return _loaded


def _compile(folder: Path) -> None:
    if sys.platform not in ("linux", "darwin"):
        raise UserError(f"the C++ kernels are built on Linux and macOS only, not on {sys.platform}; leave impl='auto'")
    import fcntl

    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        raise UserError(
            f"the C++ kernels need a C++ compiler and there is no {compiler!r} on the PATH; install one (Debian: "
            "apt install g++) or name it with CXX, or leave impl='auto'"
        )
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        raise UserError(
            f"the C++ kernels are built with setuptools, which cannot be imported ({error}); `pip install setuptools`, "
            "or leave impl='auto'"
        ) from None
    if not cpp_extension.is_ninja_available():
        raise UserError(
            "the C++ kernels are built with ninja, which is missing; `pip install ninja`, or leave impl='auto'"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "building").open("w")
    except OSError as error:
        raise UserError(
            f"the C++ kernels cannot be built in {folder}: {error.strerror}; set TORCH_EXTENSIONS_DIR to a folder that "
            "you may write to"
        ) from None
    # The system drops this lock with its process, unlike torch's own, which a killed build leaves behind for ever.
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _finished(folder).is_file():
            return
        (folder / "lock").unlink(missing_ok=True)
        link = ["-fopenmp"] if "-fopenmp" in _flags() else []
        try:
            cpp_extension.load(
                NAME, str(SOURCE), extra_cflags=_flags(), extra_ldflags=link, build_directory=str(folder),
                is_python_module=False,
            )  # fmt: skip
        except (RuntimeError, OSError) as error:
            lines = str(error).splitlines()
            first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else repr(error))
            raise UserError(
                f"building the C++ kernels failed: {first.strip()}; impl='auto' works without them"
            ) from None
        _finished(folder).touch()
