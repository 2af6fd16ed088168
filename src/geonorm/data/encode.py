"""Documents to ids with any Hugging Face tokenizer: plain text only, and the end-of-text id never inside a document."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from geonorm.data.tokenizer import EOS, cut_pieces, eos_id, max_id, plain_copy
from geonorm.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BATCH_CHARACTERS = 1 << 20


def dtype_for(largest_id: int) -> np.dtype[Any]:
    """``uint16`` where every id up to ``largest_id`` fits, else ``uint32``; little-endian.

    Raises:
        UserError: a negative id or one beyond 32 bits.
    """
    if not 0 <= largest_id < 2**32:
        raise UserError(f"token id {largest_id} does not fit 32 bits; use a smaller vocabulary")
    return np.dtype("<u2") if largest_id < 2**16 else np.dtype("<u4")


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
        self.eos_id = eos_id(tokenizer, eos)
        self._tokenizer = plain_copy(tokenizer, eos)
        self.vocab_size = max_id(self._tokenizer) + 1
        self.dtype = dtype_for(self.vocab_size - 1)
        self._can_cut = _is_plain_byte_level(self._tokenizer)

    def encode(self, documents: Iterable[str]) -> Iterator[np.ndarray | None]:
        """Yield the ids of each document in turn, in `dtype`, the end-of-text id last.

        None stands for a document that cannot be told apart in the stream: its text gives no id or an error of the
        tokenizer, or the end-of-text token is an ordinary entry and the text spells it. About 1 MB of text is
        encoded at a time, so that memory follows the largest document and not their number.
        """
        pieces: list[str] = []
        ends: list[bool] = []
        waiting = 0
        begun: list[np.ndarray] = []
        for text in documents:
            cut = list(cut_pieces(text)) if self._can_cut else [text]
            for number, piece in enumerate(cut, start=1):
                pieces.append(piece)
                ends.append(number == len(cut))
                waiting += len(piece)
                if waiting >= _BATCH_CHARACTERS:
                    yield from self._batch(pieces, ends, begun)
                    pieces, ends, waiting = [], [], 0
        yield from self._batch(pieces, ends, begun)

    def _batch(self, pieces: list[str], ends: list[bool], begun: list[np.ndarray]) -> Iterator[np.ndarray | None]:
        for found, last in zip(self._ids(pieces), ends, strict=True):
            # An end-of-text id inside marks a document that is to be left out.
            begun.append(np.asarray([self.eos_id] if found is None else found, dtype=self.dtype))
            if not last:
                continue
            ids = np.concatenate([*begun, np.asarray([self.eos_id], dtype=self.dtype)])
            begun.clear()
            yield None if len(ids) == 1 or (ids[:-1] == self.eos_id).any() else ids

    def _ids(self, pieces: list[str]) -> list[list[int] | None]:
        try:
            return [found.ids for found in self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)]
        except Exception:  # the library raises nothing narrower where a vocabulary has no token for the unknown
            return [None] if len(pieces) == 1 else [self._ids([piece])[0] for piece in pieces]

    @functools.cached_property
    def unknown_id(self) -> int | None:
        """Id that stands for what the vocabulary cannot spell; None if there is none."""
        name = json.loads(self._tokenizer.to_str())["model"].get("unk_token")
        return None if name is None else self._tokenizer.token_to_id(name)


def _is_plain_byte_level(tokenizer: Tokenizer) -> bool:
    state = json.loads(tokenizer.to_str())
    pre = state["pre_tokenizer"] or {}
    plain = pre.get("type") == "ByteLevel" and pre.get("use_regex", True) and not pre.get("add_prefix_space")
    # Added tokens that are not special can span blanks, and a normalizer can look across a cut.
    return bool(plain and state["normalizer"] is None and all(token["special"] for token in state["added_tokens"]))
