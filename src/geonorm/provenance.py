"""What numbers were made with: versions, the machine, the implementation of the step, the command."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import os
import platform
import shlex
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import geonorm
from geonorm.ops import which


def environment(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Versions and machine, JSON-able; ``step`` is the implementation that is taken on the device."""
    return {
        "geonorm": code_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": num_cores(),
        # Implementations differ by rounding, and a build of the C++ kernels changes which one is taken.
        "step": which(torch.empty(1, 1, device=device)),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


@functools.cache
def code_version() -> str:
    """Version of geonorm with a digest of its source files, so that results of different code can be told apart."""
    root = Path(geonorm.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cpp", ".h")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{geonorm.__version__}+{digest.hexdigest()[:12]}"


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """Name of the processor, as Linux gives it, or else the kind of machine."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def command_line(
    command: str,
    config: Any,
    *,
    positional: Collection[str] = (),
    without: Collection[str] = (),
    always: Collection[str] = (),
    repeated: Collection[str] = (),
) -> str:
    """The words of a command with those options that differ from their defaults.

    Args:
        command: its name.
        config: a dataclass, one field an option.
        positional: fields whose values stand first and without a name.
        without: fields that change no result.
        always: fields to write at their defaults too.
        repeated: fields whose option is given once for each value.
    """
    words = ["geonorm", command]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        values = (
            [] if isinstance(value, bool) else [str(item) for item in (value if isinstance(value, tuple) else [value])]
        )
        if field.name in positional:
            words[2:2] = values
        elif field.name not in without and (value != field.default or field.name in always):
            option = ("--no-" if value is False else "--") + field.name.replace("_", "-")
            if field.name in repeated:
                words += [word for one in values for word in (option, one)]
            else:
                words += [option, *values]
    return shlex.join(words)
