"""Train, validation and test by document: a hash of the content or of the group decides, so that neither straddles."""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import unicodedata
from collections.abc import Iterable

import numpy as np

from geonorm.data.records import Document
from geonorm.errors import UserError

TRAIN, VAL, TEST = SIDES = ("train", "val", "test")

_BUCKET_BITS = 16
_SHIFT = 64 - _BUCKET_BITS
# An interval of hashes this near to the wanted number of bytes is near enough; the first such one is taken, so
# that the side of a document seldom changes when documents are added.
_TOLERANCE = 0.1
# Ends that are tried for one beginning of an interval, where it first held the wanted number of bytes.
_MOST_ENDS = 200


def document_digest(text: str) -> bytes:
    """SHA-256 of the document's UTF-8 bytes, followed by which of its characters have labels where not all do."""
    digest = hashlib.sha256(text.encode("utf-8"))
    if isinstance(text, Document) and text.labelled is not None:
        digest.update(f"\0{text.labelled} {text.special}".encode())
    return digest.digest()


def normalized(text: str) -> str:
    """The text as duplicates are told: compatibility characters, case and blanks make no difference."""
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split())


def num_bytes(text: str) -> int:
    """Bytes of the text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8"))


def text_key(text: str) -> int:
    """64 bits of a hash of the normalised text: the same for copies of a document."""
    return _hash64(normalized(text))


def side_key(text: str) -> int:
    """64 bits that decide the side of a document: a hash of its group, or `text_key` if it has none."""
    group = text.group if isinstance(text, Document) else None
    return text_key(text) if group is None else _hash64(f"group\0{group}")


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")


class Survey:
    """What one pass over the documents tells: counts, a content fingerprint and where to split.

    Memory is constant: a histogram of bytes over 65,536 ranges of the hash stands for the documents.
    """

    def __init__(self) -> None:
        self.num_documents = 0
        self.num_bytes = 0
        self.smallest: int | None = None
        self.largest: int | None = None
        self._digest: bytes | None = None
        self._alike = True
        self._histogram = np.zeros(1 << _BUCKET_BITS, dtype=np.int64)
        self._fingerprint = hashlib.sha256()

    def add(self, text: str) -> None:
        """Count one document."""
        self.add_digest(document_digest(text), side_key(text), num_bytes(text))

    def add_digest(self, digest: bytes, key: int, size: int) -> None:
        """Count one document of ``size`` bytes by its `document_digest` and its `side_key`."""
        self.num_documents += 1
        self.num_bytes += size
        self.smallest = key if self.smallest is None else min(key, self.smallest)
        self.largest = key if self.largest is None else max(key, self.largest)
        self._histogram[key >> _SHIFT] += size
        self._digest = digest if self._digest is None else self._digest
        self._alike &= digest == self._digest
        self._fingerprint.update(digest)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the digests of all documents in their order, as 64 hex digits."""
        return self._fingerprint.hexdigest()

    def split(
        self, val_fraction: float, test_fraction: float = 0.0, *, min_documents: int = 1, max_share: float = 1.0
    ) -> Split:
        """Choose intervals of hashes for the held-out sides.

        Documents with one key (copies, or a group) count as one. Those whose hashes share their first 16 bits count as
        one too, which makes both limits a little stricter than they say.

        Args:
            val_fraction: wanted share of validation bytes, above 0 and at most 0.5.
            test_fraction: wanted share of test bytes; 0 for no such side.
            min_documents: fewest documents of a held-out side. With 1, a corpus of one document is cut.
            max_share: largest share of a held-out side's bytes that one document may have.

        Raises:
            UserError: there is no document, all are of one group, or no interval keeps to the limits.
        """
        if self.smallest is None or self.largest is None:
            raise UserError("no document with text was found; give files that have text in them")
        if self.smallest == self.largest and min_documents <= 1:
            if not self._alike:
                raise UserError(
                    "all documents are of one group, or copies but for blanks and case, so nothing can be held out "
                    "that is not of it; give more groups, leave `group_by` out, or use `dedup`"
                )
            return Split({}, {VAL: val_fraction, TEST: test_fraction} if test_fraction else {VAL: val_fraction})
        used = np.flatnonzero(self._histogram)
        sizes = self._histogram[used]
        free = [(0, len(used))]
        chosen: dict[str, tuple[int, int]] = {}
        for side, fraction in ((VAL, val_fraction), (TEST, test_fraction)):
            if not fraction:
                continue
            target = fraction * self.num_bytes
            places = [
                place
                for low, high in reversed(free)
                # The train side needs a document as well.
                if (place := _interval(sizes, low, high, len(used) - 1, target, min_documents, max_share))
            ]
            if not places:
                raise self._no_split(side, fraction, sizes, min_documents, max_share)
            first, last = places[0]
            chosen[side] = first, last
            free = [(0, first), (last, len(used))]
        if sum(last - first for first, last in chosen.values()) == len(used):
            raise UserError(
                f"the text has {len(used)} documents (or groups) and all would be held out; give"
                f" at least {len(chosen) + 1}"
            )
        return Split({s: (int(used[i]) << _SHIFT, (int(used[j - 1]) + 1) << _SHIFT) for s, (i, j) in chosen.items()})

    def _no_split(
        self, side: str, fraction: float, sizes: np.ndarray, min_documents: int, max_share: float
    ) -> UserError:
        if len(sizes) == 1:
            return UserError(
                "the corpus is one document (or group), so nothing can be held out that is not of it; give more "
                "documents, or min_documents 1 to cut its end off"
            )
        name = {VAL: "validation", TEST: "test"}[side]
        return UserError(
            f"no {fraction:.0%} of this text for the {name} side has at least {min_documents} documents (or groups) of "
            f"which none is more than {max_share:.0%} of it: there are {len(sizes)}, the largest is "
            f"{sizes.max() / self.num_bytes:.1%} of the text; hold out more (val_fraction, test_fraction), lower "
            "min_documents, raise max_share, or give more documents"
        )


def _interval(
    sizes: np.ndarray, low: int, high: int, most: int, target: float, min_documents: int, max_share: float
) -> tuple[int, int] | None:
    """The first stretch of ``sizes[low:high]`` that is near to ``target`` and keeps to the limits, else the nearest."""
    ends = np.concatenate([[0], np.cumsum(sizes)])
    best: tuple[float, int, int] | None = None
    for first in range(low, high):
        start = max(first + min_documents, int(np.searchsorted(ends, ends[first] + target)) - 1, first + 1)
        for last in range(start, min(high, first + most, start + _MOST_ENDS) + 1):
            total = int(ends[last] - ends[first])
            if total > 2 * target and last > start + 1 and min_documents > 1:
                break
            error = abs(total - target)
            if best is not None and total > target and error >= best[0]:
                break
            if sizes[first:last].max() <= max_share * total and (best is None or error < best[0]):
                best = error, first, last
        if best is not None and best[0] <= _TOLERANCE * target:
            break
    return None if best is None else best[1:]


@dataclasses.dataclass(frozen=True)
class Split:
    """The rule that sends a document to its side.

    Attributes:
        intervals: by held-out side, the interval ``[low, high)`` of 64-bit keys whose documents it holds.
        cut: set when the corpus is one document: the share at its end that each held-out side gets, in this order.
    """

    intervals: dict[str, tuple[int, int]]
    cut: dict[str, float] = dataclasses.field(default_factory=dict)

    def side(self, text: str) -> str:
        """``"train"``, ``"val"`` or ``"test"`` for a document, by its group or its content alone."""
        return self.side_of(side_key(text))

    def side_of(self, key: int) -> str:
        """`side` of the documents with this `side_key`."""
        return next((side for side, (low, high) in self.intervals.items() if low <= key < high), TRAIN)

    def parts(self, text: str) -> list[tuple[str, str]]:
        """The document as ``(side, text)``: one pair, or one a side where the only document is cut.

        Raises:
            UserError: the only document is too short to be cut.
        """
        if not self.cut:
            return [(self.side(text), text)]
        shares = [1 - sum(self.cut.values()), *self.cut.values()]
        return list(zip((TRAIN, *self.cut), cut_document(text, shares), strict=True))


def cut_document(text: str, shares: Iterable[float]) -> list[str]:
    """Cut one document after line breaks, or between characters where no line break serves.

    Args:
        text: the document.
        shares: wanted share of characters of each piece, one in sum.

    Returns:
        Pieces that give ``text`` when joined; none is blank.

    Raises:
        UserError: no cut leaves text in every piece.
    """
    shares = list(shares)
    pieces, rest, left = [], text, 1.0
    for share in shares[:-1]:
        piece, rest = _cut_in_two(rest, share / left, text, len(shares))
        pieces.append(piece)
        left -= share
    return [*pieces, rest]


def _cut_in_two(text: str, share: float, whole: str, num_pieces: int) -> tuple[str, str]:
    wanted = round(len(text) * share)
    before, after = text.rfind("\n", 0, wanted) + 1, text.find("\n", wanted) + 1
    places = sorted((place for place in (before, after) if place), key=lambda place: abs(place - wanted))
    # A line break far off would give a side too much: a text of one line is cut between characters.
    places = [place for place in places if abs(place - wanted) <= len(whole) / 20] or [wanted]
    for place in [*places, wanted]:
        first, second = text[:place], text[place:]
        if first.strip() and second.strip():
            return first, second
    raise UserError(
        f"the corpus is one document of {len(whole)} characters, too short to split; give at least {num_pieces} "
        "distinct documents"
    )


class Sample:
    """Draws distinct documents at random, the draw decided by their content alone, in one pass.

    Holds the front of all documents shuffled by a hash: about ``max_bytes`` plus one document, which may go beyond it.

    Attributes:
        complete: no document was left out yet, except repeats.
    """

    def __init__(self, max_bytes: int, documents: Iterable[str] = ()) -> None:
        self.max_bytes = max_bytes
        self.complete = True
        self._heap: list[tuple[int, str]] = []
        self._kept: set[int] = set()
        self._total = 0
        for text in documents:
            self.add(text)

    def add(self, text: str) -> None:
        """Offer a document."""
        # Not the bytes that decide the side: those would not be random among the documents of one side.
        priority = int.from_bytes(document_digest(text)[8:16], "big")
        if priority in self._kept:
            return
        self._kept.add(priority)
        heapq.heappush(self._heap, (-priority, text))
        self._total += num_bytes(text)
        while self._total - (size := num_bytes(self._heap[0][1])) >= self.max_bytes:
            self._kept.remove(-heapq.heappop(self._heap)[0])
            self._total -= size
            self.complete = False

    def texts(self) -> list[str]:
        """The documents in the order of their hash, so that the order in which they came does not matter."""
        return [text for _, text in sorted(self._heap, reverse=True)]
