"""What a comparison ran on."""

from __future__ import annotations

import datetime
import functools
import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import geonorm
from geonorm.ops import which


def environment() -> dict[str, Any]:
    """Versions and machine, JSON-able."""
    return {
        "geonorm": code_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": num_cores(),
        "threads_per_trial": 1,
        # Implementations differ by rounding, and a build of the C++ kernels changes which one is taken.
        "step": which(torch.empty(1, 1)),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


@functools.cache
def describe_machine() -> dict[str, Any]:
    """What has to be equal on every machine of a comparison (``versions``), and what may differ."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return {
        "versions": {
            "geonorm": code_version(),
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
        },
        "processor": _processor(),
        "accelerator": accelerator,
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
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
