"""Train and validation by document: a content hash decides the side, so that duplicates never straddle it."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
from collections.abc import Iterable

import numpy as np

from geonorm.errors import UserError

TRAIN, VAL = "train", "val"

_BUCKET_BITS = 16
_HASH_BITS = 64
# An interval of hashes this near to the wanted number of bytes is near enough; the first such one is taken, so
# that the side of a document seldom changes when documents are added.
_TOLERANCE = 0.1


def document_digest(text: str) -> bytes:
    """SHA-256 of the document's UTF-8 bytes."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def _side_hash(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")


class Survey:
    """What one pass over the documents tells: counts, a content fingerprint and where to split.

    Memory is constant: a histogram of bytes over 65,536 ranges of the hash stands for the documents.
    """

    def __init__(self) -> None:
        self.num_documents = 0
        self.num_bytes = 0
        self.smallest: int | None = None
        self.largest: int | None = None
        self._histogram = np.zeros(1 << _BUCKET_BITS, dtype=np.int64)
        self._fingerprint = hashlib.sha256()

    def add(self, text: str) -> None:
        """Count one document."""
        self.add_digest(document_digest(text), len(text) if text.isascii() else len(text.encode("utf-8")))

    def add_digest(self, digest: bytes, size: int) -> None:
        """Count one document of ``size`` bytes by its `document_digest`."""
        value = _side_hash(digest)
        self.num_documents += 1
        self.num_bytes += size
        self.smallest = value if self.smallest is None else min(value, self.smallest)
        self.largest = value if self.largest is None else max(value, self.largest)
        self._histogram[value >> (_HASH_BITS - _BUCKET_BITS)] += size
        self._fingerprint.update(digest)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the digests of all documents in their order, as 64 hex digits."""
        return self._fingerprint.hexdigest()

    def split(self, val_fraction: float) -> Split:
        """Choose an interval of hashes that holds about ``val_fraction`` of the bytes, both sides non-empty.

        Args:
            val_fraction: wanted share of validation bytes, above 0 and at most 0.5.

        Raises:
            UserError: there is no document.
        """
        if self.smallest is None or self.largest is None:
            raise UserError("no document with text was found; give files that have text in them")
        if self.smallest == self.largest:
            return Split(0, 0, cut_fraction=val_fraction)
        used = np.flatnonzero(self._histogram)
        if len(used) == 1:
            return Split(self.smallest, self.smallest + 1)
        # ends[j] = bytes in the first j used buckets; an interval is used[i:j] with i < j, never all of them.
        ends = np.concatenate([[0], np.cumsum(self._histogram[used])])
        target = val_fraction * self.num_bytes
        best: tuple[float, int, int] | None = None
        for i in range(len(used)):
            right = int(np.searchsorted(ends, ends[i] + target))
            for j in (right - 1, right):
                if not i < j <= len(used) or j - i == len(used):
                    continue
                error = abs(float(ends[j] - ends[i]) - target)
                if best is None or error < best[0]:
                    best = (error, i, j)
            if best is not None and best[0] <= _TOLERANCE * target:
                break
        assert best is not None, "two used buckets always leave one to each side"
        _, i, j = best
        shift = _HASH_BITS - _BUCKET_BITS
        return Split(int(used[i]) << shift, (int(used[j - 1]) + 1) << shift)


@dataclasses.dataclass(frozen=True)
class Split:
    """The rule that sends a document to its side.

    Attributes:
        low: a document whose 64-bit hash is at least this and below ``high`` is for validation.
        high: see ``low``.
        cut_fraction: set when the corpus is one document: the share at its end that is for validation.
    """

    low: int
    high: int
    cut_fraction: float | None = None

    def side(self, text: str) -> str:
        """``"train"`` or ``"val"`` for a document, by its content alone."""
        return self.side_of(document_digest(text))

    def side_of(self, digest: bytes) -> str:
        """`side` of the document with this `document_digest`."""
        return VAL if self.low <= _side_hash(digest) < self.high else TRAIN

    def parts(self, text: str) -> list[tuple[str, str]]:
        """The document as ``(side, text)``: one pair, or two where the only document is cut.

        Raises:
            UserError: the only document is too short to be cut.
        """
        if self.cut_fraction is None:
            return [(self.side(text), text)]
        return list(zip((TRAIN, VAL), cut_document(text, self.cut_fraction), strict=True))


def cut_document(text: str, val_fraction: float) -> tuple[str, str]:
    """Cut one document in two after a line break, or between characters where no line break serves.

    Args:
        text: the document.
        val_fraction: wanted share of characters in the second part.

    Returns:
        Two texts that give ``text`` when joined; neither is blank.

    Raises:
        UserError: no cut leaves text on both sides.
    """
    wanted = round(len(text) * (1 - val_fraction))
    before, after = text.rfind("\n", 0, wanted) + 1, text.find("\n", wanted) + 1
    places = sorted((place for place in (before, after) if place), key=lambda place: abs(place - wanted))
    for place in [*places, wanted]:
        first, second = text[:place], text[place:]
        if first.strip() and second.strip():
            return first, second
    raise UserError(
        f"the corpus is one document of {len(text)} characters, too short to split; give at least 2 distinct documents"
    )


class Sample:
    """Draws distinct documents at random, the draw decided by their content alone, in one pass.

    Holds the front of all documents shuffled by a hash: about ``max_bytes`` of memory plus one document.

    Attributes:
        complete: no document was left out yet, except repeats.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.complete = True
        self._heap: list[tuple[int, str]] = []
        self._kept: set[int] = set()
        self._total = 0

    def add(self, text: str) -> None:
        """Offer a document."""
        # Not the bytes that decide the side: those would not be random among the documents of one side.
        priority = int.from_bytes(document_digest(text)[8:16], "big")
        if priority in self._kept:
            return
        self._kept.add(priority)
        heapq.heappush(self._heap, (-priority, text))
        self._total += len(text.encode("utf-8"))
        while self._total - (size := len(self._heap[0][1].encode("utf-8"))) >= self.max_bytes:
            self._kept.remove(-heapq.heappop(self._heap)[0])
            self._total -= size
            self.complete = False

    def texts(self) -> list[str]:
        """The documents in the order of their hash, so that the order in which they came does not matter."""
        return [text for _, text in sorted(self._heap, reverse=True)]


def sample_documents(documents: Iterable[str], max_bytes: int) -> list[str]:
    """Draw documents of about ``max_bytes`` together; see `Sample`.

    Args:
        documents: any number of documents, read once.
        max_bytes: where to stop; the last document may go beyond it.
    """
    sample = Sample(max_bytes)
    for text in documents:
        sample.add(text)
    return sample.texts()
