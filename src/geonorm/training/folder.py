"""The folder of a run: whose it is, what is in it, and whether another run may write there."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import geonorm
from geonorm.errors import UserError, check_folder_path
from geonorm.storage import write_json
from geonorm.training import recipe
from geonorm.training.config import RunConfig

CONFIG, RUN, METRICS, RESULT = "config.yaml", "run.json", "metrics.jsonl", "result.json"
# Loss, number of labels and document of every window of the test side.
TEST_WINDOWS = "test_windows.json"
CHECKPOINTS, MODEL, TENSORBOARD = "checkpoints", "model", "tensorboard"
_LOCK = ".lock"
# All that a run writes, as patterns; what else lies in the folder is somebody else's.
_WRITTEN = (
    *(pattern for name in (CONFIG, METRICS, RESULT, TEST_WINDOWS) for pattern in (name, f"{name}.*.partial")),
    *(f"{RUN}.*.partial", f"{TENSORBOARD}/events.out.tfevents.*"),
    *(f"{MODEL}/{name}" for name in ("config.json", "generation_config.json", "tokenizer.json", "facts.json")),
    *(f"{CHECKPOINTS}/{name}" for name in ("step-[0-9]*", "damaged-step-[0-9]*", ".partial-*")),
)
_WRITTEN_IN_CHECKPOINTS = (
    "shard-[0-9]*-model-[0-9]*-of-[0-9]*.safetensors",
    "manifest.json",
    "manifest.json.*.partial",
)
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


@contextlib.contextmanager
def locked(out: Path, doing: str) -> Iterator[None]:
    """A folder for this process alone; one that dies lets it go.

    Raises:
        UserError: another process is ``doing`` something there.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(out / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process is {doing} in {out}; wait for it or name another `out`") from None
    try:
        yield
    finally:
        lock.release()


class RunFolder:
    """The folder, held by this process until :meth:`release`.

    Attributes:
        out: the folder.
        id: identity of the run.
        is_new: whether the run starts from nothing.
        step_impls: implementations of the step on the sphere that the run has had, once it has begun.
        latest: last step that the run can be taken up from, or None for any.
    """

    def __init__(self, out: Path, config: RunConfig, *, resume: bool, overwrite: bool) -> None:
        """Claim the folder.

        Raises:
            UserError: another process holds it, or it holds something that was not asked for.
        """
        self.out, self.config = out, config
        check_folder_path("out", out)
        if resume and overwrite:
            raise UserError("--resume and --overwrite are both given; keep one")
        out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            held.enter_context(locked(out, "training"))
            self._take(resume, overwrite)
            self._held = held.pop_all()

    def _take(self, resume: bool, overwrite: bool) -> None:
        # What a start that was killed leaves half written counts for nothing.
        held = [path for path in self.out.iterdir() if path.name != _LOCK and path.suffix != ".partial"]
        if held and not (resume or overwrite):
            raise UserError(
                f"`out` {self.out} is not empty; add --resume to go on with the run that it holds, --overwrite to "
                "replace that run, or name another folder"
            )
        self.run = _read_record(self.out) if held else {}
        for name in (MODEL, TENSORBOARD, CHECKPOINTS):
            if overwrite and (self.out / name).is_symlink():
                raise UserError(
                    f"{self.out / name} is a link, and what it leads to may be another run's; remove the link, or name "
                    "another folder"
                )
        # Written second and before the first step, so without it there is nothing to go on with.
        self.is_new = not held or overwrite or not (self.out / CONFIG).exists()
        self.id = uuid.uuid4().hex[:12] if self.is_new else str(self.run["id"])
        self.latest: int | None = None
        if not self.is_new:
            saved = recipe.load([self.out / CONFIG])
            self._check_same(saved)
            if (saved.steps, saved.decay_steps) != (self.config.steps, self.config.decay_steps):
                # What came after was trained at rates that this run does not have.
                self.latest = min(one.steps - one.decay_steps for one in (saved, self.config))

    def _check_same(self, saved: RunConfig) -> None:
        before, now = recipe.flat(recipe.resolved(saved)), recipe.flat(recipe.resolved(self.config))
        free = _FREE + (_FREE_FOR_WSD if saved.schedule.name == "wsd" else ())
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key) and not key.startswith(free):
                raise UserError(
                    f"`{key}` is {now.get(key)!r} now but was {before.get(key)!r} in {self.out}; give the same to "
                    "resume it, or name another folder"
                )

    def recorded_step(self) -> str | None:
        """The implementation of the step that the run had last; None for a run that starts from nothing."""
        return None if self.is_new else (self.run.get("step") or [None])[-1]

    def begin(self, fingerprint: str, num_labels: dict[str, int], step: str, num_bytes: int) -> None:
        """Write down what is being run, and remove what a run before it has written, if it is not gone on with.

        Before this a start that failed has changed nothing, so it comes after every check.

        Args:
            fingerprint: of the corpus; num_labels: its tokens that have a label, by side.
            step: name of the implementation of the step on the sphere.
            num_bytes: size of a checkpoint.

        Raises:
            UserError: the run in this folder was of other text, or a checkpoint does not fit the disk.
        """
        if not self.is_new and self.run.get("corpus") != fingerprint:
            raise UserError(
                f"`data` is other text now than it was in {self.out}; give the same, or name another folder"
            )
        self._check_disk(num_bytes)
        before = [] if self.is_new else list(self.run.get("step", []))
        # Implementations differ by rounding, and a resumed run may have another one.
        self.step_impls = before if before[-1:] == [step] else [*before, step]
        facts = {
            "id": self.id,
            "corpus": fingerprint,
            "geonorm": geonorm.__version__,
            "torch": torch.__version__,
            "num_labels": num_labels,
            "step": self.step_impls,
        }
        if self.is_new:
            # Shows that the folder can be written to, before anything is removed.
            write_json(self.out / RUN, self.run or facts)
            # Without it there is nothing to go on with, so an end from here on leaves what the same command takes.
            (self.out / CONFIG).unlink(missing_ok=True)
            self._remove_written()
        write_json(self.out / RUN, facts)
        recipe.save(self.out / CONFIG, self.config)
        for name in (RESULT, TEST_WINDOWS):
            (self.out / name).unlink(missing_ok=True)

    def _check_disk(self, num_bytes: int) -> None:
        disk = shutil.disk_usage(self.out)
        old = sum(path.lstat().st_size for path in self._written() if not path.is_dir()) if self.is_new else 0
        # Some file systems do not tell.
        if disk.total and disk.free + old < num_bytes:
            raise UserError(
                f"a checkpoint takes {num_bytes / 1e9:.3g} GB, but the disk of {self.out} has {disk.free / 1e9:.3g} GB "
                "left; make room or name another folder"
            )

    def _written(self) -> Iterator[Path]:
        """Every file that a run has written here, then the folders that it made, inner ones first."""
        folders = [self.out / name for name in (MODEL, TENSORBOARD, CHECKPOINTS)]
        for pattern in _WRITTEN:
            for path in self.out.glob(pattern):
                if path.is_symlink() or not path.is_dir():
                    yield path
                else:
                    folders.insert(0, path)
                    for inner in _WRITTEN_IN_CHECKPOINTS:
                        yield from path.glob(inner)
        yield from (folder for folder in folders if folder.is_dir() and not folder.is_symlink())

    def _remove_written(self) -> None:
        for path in list(self._written()):
            if path.is_symlink() or not path.is_dir():
                path.unlink()
            elif not any(path.iterdir()):
                path.rmdir()
            elif path.parent.name == CHECKPOINTS:
                # Somebody's file in a checkpoint's folder, whose name the next run needs.
                names = (path.with_name(f"left-of-{path.name.lstrip('.')}-{number}") for number in itertools.count(1))
                path.rename(next(name for name in names if not name.exists()))

    def release(self) -> None:
        """Let another process have the folder."""
        self._held.close()


def _read_record(out: Path) -> dict[str, Any]:
    """What says that a folder holds a run of ours.

    Raises:
        UserError: nothing says so.
    """
    try:
        record = json.loads((out / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"`out` {out} holds no training run ({RUN} is missing); name another folder") from None
    except (OSError, ValueError):
        record = None
    if not isinstance(record, dict) or not all(isinstance(record.get(key), str) for key in ("id", "corpus", "geonorm")):
        raise UserError(
            f"{out / RUN} is damaged or no record of geonorm train, so nothing in {out} is touched; name another folder"
        )
    return record
