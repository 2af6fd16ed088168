"""Documents to ids with any Hugging Face tokenizer: plain text only, and the end-of-text id never inside a document."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np

from geonorm.data.records import Document
from geonorm.data.tokenizer import EOS, cut_pieces, eos_id, max_id, plain_copy
from geonorm.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

_BATCH_CHARACTERS = 1 << 20
_Item = TypeVar("_Item")


def dtype_for(largest_id: int) -> np.dtype[Any]:
    """``uint16`` where every id up to ``largest_id`` fits, else ``uint32``; little-endian.

    Raises:
        UserError: a negative id or one beyond 32 bits.
    """
    if not 0 <= largest_id < 2**32:
        raise UserError(f"token id {largest_id} does not fit 32 bits; use a smaller vocabulary")
    return np.dtype("<u2") if largest_id < 2**16 else np.dtype("<u4")


class Encoded(NamedTuple):
    """A document as ids, ``[num_tokens]``, the end-of-text id last; and which have a label, bool; None if all have."""

    ids: np.ndarray
    mask: np.ndarray | None


class Encoder:
    """Encodes documents one after another, each followed by exactly one end-of-text id.

    Special tokens that the tokenizer would add by itself are not added, those spelled out in a text are encoded as
    plain text, and its truncation and padding are off; the tokenizer that was given is not changed.

    Attributes:
        eos_id: id of the end-of-text token.
        vocab_size: largest id plus one.
        dtype: what holds every id.
    """

    def __init__(self, tokenizer: Tokenizer, eos: str = EOS) -> None:
        """Prepare a tokenizer.

        Raises:
            UserError: the tokenizer has no end-of-text token, or ids beyond 32 bits.
        """
        self._eos, self.eos_id = eos, eos_id(tokenizer, eos)
        self._tokenizer = plain_copy(tokenizer, eos)
        self.vocab_size = max_id(self._tokenizer) + 1
        self.dtype = dtype_for(self.vocab_size - 1)
        self._can_cut = _is_plain_byte_level(self._tokenizer)

    def encode(self, documents: Iterable[str]) -> Iterator[Encoded | None]:
        """Yield the ids of each document in turn, in `dtype`, the end-of-text id last.

        In a document of which only parts are labelled, a token has a label if one of its characters has; the
        end-of-text id has one if nothing but blanks follows the last labelled part.

        None stands for a document that cannot be told apart in the stream: its text gives no id or an error of the
        tokenizer, or the end-of-text token is an ordinary entry and the text spells it. About 1 MB of text is
        encoded at a time, so that memory follows the largest document and not their number.
        """
        for (marked, special), run in itertools.groupby(documents, key=_kind):
            if not marked:
                for ids in self._plain(run):
                    yield None if ids is None else Encoded(ids, None)
            else:
                yield from self._marked(cast(Iterator[Document], run), special)

    def _marked(self, documents: Iterator[Document], special: bool) -> Iterator[Encoded | None]:
        tokenizer = self._with_special if special else self._with_offsets
        for batch in _batches(documents, len):
            for document, found in zip(batch, _each(tokenizer.encode_batch, batch), strict=True):
                if found is None or not found.ids or self.eos_id in found.ids:
                    yield None
                else:
                    ids = np.asarray([*found.ids, self.eos_id], dtype=self.dtype)
                    yield Encoded(ids, _mask(document, found.offsets))

    @functools.cached_property
    def _with_offsets(self) -> Tokenizer:
        copy = plain_copy(self._tokenizer, self._eos)
        # It would add nothing here, but takes blanks out of the characters that a token is said to stand for.
        copy.post_processor = None  # type: ignore[assignment]
        return copy

    @functools.cached_property
    def _with_special(self) -> Tokenizer:
        copy = plain_copy(self._with_offsets, self._eos)
        copy.encode_special_tokens = False
        return copy

    def _plain(self, documents: Iterable[str]) -> Iterator[np.ndarray | None]:
        cut = ((piece, number == 0) for text in documents for number, piece in enumerate(self._pieces(text)))
        begun: list[np.ndarray] = []
        for batch in _batches(cut, lambda item: len(item[0])):
            for (_, first), found in zip(
                batch, _each(self._tokenizer.encode_batch_fast, [piece for piece, _ in batch]), strict=True
            ):
                if first and begun:
                    yield self._joined(begun)
                    begun = []
                # An end-of-text id inside marks a document that is to be left out.
                begun.append(np.asarray([self.eos_id] if found is None else found.ids, dtype=self.dtype))
        if begun:
            yield self._joined(begun)

    def _pieces(self, text: str) -> Iterable[str]:
        return cut_pieces(text) if self._can_cut else (text,)

    def _joined(self, pieces: list[np.ndarray]) -> np.ndarray | None:
        ids = np.concatenate([*pieces, np.asarray([self.eos_id], dtype=self.dtype)])
        return None if len(ids) == 1 or (ids[:-1] == self.eos_id).any() else ids

    @functools.cached_property
    def unknown_id(self) -> int | None:
        """Id that stands for what the vocabulary cannot spell; None if there is none."""
        name = json.loads(self._tokenizer.to_str())["model"].get("unk_token")
        return None if name is None else self._tokenizer.token_to_id(name)


def _kind(text: str) -> tuple[bool, bool]:
    """Whether only parts of a text have labels, and whether it spells special tokens."""
    return (text.labelled is not None, text.special) if isinstance(text, Document) else (False, False)


def _batches(items: Iterable[_Item], size: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    waiting = 0
    for item in items:
        batch.append(item)
        waiting += size(item)
        if waiting >= _BATCH_CHARACTERS:
            yield batch
            batch, waiting = [], 0
    if batch:
        yield batch


def _each(encode: Callable[..., list[Encoding]], texts: Sequence[str]) -> list[Encoding | None]:
    """Encode a batch; None for a text that the tokenizer cannot take."""
    try:
        return list(encode(texts, add_special_tokens=False))
    except Exception:  # the library raises nothing narrower where a vocabulary has no token for the unknown
        return [None] if len(texts) == 1 else [_each(encode, [text])[0] for text in texts]


def _mask(document: Document, offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    spans = document.labelled or ()
    # How many labelled characters lie before each place.
    before = np.zeros(len(document) + 2, dtype=np.int64)
    for first, last in spans:
        before[first + 1 : last + 1] = 1
    before = np.cumsum(before)
    first, last = np.asarray(offsets, dtype=np.int64).T
    labelled = before[np.maximum(last, first + 1)] > before[first]
    ended = bool(spans) and not document[spans[-1][1] :].strip()
    return np.append(labelled, ended)


def _is_plain_byte_level(tokenizer: Tokenizer) -> bool:
    state = json.loads(tokenizer.to_str())
    pre = state["pre_tokenizer"] or {}
    plain = pre.get("type") == "ByteLevel" and pre.get("use_regex", True) and not pre.get("add_prefix_space")
    # Added tokens that are not special can span blanks, and a normalizer can look across a cut.
    return bool(plain and state["normalizer"] is None and all(token["special"] for token in state["added_tokens"]))
