"""Tokenizers made elsewhere, from opening them to the corpus."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from corpora import FEW, write_documents
from geonorm.data import Corpus, prepare
from geonorm.data.given_tokenizer import open_tokenizer
from geonorm.data.tokenizer import EOS, load_tokenizer, train_tokenizer
from geonorm.errors import UserError


def words(size, *special):
    """One id per word: ``w0`` to ``w{size - 1}``; then special tokens."""
    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(special))
    return made


def saved(tokenizer, path):
    tokenizer.save(str(path))
    return path


def write(folder, *texts):
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return folder


def ids(corpus):
    return sorted(
        part.tolist()
        for side in (corpus.train, corpus.val, corpus.test)
        for part in np.split(side.tokens, np.flatnonzero(side.tokens == corpus.eos_id) + 1)
        if len(part)
    )


@pytest.mark.parametrize(("size", "dtype"), [(65_535, "uint16"), (65_536, "uint32"), (70_000, "uint32")])
def test_large_vocabularies_round_trip_and_the_dtype_is_stored(tmp_path, size, dtype):
    # One added token on top: its id is `size`, so 65,536 entries and one more do not fit two bytes.
    path = saved(words(size, EOS), tmp_path / "tokenizer.json")
    data = write(tmp_path / "data", f"w1 w{size - 1}", "w2 w3", "w4 w65533")
    corpus = prepare([data], **FEW, tokenizer=path, out=tmp_path / "out")
    assert ids(corpus) == [[1, size - 1, size], [2, 3, size], [4, 65_533, size]]
    assert corpus.vocab_size == size + 1 == len(corpus.token_bytes)
    assert corpus.train.dtype.name == corpus.val.dtype.name == dtype
    assert np.dtype(json.loads((corpus.path / "val.tokens.json").read_text())["dtype"]).name == dtype


@pytest.mark.parametrize("largest", [65_535, 65_536, 70_000])
def test_ids_at_the_edge_of_two_bytes(tmp_path, largest):
    path = saved(words(largest + 1, EOS), tmp_path / "tokenizer.json")
    data = write(tmp_path / "data", f"w{largest} w{largest - 1}", "w7", "w8")
    assert ids(prepare([data], **FEW, tokenizer=path, out=tmp_path / "out")) == [
        [7, largest + 1],
        [8, largest + 1],
        [largest, largest - 1, largest + 1],
    ]


def test_without_an_end_of_text_token_it_is_refused(tmp_path):
    data = write(tmp_path / "data", "", " ", "w1", "w2", "w3")
    path = saved(words(9, "<pad>", "</s>"), tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"no end-of-text token that is named; name its own with `eos` .*</s>, <pad>\)"):
        prepare([data], **FEW, tokenizer=path, out=tmp_path / "out")
    with pytest.raises(UserError, match="has no token '<eos>'; name its own with `eos`"):
        prepare([data], **FEW, tokenizer=path, eos="<eos>", out=tmp_path / "out")
    with pytest.raises(UserError, match="give `tokenizer` as well"):
        prepare([data], eos="</s>", out=tmp_path / "out")
    corpus = prepare([data], **FEW, tokenizer=path, eos="</s>", out=tmp_path / "out")
    assert ids(corpus) == [[1, 10], [2, 10], [3, 10]]
    assert corpus.description["skipped"] == {"blank document": 1, "empty file": 1}


def test_one_that_appends_its_end_of_text_gives_one(tmp_path):
    appending = words(9, "<s>", "</s>")
    appending.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 9), ("</s>", 10)]
    )
    appending.enable_truncation(3)
    appending.enable_padding(length=8)
    assert len(appending.encode("w1").ids) == 8
    folder = tmp_path / "model"
    folder.mkdir()
    saved(appending, folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    corpus = prepare(
        [write(tmp_path / "data", "w1 w2 w3 w4", "w5", "w6")], **FEW, tokenizer=folder, out=tmp_path / "out"
    )
    assert ids(corpus) == [[1, 2, 3, 4, 10], [5, 10], [6, 10]]
    assert corpus.description["eos"] == "</s>"
    assert corpus.description["tokenizer"] == "model"


@pytest.mark.parametrize("given", ["trained", "special", "added"])
def test_a_spelled_end_of_text_token_stays_text(tmp_path, given):
    texts = [f"one {EOS} two", f"{EOS}", "three", f"four{EOS}"]
    data = write(tmp_path / "data", *texts)
    options = {"vocab_size": 257}
    if given != "trained":
        made = train_tokenizer(["some text"], 257)
        made = Tokenizer.from_str(json.dumps({**json.loads(made.to_str()), "added_tokens": []}))
        name = EOS
        made.add_special_tokens([name]) if given == "special" else made.add_tokens([name])
        options = {"tokenizer": saved(made, tmp_path / "tokenizer.json")}
    corpus = prepare([data], val_fraction=0.25, test_fraction=0.25, **FEW, out=tmp_path / "out", **options)
    found = ids(corpus)
    assert len(found) == sum(corpus.description["num_documents"].values()) == 4
    for opened in (corpus.tokenizer, load_tokenizer(corpus.tokenizer_path), Corpus.load(corpus.path).tokenizer):
        assert corpus.eos_id not in opened.encode(texts[0]).ids
        decoded = {opened.decode(part[:-1], skip_special_tokens=False) for part in found}
        assert decoded == set(texts)
    # What the file alone gives: the reason for `load_tokenizer`.
    assert corpus.eos_id in Tokenizer.from_file(str(corpus.tokenizer_path)).encode(texts[0]).ids
    reused = prepare(
        [data], tokenizer=corpus.path, val_fraction=0.25, test_fraction=0.25, **FEW, out=tmp_path / "again"
    )
    assert ids(reused) == found


def test_text_that_is_the_token_is_left_out_and_counted(tmp_path):
    made = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "b": 2}))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path = saved(made, tmp_path / "tokenizer.json")
    data = write(
        tmp_path / "data", "a b", "a </s> b", "b", "a", "zzz"
    )  # zzz gives no id: there is none for the unknown
    corpus = prepare([data], **FEW, tokenizer=path, eos="</s>", out=tmp_path / "out")
    assert ids(corpus) == [[0, 1], [0, 2, 1], [2, 1]]
    assert corpus.description["skipped"] == {"document that does not encode": 2}
    (tmp_path / "z.txt").write_text("zzz")
    with pytest.raises(UserError, match=r"no document with text in z\.txt \(1 x document that does not encode\)"):
        prepare([tmp_path / "z.txt"], tokenizer=path, eos="</s>", out=tmp_path / "none")


def test_bytes_of_tokens_and_what_they_miss(tmp_path):
    data = write_documents(tmp_path / "data", count=8)
    exact = prepare([data], vocab_size=300, out=tmp_path / "bpe", **FEW)
    assert exact.description["notes"] == []
    pieces = [*("\u2581" + word for word in ("Ada", "sees", "a", "boat.")), "<0x42>", "x"]
    made = Tokenizer(models.Unigram([(piece, -1.0) for piece in ["<unk>", *pieces]], unk_id=0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.normalizer = normalizers.NFC()
    made.add_special_tokens(["</s>"])
    corpus = prepare([data], **FEW, tokenizer=saved(made, tmp_path / "t.json"), eos="</s>", out=tmp_path / "out")
    assert corpus.token_bytes.tolist() == [5, 4, 5, 2, 6, 1, 1, 0]
    spelled = sum(int(corpus.token_bytes[side.tokens].sum()) for side in (corpus.train, corpus.val, corpus.test))
    share = spelled / sum(corpus.description["num_bytes"].values())
    assert f"tokens spell {share:.4f} of the text's bytes" in corpus.description["notes"][0]


def test_unknown_words_are_counted(tmp_path):
    path = saved(words(9, EOS), tmp_path / "t.json")
    corpus = prepare(
        [write(tmp_path / "data", "w1 odd w2", "w3 w4", "w5")], **FEW, tokenizer=path, out=tmp_path / "out"
    )
    assert any("1 tokens stand for text that the tokenizer cannot spell" in n for n in corpus.description["notes"])


def test_folders_without_a_tokenizer_json_are_converted(tmp_path):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    state = json.loads(train_tokenizer(["some text for merges " * 9], 280).to_str())
    (folder / "vocab.json").write_text(json.dumps(state["model"]["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in state["model"]["merges"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": EOS}))
    tokenizer, eos = open_tokenizer(folder)
    assert eos == EOS
    assert tokenizer.encode(f"text {EOS}").ids.count(tokenizer.token_to_id(EOS)) == 0
    assert tokenizer.decode(tokenizer.encode("some text").ids) == "some text"


def test_what_is_no_tokenizer_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name, message in [
        (tmp_path / "bad.json", r"cannot read the tokenizer .*bad\.json"),
        (tmp_path / "empty", r"cannot read a tokenizer from .*empty"),
        ("nobody/nothing-here", "no tokenizer at nobody/nothing-here: it is no file or folder here"),
        ("not a name!", "no tokenizer at not a name!"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            open_tokenizer(name)
        assert "\n" not in str(caught.value)
