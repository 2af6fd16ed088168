"""Checkpoints that are whole or absent, and that no crafted file can turn into code.

A checkpoint is a folder ``step-N``: tensors as safetensors, written and resharded by ``torch.distributed.checkpoint``,
and a manifest with the size and SHA-256 of every file, written last. The folder gets its name when everything is on
disk. Nothing in it is a pickle: DCP's default format keeps its metadata in one.
"""

from __future__ import annotations

import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from geonorm.errors import UserError
from geonorm.storage import sha256
from geonorm.training.distributed import OtherRankFailedError, Ranks
from geonorm.training.manifest import Checkpoint, sync_folder, verify, write_manifest

_NAME = re.compile(r"step-(\d+)")
# True, and wanted: one process saves and loads alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

# DCP's own is no Exception.
_FAILURES = (Exception, CheckpointException)
Say = Callable[[str], None]


class Checkpoints:
    """The checkpoints of one run, in one folder that all ranks share."""

    def __init__(
        self, root: Path, ranks: Ranks, *, keep_last: int = 2, keep_every: int = 0, background: bool = False
    ) -> None:
        """Open the folder; it may not exist yet.

        Args:
            root: the folder.
            ranks: the processes that save and load together.
            keep_last: newest checkpoints that stay, by number.
            keep_every: those at its multiples stay too; 0 for none.
            background: write while training goes on.
        """
        self.root, self.ranks, self.background = root, ranks, background
        self.keep_last, self.keep_every = keep_last, keep_every
        # Of its own, so that what the writer says cannot mix with what training says.
        self._group: Any = dist.new_group(backend="gloo") if ranks.world_size > 1 else None
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Save a checkpoint; in the background, the tensors may change once this returns.

        Every rank calls this with the tensors that it holds.

        Raises:
            UserError: this one, or the one before in the background, could not be written. Older ones are untouched.
        """
        self.wait()
        if not self.background:
            self._write(step, tensors, facts)
            return
        copies = {name: _copy(tensor) for name, tensor in tensors.items()}

        def work() -> None:
            try:
                self._write(step, copies, facts)
            except BaseException as error:
                self._error = error

        self._writer = threading.Thread(target=work, name="checkpoint")
        self._writer.start()

    def wait(self) -> None:
        """Wait for a checkpoint in the background.

        Raises:
            UserError: it could not be written.
        """
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def steps(self) -> list[int]:
        """Steps of all folders that are named like a checkpoint, lowest first."""
        if not self.root.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.root.iterdir() if path.is_dir())
        return sorted(int(match.group(1)) for match in names if match)

    def find(self, run: str, say: Say, *, set_aside: bool = True) -> Checkpoint | None:
        """Return the newest good checkpoint of a run; call it on rank 0.

        Args:
            run: identity of the run; a checkpoint of another one is not used.
            say: is told about each that cannot be used.
            set_aside: rename those, if there is a good one, so that the run can save at their steps again.

        Returns:
            None if there is none at all.

        Raises:
            UserError: there are some, but none of them is good.
        """
        steps, bad = self.steps(), []
        for step in reversed(steps):
            path = self.path(step)
            try:
                found = verify(path)
                if found.facts.get("run") != run:
                    raise UserError(f"{path} belongs to another run")
            except UserError as error:
                say(f"not used: {error}")
                bad.append(path)
                continue
            if set_aside:
                for one in bad:
                    self._set_aside(one)
            return found
        if steps:
            raise UserError(
                f"none of the {len(steps)} checkpoints in {self.root} is good; restore one, or start anew with "
                "--overwrite"
            )
        return None

    def load(self, checkpoint: Checkpoint, into: dict[str, Tensor]) -> None:
        """Read tensors in place; every rank calls this, whatever the number of ranks that saved.

        Raises:
            UserError: the files cannot be read.
        """
        try:
            load(
                into,
                storage_reader=HuggingFaceStorageReader(str(checkpoint.path)),
                process_group=self._group,
                no_dist=self._group is None,
            )
        except _FAILURES as error:
            raise UserError(f"cannot read the checkpoint {checkpoint.path}: {_cause(error)}") from error

    def path(self, step: int) -> Path:
        """Folder of the checkpoint after ``step`` steps."""
        return self.root / f"step-{step}"

    def _write(self, step: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        partial = self.root / f".partial-{step}"
        try:
            self._together(lambda: self._start(partial), main_only=True)
            self._together(lambda: self._write_tensors(partial, tensors))
            digests = self._gather(self._together(lambda: self._digests(partial)))
            self._together(lambda: self._publish(partial, step, digests, facts), main_only=True)
        except OtherRankFailedError:
            raise
        except _FAILURES as error:
            if self.ranks.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"cannot save the checkpoint of step {step} in {self.root}: {_cause(error)}; older ones are untouched: "
                "make room and go on with --resume"
            ) from error

    def _start(self, partial: Path) -> None:
        # A run that was killed leaves its folder behind, and nobody else writes here.
        for left in self.root.glob(".partial-*"):
            shutil.rmtree(left)
        partial.mkdir(parents=True)

    def _write_tensors(self, partial: Path, tensors: dict[str, Tensor]) -> None:
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
        save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)

    def _digests(self, partial: Path) -> dict[str, list[Any]]:
        files = sorted(partial.glob("*.safetensors"))
        mine = files[self.ranks.rank :: self.ranks.world_size]
        return {file.name: [file.stat().st_size, sha256(file)] for file in mine}

    def _publish(self, partial: Path, step: int, digests: dict[str, list[Any]], facts: dict[str, Any]) -> None:
        write_manifest(partial, step, digests, facts)
        sync_folder(partial)
        partial.rename(self.path(step))
        sync_folder(self.root)
        for old in expendable(self.steps(), self.keep_last, self.keep_every):
            # Gone in one step, so that half of one never looks like a damaged one.
            going = self.path(old).rename(self.root / f".partial-old-{old}")
            shutil.rmtree(going)

    def _set_aside(self, path: Path) -> None:
        for number in range(1, 1000):
            target = path.with_name(f"damaged-{path.name}-{number}")
            if not target.exists():
                path.rename(target)
                return

    def _gather(self, mine: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if self._group is None:
            return mine
        parts: list[Any] = [None] * self.ranks.world_size
        dist.all_gather_object(parts, mine, group=self._group)
        return {name: value for part in parts for name, value in part.items()}

    def _together(self, work: Callable[[], Any], *, main_only: bool = False) -> Any:
        """Do something on every rank or the first; if it fails anywhere, it fails everywhere."""
        result, error = None, None
        if self.ranks.is_main or not main_only:
            try:
                result = work()
            except _FAILURES as caught:
                error = caught
        if self._group is not None:
            failed: list[Any] = [None] * self.ranks.world_size
            dist.all_gather_object(failed, None if error is None else _cause(error), group=self._group)
            reasons = [reason for reason in failed if reason is not None]
            if reasons and error is None:
                if not self.ranks.is_main:
                    raise OtherRankFailedError
                raise UserError(reasons[0])
        if error is not None:
            raise error
        return result


def expendable(steps: list[int], keep_last: int, keep_every: int) -> list[int]:
    """Steps of the checkpoints to delete: not among the newest ``keep_last``, by number, nor at a kept multiple."""
    old = sorted(steps)[:-keep_last]
    return [step for step in old if not keep_every or step % keep_every]


def _copy(tensor: Tensor) -> Tensor:
    """A copy that training does not touch: in main memory, or beside the original where it is cut over ranks."""
    detached = tensor.detach()
    return detached.clone() if isinstance(detached, DTensor) else detached.to("cpu", copy=True)


def _cause(error: BaseException) -> str:
    """The innermost reason, in one line."""
    while True:
        if isinstance(error, CheckpointException) and error.failures:
            error = next(iter(error.failures.values()))[0]
        elif error.__cause__ is not None:
            error = error.__cause__
        else:
            break
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
    return text.splitlines()[0]
