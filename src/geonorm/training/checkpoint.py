"""Checkpoints that are whole or absent, and that no crafted file can turn into code.

A checkpoint is a folder ``step-N``: tensors as safetensors, written and resharded by ``torch.distributed.checkpoint``,
and a manifest with the size and SHA-256 of every file, written last. The folder gets its name when everything is on
disk. Nothing in it is a pickle: DCP's default format keeps its metadata in one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from geonorm.errors import UserError
from geonorm.storage import write_json
from geonorm.training.parallel import is_sharded
from geonorm.training.ranks import OtherRankFailedError, Ranks
from geonorm.training.state import Shapes

MANIFEST = "manifest.json"
_FORMAT = 1
_NAME = re.compile(r"step-(\d+)")
_BLOCK = 1 << 20
# True, and wanted: one process saves and loads alone.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

# DCP's own is no Exception.
_FAILURES = (Exception, CheckpointException)
# What safetensors calls them.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was found whole.

    Attributes:
        path: its folder.
        step: optimiser steps that it stands after.
        facts: what was saved with the tensors, plain data.
        shapes: shape and dtype of every tensor.
    """

    path: Path
    step: int
    facts: dict[str, Any]
    shapes: Shapes


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
        self._group: Any = dist.new_group(backend="gloo") if ranks.size > 1 else None
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
            set_aside: rename those, so that the run can save at their steps again.

        Returns:
            None if there is none at all.

        Raises:
            UserError: there are some, but none of them is good.
        """
        steps = self.steps()
        for step in reversed(steps):
            path = self.path(step)
            try:
                found = verify(path)
                if found.facts.get("run") != run:
                    raise UserError(f"{path} belongs to another run")
            except UserError as error:
                say(f"not used: {error}")
                if set_aside:
                    self._set_aside(path)
                continue
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
        mine = files[self.ranks.rank :: self.ranks.size]
        return {file.name: [file.stat().st_size, _sha256(file)] for file in mine}

    def _publish(self, partial: Path, step: int, digests: dict[str, list[Any]], facts: dict[str, Any]) -> None:
        manifest = {"format": _FORMAT, "step": step, "files": dict(sorted(digests.items())), "facts": facts}
        write_json(partial / MANIFEST, {**manifest, "digest": _digest(manifest)})
        _sync_folder(partial)
        partial.rename(self.path(step))
        _sync_folder(self.root)
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
        parts: list[Any] = [None] * self.ranks.size
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
            failed: list[Any] = [None] * self.ranks.size
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


def verify(path: Path) -> Checkpoint:
    """Check that a checkpoint is whole, file by file, without loading it.

    Raises:
        UserError: says what is wrong with it.
    """
    from safetensors import SafetensorError, safe_open

    manifest = _read_manifest(path)
    files: dict[str, list[Any]] = manifest["files"]
    present = {file.name for file in path.iterdir()} - {MANIFEST}
    if present != set(files):
        odd = sorted(present ^ set(files))[0]
        raise UserError(f"{path} {'has' if odd in present else 'lacks'} the file {odd}, against its manifest")
    shapes: Shapes = {}
    for name, (size, digest) in files.items():
        file = path / name
        actual = file.stat().st_size
        if actual != size:
            raise UserError(f"{file} has {actual} bytes instead of {size}")
        if _sha256(file) != digest:
            raise UserError(f"{file} is not what was saved (its SHA-256 differs)")
        try:
            with safe_open(file, framework="pt") as opened:
                _add_shapes(shapes, opened)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is not a file of tensors ({_cause(error)})") from None
    return Checkpoint(path, int(manifest["step"]), manifest["facts"], shapes)


def _add_shapes(shapes: Shapes, opened: Any) -> None:
    """Add the tensors of one file; a tensor that was cut over ranks has a piece in several."""
    info = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
    for name in opened.keys():  # noqa: SIM118
        piece = opened.get_slice(name)
        offsets = info.get(name, {}).get("saved_offsets", [0] * len(piece.get_shape()))
        ends = tuple(start + length for start, length in zip(offsets, piece.get_shape(), strict=True))
        before = shapes.get(name, (ends, None))[0]
        shapes[name] = tuple(map(max, before, ends)), _DTYPES[piece.get_dtype()]


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        digest = manifest.pop("digest")
        good = digest == _digest(manifest) and manifest["format"] == _FORMAT
        good = good and path.name == f"step-{manifest['step']}" and isinstance(manifest["facts"], dict)
        good = good and all(Path(name).name == name for name in manifest["files"])
    except FileNotFoundError:
        raise UserError(f"{path} has no {MANIFEST}, so its saving never ended") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        good, manifest = False, {}
    if not good:
        raise UserError(f"{file} is damaged")
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(path: Path) -> None:
    """Make names in a folder last through a power cut, where the system can."""
    if os.name == "nt":
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _copy(tensor: Tensor) -> Tensor:
    """A copy that training does not touch: in main memory, or beside the original where it is cut over ranks."""
    detached = tensor.detach()
    return detached.clone() if is_sharded(detached) else detached.to("cpu", copy=True)


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
