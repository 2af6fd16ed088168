"""A model's folder that is whole or absent."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from geonorm.errors import UserError, disk_reason


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write a model to; what is in it moves to ``out`` when the block ends well.

    Args:
        out: an empty folder, or none yet.

    Raises:
        UserError: the disk is full, or does not take the files for another reason. ``out`` is as it was then.
    """
    was_there = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Inside, because the folder may be a mount, a link or the current folder, which nothing can be renamed to.
        with tempfile.TemporaryDirectory(prefix="partial-", dir=out) as name:
            partial = Path(name)
            yield partial
            # Without its configuration a folder is no model, so that comes last.
            for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
                path.rename(out / path.name)
    except BaseException as error:
        if not was_there:
            with contextlib.suppress(OSError):
                out.rmdir()
        reason = disk_reason(error)
        if reason is None:
            raise
        raise UserError(
            f"cannot write {out}: {reason}; nothing is left there: make room, or name another folder"
        ) from error
