"""Where metrics go besides the metrics file: tensorboard, trackio, wandb. None of them is asked for by default."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, Protocol

from geonorm.errors import UserError
from geonorm.training.config import TrackingConfig


class Tracker(Protocol):
    """Takes numbers by name and step."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Take the numbers of one step."""
        ...

    def close(self) -> None:
        """Write out what is held back."""
        ...


def open_trackers(tracking: TrackingConfig, out: Path, settings: dict[str, Any], run: str) -> list[Tracker]:
    """Open every tracker of a run.

    Args:
        tracking: which.
        out: folder of the run; tensorboard writes to ``tensorboard`` in it.
        settings: configuration of the run, to be shown there.
        run: identity of the run, the same after a resume.

    Raises:
        UserError: the package of a tracker is not installed.
    """
    return [_OPENERS[name](tracking, out, settings, run) for name in tracking.trackers]


def check_trackers(tracking: TrackingConfig) -> None:
    """Check that every tracker's package is there, without opening any.

    Raises:
        UserError: one is not installed.
    """
    for name in tracking.trackers:
        _package(*_PACKAGES.get(name, (name, name)))


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Flatten a row of metrics into names such as ``train/loss`` and ``layers/angle/mlp/3``."""
    flat: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, bool) or value is None:
            return
        if isinstance(value, (int, float)):
            flat[name] = float(value)
        elif isinstance(value, dict):
            for key, item in value.items():
                add(f"{name}/{key}", item)
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value, start=1):
                add(f"{name}/{number}", item)

    for key, value in row.items():
        if key not in ("kind", "step"):
            add(f"{row['kind']}/{key}", value)
    return flat


_PACKAGES = {"tensorboard": ("torch.utils.tensorboard", "tensorboard")}


class _TensorBoard:
    def __init__(self, tracking: TrackingConfig, out: Path, settings: dict[str, Any], run: str) -> None:
        writer = _package(*_PACKAGES["tensorboard"]).SummaryWriter
        self._writer = writer(str(out / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Calls:
    """trackio and wandb, which share ``init``, ``log`` and ``finish``."""

    def __init__(
        self, package: str, tracking: TrackingConfig, out: Path, settings: dict[str, Any], **more: Any
    ) -> None:
        self._package = _package(package, package)
        name = tracking.name or out.resolve().name
        self._package.init(project=tracking.project, name=name, config=settings, **more)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._package.log(values, step=step)

    def close(self) -> None:
        self._package.finish()


def _wandb(tracking: TrackingConfig, out: Path, settings: dict[str, Any], run: str) -> Tracker:
    # Without a key it would ask for one, or fail: nobody may be there to answer.
    online = "WANDB_API_KEY" in os.environ or "WANDB_MODE" in os.environ
    mode: dict[str, Any] = {} if online else {"mode": "offline"}
    return _Calls("wandb", tracking, out, settings, dir=str(out), id=run, resume="allow", **mode)


def _trackio(tracking: TrackingConfig, out: Path, settings: dict[str, Any], run: str) -> Tracker:
    return _Calls("trackio", tracking, out, settings, resume="allow")


_OPENERS = {"tensorboard": _TensorBoard, "wandb": _wandb, "trackio": _trackio}


def _package(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(
            f"`tracking.trackers` names {package}, which is not installed; run {Path(sys.executable).name} -m pip "
            f"install {package}, or leave it out"
        ) from None
