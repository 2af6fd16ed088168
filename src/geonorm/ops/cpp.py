"""The C++ kernels of the step: built once for a machine, kept in a cache folder, loaded from there.

Nothing is compiled at import. :func:`ensure_cpu_kernels` is for the beginning of a run, and the first step of a process
that would have used the kernels begins a build beside the work. From then on every process of the same user finds the
library, as long as torch, the flags and ``step_cpu.cpp`` stay the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from geonorm.errors import UserError
from geonorm.ops import registered

SOURCE = Path(__file__).with_name("step_cpu.cpp")
NAME = "geonorm_step_cpu"
_INSTRUCTIONS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}
_log = logging.getLogger(__name__)
# Why this process leaves the kernels alone, "" if it takes them; None until somebody asks.
_refusal: str | None = None
# Whether this process has thought of a build, and the one that it has begun beside its work, if any.
_considered = False
_beside: subprocess.Popen | None = None


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
    global _refusal
    if os.environ.get("GEONORM_CPP") == "0":
        return "the environment sets GEONORM_CPP=0; unset it"
    if _refusal is None:
        _refusal = _load_built()
    return _refusal or None


def ensure_cpu_kernels(wait: bool = False, *, recorded: str | None = None) -> str:
    """Decide, at the beginning of a run on a CPU in eager mode, which implementation of the step it takes.

    Until the next call the answer is that of ``impl="auto"`` in this process, so that a run repeats to the bit. Where
    the kernels are not built and there is a compiler, they are: beside the work, for the runs after this one, or first.
    A build that failed is remembered, said once, and not tried again. ``GEONORM_CPP=0`` forbids all of it.

    Args:
        wait: build first, for about a minute, and use the kernels in this run.
        recorded: what a run that goes on here was begun with; ``"cpp"`` waits for the kernels, anything else does
            without them.

    Returns:
        ``"cpp"`` or ``"autograd"``. :func:`geonorm.ops.why_not` has the reason.
    """
    global _refusal, _considered
    _considered = True
    if os.environ.get("GEONORM_CPP") == "0":
        return "autograd"
    if recorded not in (None, "cpp"):
        _refusal = "this run was begun without them"
        return "autograd"
    _refusal, folder = _load_built(), cache_folder()
    if _refusal and not _library(folder).is_file():
        if _failure(folder).is_file():
            _tell_failure_once(folder)
        elif _lacks() is None:
            if not wait and recorded is None:
                _build_beside(folder)
            else:
                _log.info("building the C++ kernels of the step, once for this machine: about a minute")
                try:
                    _build(folder)
                except UserError as error:
                    _log.warning("%s", error)
                    _tell_failure_once(folder, told=True)
                _refusal = _load_built()
    return "autograd" if _refusal else "cpp"


def ensure_begun() -> None:
    """Begin a build beside the work if this process never thought of it; no later step of it changes by that."""
    if not _considered:
        ensure_cpu_kernels()


def build_cpu() -> Path:
    """Build the C++ kernels of the step for this machine, if they are not there yet, and load them. About a minute.

    Needs a C++ compiler. Processes that ask at once wait for the first of them. Afterwards ``impl="auto"`` takes the
    kernels in eager mode on a CPU, in this process and in later ones.

    Returns:
        The library.

    Raises:
        UserError: there is no compiler, the platform is not Linux or macOS, or the compiler failed. The message names
            the remedy or the compiler's first complaint.
    """
    global _refusal
    library = load_or_build()
    _refusal = ""
    return library


def load_or_build() -> Path:
    """As :func:`build_cpu`, but what ``impl="auto"`` takes in this process stays as it is."""
    folder = cache_folder()
    if _load_built():
        _build(folder)
        if refusal := _load_built():
            raise UserError(f"no C++ kernels: {refusal}")
    return _library(folder)


def _flags() -> list[str]:
    # The instructions that torch itself found here, named one by one: with -march=native a home folder that machines
    # share would hand a library to one that cannot run it.
    capability = torch.backends.cpu.get_cpu_capability()
    flags = ["-std=c++20", "-fPIC", "-O3", "-fno-math-errno", "-fno-trapping-math"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    if capability in _INSTRUCTIONS:
        flags += [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}", *_INSTRUCTIONS[capability]]
    else:
        flags.append("-DCPU_CAPABILITY=DEFAULT")
    return [*flags, *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-fopenmp"])]


def _library(folder: Path) -> Path:
    return folder / f"{NAME}.so"


def _failure(folder: Path) -> Path:
    return folder / "failed"


def _tell_failure_once(folder: Path, told: bool = False) -> None:
    """Warn that the build failed, unless some process of this machine has, or had just ``told`` it."""
    with contextlib.suppress(OSError):
        (folder / "told").touch(exist_ok=False)
        if not told:
            _log.warning("%s", _failure(folder).read_text(encoding="utf-8"))


def _compiler() -> list[str]:
    return os.environ.get("CXX", "c++").split()


def _lacks() -> str | None:
    """What is missing here to build the kernels, with the remedy."""
    if sys.platform not in ("linux", "darwin"):
        return f"the C++ kernels are built on Linux and macOS only, not on {sys.platform}; leave impl='auto'"
    if not _compiler() or shutil.which(_compiler()[0]) is None:
        return (
            f"the C++ kernels need a C++ compiler and there is no {' '.join(_compiler())!r} on the PATH; install one "
            "(Debian: apt install g++) or name it with CXX, or leave impl='auto'"
        )
    return None


def _load_built() -> str:
    """Load and register the library if it is there; why it cannot be used, else nothing."""
    folder = cache_folder()
    if not _library(folder).is_file():
        if _failure(folder).is_file():
            return f"building them failed; delete {folder} to have it tried again, or see geonorm.ops.build_cpu()"
        return _lacks() or "they were not there when this run began; build them once with geonorm.ops.build_cpu()"
    if not hasattr(torch.ops.geonorm, "sphere_step_cpp"):
        try:
            torch.ops.load_library(str(_library(folder)))
        except OSError:
            return f"the library in {folder} cannot be loaded; delete that folder and build again"
        registered.register("sphere_step_cpp")
    return ""


def _build_beside(folder: Path) -> None:
    """Begin a build in a process of its own, which outlives this one, unless somebody builds already."""
    global _beside
    try:
        folder.mkdir(parents=True, exist_ok=True)
        FileLock(folder / "building").acquire(blocking=False).lock.release()
    except (Timeout, OSError, NotImplementedError):
        return
    code = "import os; os.nice(10); from geonorm.ops.cpp import load_or_build; load_or_build()"
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    _beside = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    _log.info("building the C++ kernels of the step beside this work, for the runs after it; GEONORM_CPP=0 forbids it")


def _build(folder: Path) -> None:
    if lack := _lacks():
        raise UserError(lack)
    root, unfinished = Path(torch.__file__).parent, folder / "unfinished.so"
    headers = [
        word for path in ("include", "include/torch/csrc/api/include") for word in ("-isystem", str(root / path))
    ]
    libraries = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    command = [*_compiler(), *_flags(), "-shared", *headers, str(SOURCE), "-o", str(unfinished), *libraries]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # The system drops this lock with its process.
        with FileLock(folder / "building"):
            if _library(folder).is_file():
                return
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
            if done.returncode == 0:
                unfinished.replace(_library(folder))
                _failure(folder).unlink(missing_ok=True)
                return
            lines = done.stderr.strip().splitlines() or [f"{command[0]} ended with code {done.returncode}"]
            first = next((line for line in lines if "error" in line.lower()), lines[0]).strip()
            message = f"building the C++ kernels failed: {first}; impl='auto' works without them"
            _failure(folder).write_text(message, encoding="utf-8")
    except (OSError, NotImplementedError) as error:
        raise UserError(
            f"the C++ kernels cannot be built in {folder}: {getattr(error, 'strerror', None) or error}; set "
            "TORCH_EXTENSIONS_DIR to a folder that you may write to"
        ) from None
    raise UserError(message)
