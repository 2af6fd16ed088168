"""Byte-level BPE: exact round trips, safe cuts, bytes per token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geonorm.data.tokenizer import EOS, cut_pieces, eos_id, token_byte_lengths, train_tokenizer
from geonorm.errors import UserError

SAMPLE = ["It's a sample of plain text, 123 words\n\n  or fewer; don't count.\n" * 20, "naïve 🙂 日本語 " * 30]
TOKENIZER = train_tokenizer(SAMPLE, 300)
BYTES = train_tokenizer(SAMPLE, 257)
LENGTHS = {id(tokenizer): token_byte_lengths(tokenizer) for tokenizer in (TOKENIZER, BYTES)}
TEXT = st.one_of(
    st.text(), st.text(alphabet="ab1_'s \n\t\r\u2028\u00a0\x1c.é"), st.just(f"a{EOS}b"), st.sampled_from(SAMPLE)
)


@settings(max_examples=300, deadline=None)
@given(TEXT)
@pytest.mark.parametrize("tokenizer", [TOKENIZER, BYTES], ids=["bpe", "bytes"])
def test_round_trip_and_bytes(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert eos_id(tokenizer) not in ids
    assert LENGTHS[id(tokenizer)][ids].sum() == len(text.encode("utf-8"))


@settings(max_examples=500, deadline=None)
@given(TEXT, st.integers(1, 20))
def test_cutting_changes_no_token(text, size):
    pieces = list(cut_pieces(text, size))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in TOKENIZER.encode(piece).ids] == TOKENIZER.encode(text).ids


def test_long_prose_is_cut():
    assert len(list(cut_pieces("one two\n" * 1000, 100))) > 50


def test_vocabulary_sizes():
    assert BYTES.get_vocab_size() == 257
    assert TOKENIZER.get_vocab_size() == 300
    assert LENGTHS[id(TOKENIZER)].shape == (300,)
    assert LENGTHS[id(TOKENIZER)][eos_id(TOKENIZER)] == 0
    assert (LENGTHS[id(BYTES)] == 1).sum() == 256
    with pytest.raises(UserError, match="`vocab_size` must be a whole number of at least 257, got 256"):
        train_tokenizer(SAMPLE, 256)


def test_training_is_deterministic():
    assert train_tokenizer(SAMPLE, 300).to_str() == TOKENIZER.to_str()
