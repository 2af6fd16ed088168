"""The folder of a run: whose it is, what is in it, and whether another run may write there."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import geonorm
from geonorm.errors import UserError, check_folder_path
from geonorm.storage import write_json
from geonorm.training import recipe
from geonorm.training.config import RunConfig

CONFIG, RUN, METRICS, RESULT = "config.yaml", "run.json", "metrics.jsonl", "result.json"
CHECKPOINTS, MODEL, TENSORBOARD = "checkpoints", "model", "tensorboard"
_LOCK = ".lock"
# What does not change the result of a run, or only its rounding.
_FREE = (
    *("evaluation.", "sampling.", "checkpoint.", "tracking.", "data.sources", "data.corpus", "data.text_column"),
    *("accumulation", "compile", "gradient_checkpointing", "parallel", "device", "peak_flops", "faults."),
)
# A run that is stable before its decay can be made longer.
_FREE_FOR_WSD = ("steps", "schedule.decay")


def read_config(out: Path, files: Iterable[Path], overrides: Iterable[str], *, resume: bool) -> RunConfig:
    """Read the configuration of a run; one that is resumed starts from what was saved with it.

    Raises:
        UserError: as :func:`geonorm.training.recipe.load`.
    """
    saved = [out / CONFIG] if resume and (out / CONFIG).exists() else []
    return recipe.load([*saved, *files], overrides).filled()


class RunFolder:
    """The folder, held by this process until :meth:`release`.

    Attributes:
        out: the folder.
        id: identity of the run.
        is_new: whether the run starts from nothing.
        latest: last step that the run can be taken up from, or None for any.
    """

    def __init__(self, out: Path, config: RunConfig, *, resume: bool, overwrite: bool) -> None:
        """Claim the folder.

        Raises:
            UserError: another process holds it, or it holds something that was not asked for.
        """
        from filelock import FileLock, Timeout

        self.out, self.config = out, config
        check_folder_path("out", out)
        if resume and overwrite:
            raise UserError("--resume and --overwrite are both given; keep one")
        out.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(out / _LOCK)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"another process is training in {out}; wait for it or name another `out`") from None
        try:
            self._take(resume, overwrite)
        except BaseException:
            self._lock.release()
            raise

    def _take(self, resume: bool, overwrite: bool) -> None:
        # What a start that was killed leaves half written counts for nothing.
        held = [path for path in self.out.iterdir() if path.name != _LOCK and path.suffix != ".partial"]
        if held and not (resume or overwrite):
            raise UserError(
                f"`out` {self.out} is not empty; add --resume to go on with what it holds, --overwrite to delete it, "
                "or name another folder"
            )
        if held and not (self.out / RUN).exists():
            raise UserError(f"`out` {self.out} holds no training run ({RUN} is missing); name another folder")
        if held and overwrite:
            for path in held:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        # Written second and before the first step, so without it there is nothing to go on with.
        self.is_new = not held or overwrite or not (self.out / CONFIG).exists()
        self.run = {} if self.is_new else _read_json(self.out / RUN)
        self.id = uuid.uuid4().hex[:12] if self.is_new else str(self.run.get("id"))
        self.latest: int | None = None
        if not self.is_new:
            saved = recipe.load([self.out / CONFIG])
            self._check_same(saved)
            if (saved.steps, saved.decay_steps) != (self.config.steps, self.config.decay_steps):
                # What came after was trained at rates that this run does not have.
                self.latest = min(one.steps - one.decay_steps for one in (saved, self.config))

    def _check_same(self, saved: RunConfig) -> None:
        before, now = _flat(recipe.resolved(saved)), _flat(recipe.resolved(self.config))
        free = _FREE + (_FREE_FOR_WSD if saved.schedule.name == "wsd" else ())
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key) and not key.startswith(free):
                raise UserError(
                    f"`{key}` is {now.get(key)!r} now but was {before.get(key)!r} in {self.out}; give the same to "
                    "resume it, or name another folder"
                )

    def begin(self, fingerprint: str, num_labels: dict[str, int]) -> None:
        """Write down what is being run; before this, a start that failed leaves the folder empty.

        Args:
            fingerprint: of the corpus; num_labels: its tokens that have a label, by side.

        Raises:
            UserError: the run in this folder was of other text.
        """
        if not self.is_new and self.run.get("corpus") != fingerprint:
            raise UserError(
                f"`data` is other text now than it was in {self.out}; give the same, or name another folder"
            )
        facts = {"id": self.id, "corpus": fingerprint, "geonorm": geonorm.__version__, "torch": torch.__version__}
        write_json(self.out / RUN, {**facts, "num_labels": num_labels})
        recipe.save(self.out / CONFIG, self.config)
        (self.out / RESULT).unlink(missing_ok=True)

    def release(self) -> None:
        """Let another process have the folder."""
        self._lock.release()


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return dict(data)
    except (OSError, ValueError, TypeError):
        raise UserError(f"{path} is damaged; start anew with --overwrite, or name another folder") from None
