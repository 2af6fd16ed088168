"""Token files and the windows cut from them."""

import json
import pickle

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from geonorm.data import TokenFile, Windows
from geonorm.data.encode import dtype_for
from geonorm.data.token_file import write_tokens
from geonorm.data.tokenizer import EOS, train_tokenizer
from geonorm.data.windows import spread_windows
from geonorm.errors import UserError

SAMPLE = "The quick brown fox jumps over the lazy dog, again and again.\n" * 30


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([SAMPLE], 300)


def word_tokenizer(size, *extra):
    """One id per word: ``w0`` to ``w{size - 1}``; then added tokens."""
    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(extra))
    return made


def numbered(tmp_path, count):
    """A token file that holds 0, 1, 2 ... and a last end-of-text token."""
    words = " ".join(f"w{number}" for number in range(count - 1))
    return write_tokens([words], word_tokenizer(count, EOS), tmp_path / "t")


@pytest.mark.parametrize(
    ("largest", "dtype"), [(65534, "uint16"), (65535, "uint16"), (65536, "uint32"), (70000, "uint32")]
)
def test_ids_around_two_bytes_round_trip(tmp_path, largest, dtype):
    assert dtype_for(largest).name == dtype
    made = word_tokenizer(largest, EOS)  # the added token gets the id `largest`
    file = write_tokens([f"w1 w{largest - 1}", "w2"], made, tmp_path / "t")
    assert file.dtype.name == dtype
    assert file.tokens.tolist() == [1, largest - 1, largest, 2, largest]
    assert file.metadata["vocab_size"] == largest + 1
    assert np.dtype(json.loads((tmp_path / "t.json").read_text())["dtype"]) == file.dtype


def test_one_eos_a_document_and_blank_ones_counted(tmp_path, tokenizer):
    documents = ["", "a", " ", "b c\n", "\n\t\n", f"spelled {EOS} inside"]
    file = write_tokens(documents, tokenizer, tmp_path / "t")
    eos = file.metadata["eos_id"]
    ends = np.flatnonzero(file.tokens == eos)
    parts = [part[:-1] for part in np.split(file.tokens, ends + 1)[:-1]]
    assert [tokenizer.decode(part, skip_special_tokens=False) for part in parts] == ["a", "b c\n", documents[-1]]
    assert file.metadata["num_documents"] == 3
    assert file.metadata["skipped_documents"] == 3
    assert file.metadata["num_bytes"] == sum(len(text) for text in documents if text.strip())
    assert file.tokens[-1] == eos


def test_a_tokenizer_that_appends_eos_by_itself_gives_one(tmp_path, tokenizer):
    appending = Tokenizer.from_str(tokenizer.to_str())
    appending.post_processor = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, 0)])
    appending.enable_truncation(2)
    appending.enable_padding(length=7)
    assert appending.encode("a fox").ids[1] == 0
    plain, other = (write_tokens(["a fox", "b"], made, tmp_path / str(id(made))) for made in (tokenizer, appending))
    assert plain.tokens.tolist() == other.tokens.tolist()


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no end-of-text token '<\|endoftext\|>'; add it"):
        write_tokens(["w1"], word_tokenizer(3), tmp_path / "t")
    assert write_tokens(["w1"], word_tokenizer(3, "</s>"), tmp_path / "t", eos="</s>").tokens.tolist() == [1, 3]


def test_long_documents_encode_as_if_whole(tmp_path, tokenizer):
    text = SAMPLE * 700
    assert len(text) > 1_000_000
    file = write_tokens([text, "x"], tokenizer, tmp_path / "t")
    assert file.tokens.tolist() == [*tokenizer.encode(text).ids, 0, *tokenizer.encode("x").ids, 0]


def test_nothing_appears_when_writing_fails(tmp_path, tokenizer):
    def documents():
        yield "text"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_tokens(documents(), tokenizer, tmp_path / "t")
    with pytest.raises(UserError, match="no document with text"):
        write_tokens([" "], tokenizer, tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_refused(tmp_path, tokenizer):
    path = write_tokens(["some text"], tokenizer, tmp_path / "t").path
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(UserError, match=rf"has {len(data) - 1} bytes but its metadata says .*\({len(data)}\)"):
        TokenFile(path)
    path.write_bytes(data)
    (tmp_path / "t.json").write_text('{"format": 1}')
    with pytest.raises(UserError, match="is not metadata of a token file"):
        TokenFile(path)
    (tmp_path / "t.json").unlink()
    with pytest.raises(UserError, match=r"no such token file: .*t\.json"):
        TokenFile(path)


def test_token_file_is_read_only_and_can_be_sent(tmp_path):
    file = numbered(tmp_path, 50)
    assert len(file) == file.num_tokens == 50
    with pytest.raises(ValueError, match="read-only"):
        file.tokens[0] = 1
    sent = pickle.loads(pickle.dumps(file))
    assert sent.path == file.path
    assert (sent.tokens == file.tokens).all()


def test_every_epoch_visits_every_window_once(tmp_path):
    windows = Windows(numbered(tmp_path, 100), length=7, seed=3)
    assert windows.num_windows == 14
    run = windows.batch(0, 14 * 3)
    assert run.dtype == np.int64
    assert run.shape == (42, 8)
    assert (np.diff(run, axis=1) == 1).all()
    epochs = run[:, 0].reshape(3, 14)
    assert (np.sort(epochs, axis=1) == np.arange(14) * 7).all()
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_order_depends_on_position_and_seed_alone(tmp_path):
    file = numbered(tmp_path, 100)
    windows = Windows(file, length=7, seed=3)
    run = windows.batch(0, 60)
    assert (np.concatenate([windows.batch(start, 4) for start in range(0, 60, 4)]) == run).all()
    assert (Windows(file, length=7, seed=3).batch(37, 20) == run[37:57]).all()
    assert (Windows(file, length=7, seed=4).batch(0, 60) != run).any()
    far = windows.batch(10**12, 3)
    assert (far == Windows(file, length=7, seed=3).batch(10**12 + 0, 3)).all()


def test_the_order_of_a_seed_never_changes(tmp_path):
    first = Windows(numbered(tmp_path, 100), length=7, seed=3).batch(0, 14)[:, 0] // 7
    assert first.tolist() == EPOCH_0_OF_SEED_3


EPOCH_0_OF_SEED_3 = [13, 11, 4, 6, 1, 5, 7, 0, 3, 12, 8, 9, 2, 10]


@pytest.mark.parametrize(("count", "shares"), [(5, [2, 2, 1]), (9, [3, 3, 3]), (20, [3, 5, 12]), (99, [3, 5, 25])])
def test_held_out_windows_are_spread_over_the_documents(tmp_path, count, shares):
    # As bytes, with an end-of-text id each: 3, 5 and 25 windows of length 10 begin in them.
    file = write_tokens(["a" * 21, "b" * 52, "c" * 260], train_tokenizer(["x"], 257), tmp_path / "v.tokens")
    found = spread_windows(file, np.array([7, 3, 5]), 10, count)
    assert found.ids.shape == (sum(shares), 11)
    assert [int((found.groups == group).sum()) for group in (7, 3, 5)] == shares
    first = {7: ord("a"), 3: ord("b"), 5: ord("c")}
    tokenizer = train_tokenizer(["x"], 257)
    for ids, group in zip(found.ids, found.groups.tolist(), strict=True):
        assert tokenizer.id_to_token(int(ids[0])) in (chr(first[group]), EOS)


def test_smallest_corpus(tmp_path):
    file = numbered(tmp_path, 11)
    assert Windows(file, length=10).batch(0, 2).tolist() == [list(range(10)) + [11]] * 2
    with pytest.raises(UserError, match=r"holds 11 tokens, but one window of length 11 needs 12; use a shorter"):
        Windows(file, length=11)
    with pytest.raises(UserError, match="`length`"):
        Windows(file, length=0)
    with pytest.raises(UserError, match="`start`"):
        Windows(file, length=2).batch(-1, 2)
