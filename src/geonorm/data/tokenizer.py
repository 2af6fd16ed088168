"""Byte-level BPE: training, cutting long text where no token can span, and the bytes behind each token."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from geonorm.errors import UserError, check_count, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EOS = "<|endoftext|>"
MIN_VOCAB_SIZE = 257

# Between a letter, digit or underscore and a single blank or line feed followed by another such character, the
# GPT-2 pattern always ends one pre-token and starts the next, so cutting there changes no token.
_SAFE_CUT = re.compile(r"(?<=\w)(?=[ \n]\w)")
_PIECE_CHARACTERS = 1 << 16

# How tokenizers with a fallback to bytes spell one.
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer whose decoding gives every string back exactly.

    Args:
        texts: the training sample.
        vocab_size: wanted number of ids: 256 bytes, one end-of-text token, the rest merges. A small sample may
            yield fewer.

    Returns:
        A tokenizer that knows the end-of-text token as special, but reads its spelling inside a text as plain
        text (``encode_special_tokens`` is set; `load_tokenizer` sets it again).

    Raises:
        UserError: ``vocab_size`` below 257.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    check_count("vocab_size", vocab_size, MIN_VOCAB_SIZE)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in cut_pieces(text)), trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Open a ``tokenizer.json`` so that the spelling of a special token inside a text is read as plain text.

    ``Tokenizer.from_file`` alone does not: that switch is not part of the file.

    Raises:
        UserError: no such file, or not a tokenizer.
    """
    from tokenizers import Tokenizer

    path = Path(path)
    if not path.is_file():
        raise UserError(f"no such tokenizer file: {path}; check the path")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(
            f"cannot read the tokenizer {path}: {first_line(error, with_class=True)}; give a tokenizer.json"
        ) from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def plain_copy(tokenizer: Tokenizer, eos: str) -> Tokenizer:
    """A copy that reads text as text: no padding, no truncation, spellings of special tokens are plain text.

    The end-of-text token becomes a special one if it was not, because only those are held apart from text.
    """
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.to_str())
    added = copy.get_added_tokens_decoder().get(eos_id(copy, eos))
    if added is None or not added.special:
        copy.add_special_tokens([eos])
    copy.encode_special_tokens = True
    copy.no_padding()
    copy.no_truncation()
    return copy


def eos_id(tokenizer: Tokenizer, eos: str = EOS) -> int:
    """Id of the end-of-text token.

    Raises:
        UserError: the tokenizer has no such token.
    """
    found = tokenizer.token_to_id(eos)
    if found is None:
        raise UserError(f"the tokenizer has no end-of-text token {eos!r}; add it as a special token, or name its own")
    return found


def max_id(tokenizer: Tokenizer) -> int:
    """Largest id that the tokenizer can give, added tokens included."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values())


def cut_pieces(text: str, size: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a long text into pieces of about ``size`` characters that encode to the same tokens as the whole.

    Exact for the pre-tokenizer used here (GPT-2's pattern, no prefix space). A stretch without a blank between
    words is never cut, so a piece can be longer.
    """
    start = 0
    while len(text) - start > size and (cut := _SAFE_CUT.search(text, start + size)):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def token_byte_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """Number of UTF-8 bytes that each id stands for.

    Exact for byte-level tokenizers: the sum over the tokens of a text is the number of bytes of the text. For the
    others it is the length of the token as it is spelled, a blank for each ``\u2581``, which misses what their
    normalizer and pre-tokenizer add or drop.

    Returns:
        int64 array ``[largest id + 1]``; special tokens and unused ids count 0.
    """
    lengths = np.zeros(max_id(tokenizer) + 1, dtype=np.int64)
    added = tokenizer.get_added_tokens_decoder()
    state = json.loads(tokenizer.to_str())
    # The byte-level alphabet spells every byte as one character.
    byte_level = any('"ByteLevel"' in json.dumps(state[part]) for part in ("pre_tokenizer", "decoder"))
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(token.encode("utf-8"))
        elif byte_level:
            lengths[index] = len(token)
        elif _BYTE_TOKEN.fullmatch(token):
            lengths[index] = 1
        else:
            lengths[index] = len(token.removeprefix("##").replace("\u2581", " ").encode("utf-8"))
    return lengths
