"""What makes a checkpoint whole: the list of its files with sizes and digests, and the check against it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from geonorm.errors import UserError
from geonorm.storage import sha256, write_json
from geonorm.training.state import Shapes

MANIFEST = "manifest.json"
_FORMAT = 1
_BLOCK = 1 << 20
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
        if sha256(file) != digest:
            raise UserError(f"{file} is not what was saved (its SHA-256 differs)")
        try:
            with safe_open(file, framework="pt") as opened:
                _add_shapes(shapes, opened)
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is not a file of tensors ({str(error).splitlines()[0]})") from None
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


def write_manifest(folder: Path, step: int, files: dict[str, list[Any]], facts: dict[str, Any]) -> None:
    """Write what makes a checkpoint whole.

    Args:
        folder: where its files lie.
        step: optimiser steps that it stands after.
        files: size and SHA-256 of each.
        facts: plain data to keep with it.
    """
    manifest = {"format": _FORMAT, "step": step, "files": dict(sorted(files.items())), "facts": facts}
    write_json(folder / MANIFEST, {**manifest, "digest": _digest(manifest)})


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


def sync_folder(path: Path) -> None:
    """Make names in a folder last through a power cut, where the system can."""
    if os.name == "nt":
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
