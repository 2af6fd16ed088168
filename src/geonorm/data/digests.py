"""Digests of files, with a check on the way that nothing else makes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from geonorm.data.readers import UnreadableFile
from geonorm.errors import UserError

_READ_BLOCK = 1 << 20


def file_digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        UnreadableFile: a ``.zst`` file that is damaged or ends too early.
        OSError: a file that cannot be read.
    """
    digest = hashlib.sha256()
    frames = _ZstdFrames(path) if path.suffix == ".zst" else None
    with path.open("rb") as file:
        while block := file.read(_READ_BLOCK):
            digest.update(block)
            if frames is not None:
                frames.feed(block)
    if frames is not None:
        frames.finish()
    return digest.hexdigest()


class _ZstdFrames:
    """Checks that zstd frames are whole: the reader underneath `datasets` takes a cut file for a short one."""

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise UserError(f"cannot read {path} without the package zstandard; pip install zstandard") from None
        self.path, self.zstandard = path, zstandard
        self.frame = zstandard.ZstdDecompressor().decompressobj()
        self.open = False

    def feed(self, block: bytes) -> None:
        try:
            while block:
                self.open = True
                self.frame.decompress(block)
                if not self.frame.eof:
                    return
                block = self.frame.unused_data
                self.frame = self.zstandard.ZstdDecompressor().decompressobj()
                self.open = False
        except self.zstandard.ZstdError as error:
            message = f"cannot read {self.path}: {error}; repair or remove it"
            raise UnreadableFile(self.path, message) from None

    def finish(self) -> None:
        if self.open:
            message = f"cannot read {self.path}: the zstd stream ends too early; fetch the file again"
            raise UnreadableFile(self.path, message)
