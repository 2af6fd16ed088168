"""From paths to a corpus in the cache."""

import json
import multiprocessing
import pickle
import random
import re
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer

from corpora import FEW, InterruptAfter
from geonorm.data import Corpus, Windows, prepare
from geonorm.data.standard_library import StandardLibrarySource, docstrings
from geonorm.errors import UserError

WORDS = ["the", "sphere", "and", "stream", "walk", "along", "a", "great", "circle", "with", "smaller", "steps"]

FILES = sorted(
    ["description.json", "token_bytes.npy", "tokenizer.json"]
    + [f"{side}.tokens{end}" for side in ("train", "val", "test") for end in ("", ".json")]
    + ["val.groups.npy", "test.groups.npy"]
)


def make_text(tag, words=60):
    rng = random.Random(tag)
    return f"tag{tag:04d} " + " ".join(rng.choice(WORDS) for _ in range(words)) + "\n"


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for part in range(4):
        lines = [json.dumps({"text": make_text(tag)}) for tag in range(part * 50, part * 50 + 50)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    return folder


def texts(corpus, side):
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    tokens = getattr(corpus, side).tokens
    ends = np.flatnonzero(tokens == corpus.eos_id)
    return [tokenizer.decode(part[:-1], skip_special_tokens=False) for part in np.split(tokens, ends + 1)[:-1]]


def test_everything_is_kept_and_described(data, tmp_path):
    lines = []
    corpus = prepare([data], vocab_size=300, cache_dir=tmp_path / "cache", report=lines.append)
    kept = {side: texts(corpus, side) for side in ("train", "val", "test")}
    assert sorted(text for found in kept.values() for text in found) == [make_text(tag) for tag in range(200)]
    facts = corpus.description
    assert facts["num_documents"] == facts["num_groups"] == {side: len(found) for side, found in kept.items()}
    assert facts["num_bytes"] == {side: len("".join(found)) for side, found in kept.items()}
    assert facts["num_tokens"] == {side: getattr(corpus, side).num_tokens for side in kept}
    for side in ("val", "test"):
        assert 0.04 < facts["num_bytes"][side] / sum(facts["num_bytes"].values()) < 0.06
        assert 1 / len(kept[side]) <= facts["largest_share"][side] < 2 / len(kept[side])
        assert 0 <= facts["overlap"][side] < 0.01
    assert facts["sources"] == [f"{part}.jsonl" for part in range(4)]
    assert facts["vocab_size"] == corpus.vocab_size == len(corpus.token_bytes) == 300
    assert corpus.token_bytes[corpus.eos_id] == 0
    assert corpus.token_bytes[corpus.train.tokens].sum() == facts["num_bytes"]["train"]
    text_tokens = sum(facts["num_tokens"].values()) - 200
    assert facts["bytes_per_token"] == pytest.approx(sum(facts["num_bytes"].values()) / text_tokens)
    assert re.fullmatch("[0-9a-f]{64}", facts["fingerprint"])
    assert any("tokenizer" in line for line in lines)
    assert json.loads(json.dumps(facts)) == facts


def test_the_tokenizer_never_sees_validation_text(tmp_path):
    # Each document repeats a word of its own, so a merge of such a word betrays the document.
    folder = tmp_path / "data"
    folder.mkdir()
    rng = random.Random(0)
    words = ["".join(rng.choices("bcdfghjklmnpqrstvwxz", k=12)) for _ in range(12)]
    for number, word in enumerate(words):
        (folder / f"{number:02d}.txt").write_text(f"{word} " * 200)
    corpus = prepare([folder], vocab_size=600, val_fraction=0.2, test_fraction=0.2, **FEW, cache_dir=tmp_path / "cache")
    vocabulary = Tokenizer.from_file(str(corpus.tokenizer_path)).get_vocab()
    held_out = {text.split()[0] for side in ("val", "test") for text in texts(corpus, side)}
    assert 4 <= len(held_out) <= 6
    assert not any(word in vocabulary or f"Ġ{word}" in vocabulary for word in held_out)
    assert all(f"Ġ{word}" in vocabulary for word in set(words) - held_out)


def test_duplicates_never_straddle_the_split(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    tags = [*range(1000), *range(0, 1000, 50)]
    assert len(tags) == 1020
    random.Random(1).shuffle(tags)
    for part in range(3):
        records = [json.dumps({"text": make_text(tag, 10)}) for tag in tags[part::3]]
        (folder / f"{part}.jsonl").write_text("\n".join(records))
    corpus = prepare([folder], vocab_size=300, val_fraction=0.2, cache_dir=tmp_path / "cache")
    sides = [{text[:7] for text in texts(corpus, side)} for side in ("train", "val", "test")]
    assert sum(map(len, sides)) == len(set.union(*sides)) == 1000
    assert sum(corpus.description["num_documents"].values()) == 1020


def test_second_call_opens_the_first_result(data, tmp_path):
    cache = tmp_path / "cache"
    first = prepare([data], vocab_size=300, cache_dir=cache)
    again = prepare([data / f"{part}.jsonl" for part in (3, 1, 0, 2)], vocab_size=300, cache_dir=cache)
    assert again.path == first.path
    assert first.build is not None
    assert again.build is None
    for change in (
        {"vocab_size": 301},
        {"val_fraction": 0.1},
        {"test_fraction": 0.1},
        {"dedup": "near"},
        {"max_documents": 190},
    ):
        other = prepare([data], **{"vocab_size": 300, "cache_dir": cache, **change})
        assert other.build is not None
        assert other.path != first.path


def test_builds_are_equal_bit_by_bit(data, tmp_path):
    one, two = (prepare([data], vocab_size=300, cache_dir=tmp_path / name) for name in ("a", "b"))
    assert one.path.name == two.path.name
    assert sorted(path.name for path in one.path.iterdir()) == FILES
    for name in FILES:
        assert (one.path / name).read_bytes() == (two.path / name).read_bytes()


def test_cache_folder_from_the_environment(data, tmp_path, monkeypatch):
    monkeypatch.setenv("GEONORM_CACHE", str(tmp_path / "elsewhere"))
    assert prepare([data], vocab_size=300, max_documents=20, **FEW).path.parent == tmp_path / "elsewhere"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot make the cache folder .*GEONORM_CACHE"):
        prepare([data], cache_dir=tmp_path / "file" / "x")


def test_an_interrupted_build_does_not_look_whole(data, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        prepare([data], vocab_size=300, out=out, progress=InterruptAfter(1))
    with pytest.raises(UserError, match="is not a prepared corpus"):
        Corpus.load(out)
    # A killed process cannot tidy up; the next build does it.
    (out / "train.tokens.7.partial").write_text("half")
    lines = []
    corpus = prepare([data], vocab_size=300, out=out, report=lines.append)
    assert not any("training a tokenizer" in line for line in lines)
    assert (corpus.build.num_shards, corpus.build.num_kept_shards) == (1, 1)
    assert sorted(path.name for path in out.iterdir()) == FILES


def _prepare_in_process(data, cache, barrier, results):
    barrier.wait()
    corpus = prepare([data], vocab_size=300, cache_dir=cache)
    results.put((str(corpus.path), corpus.train.metadata["sha256"], corpus.description["fingerprint"]))


def test_two_processes_at_once(data, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (data, tmp_path / "cache", barrier, results)
    processes = [context.Process(target=_prepare_in_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert found[0] == found[1]
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == [found[0][0].split("/")[-1]]


def test_load_and_send(data, tmp_path):
    corpus = prepare([data], vocab_size=300, cache_dir=tmp_path / "cache")
    for other in (Corpus.load(str(corpus.path)), pickle.loads(pickle.dumps(corpus))):
        assert other.description == corpus.description
        assert (other.val.tokens == corpus.val.tokens).all()
    assert Windows(corpus.train, length=32).batch(0, 4).shape == (4, 33)
    with pytest.raises(UserError, match="is not a prepared corpus"):
        Corpus.load(tmp_path)
    corpus.tokenizer_path.unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        Corpus.load(corpus.path)


def test_one_long_document_is_cut_at_a_line(tmp_path):
    text = "".join(make_text(tag, 10) for tag in range(100))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "copy.txt").write_text(text)
    corpus = prepare([tmp_path / "a.txt", tmp_path / "copy.txt"], vocab_size=300, cache_dir=tmp_path / "cache", **FEW)
    parts = [text for side in ("train", "val", "test") for text in texts(corpus, side)]
    assert "".join(parts) == text
    for part in parts[1:]:
        assert part.startswith("tag")
        assert 0.03 < len(part) / len(text) < 0.07
    assert "one document" in corpus.description["notes"][0]
    assert corpus.description["skipped"] == {"repeat of the only document": 1}


def test_max_documents_counts_documents_with_text(tmp_path):
    records = [json.dumps({"text": text}) for text in (" ", "one\n", None, "two\n", "three\n", "four\n")]
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    corpus = prepare([tmp_path / "a.jsonl"], vocab_size=257, cache_dir=tmp_path / "cache", max_documents=3, **FEW)
    assert sorted(text for side in ("train", "val", "test") for text in texts(corpus, side)) == [
        "one\n",
        "three\n",
        "two\n",
    ]
    assert corpus.description["skipped"] == {"blank document": 1, "null text": 1}


def test_unusable_input(data, tmp_path):
    cache = tmp_path / "cache"
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(UserError, match=r"no document with text in blank\.txt \(1 x blank document\)"):
        prepare([tmp_path / "blank.txt"], cache_dir=cache)
    for setting, message in [
        ({"vocab_size": 256}, "at least 257, got 256"),
        ({"val_fraction": 0}, "`val_fraction` must be positive"),
        ({"val_fraction": 0.48}, "`val_fraction` and `test_fraction` must be at most 0.5 together, got 0.48 and 0.05"),
        ({"test_fraction": 0}, "`test_fraction` must be positive"),
        ({"min_documents": 0}, "`min_documents` must be a whole number of at least 1"),
        ({"max_share": 1.5}, "`max_share` must be at most 1, got 1.5"),
        ({"max_share": 0.01}, r"no 5% of this text for the validation side .* lower min_documents, raise max_share"),
        ({"dedup": "fuzzy"}, "`dedup` must be 'exact' or 'near'"),
        ({"group_by": "author"}, "no column `author` to group by; its columns are: text"),
        ({"max_documents": 0}, "`max_documents` must be"),
        ({"text_column": "body"}, "no column `body`; its columns are: text"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare([data], cache_dir=cache, **setting)


def test_a_file_that_changes_while_being_read_is_an_error(data, tmp_path):
    def change(line):
        if line.startswith("training a tokenizer"):
            (data / "0.jsonl").write_text(json.dumps({"text": "something else"}))

    with pytest.raises(UserError, match="changed while being read"):
        prepare([data], vocab_size=300, cache_dir=tmp_path / "cache", report=change)


def test_standard_library_corpus(tmp_path):
    source = StandardLibrarySource()
    assert source.names[0] == "standard library sources"
    assert source.fingerprint() == StandardLibrarySource().fingerprint()
    corpus = prepare(cache_dir=tmp_path, vocab_size=300, max_documents=30, **FEW)
    assert sum(corpus.description["num_documents"].values()) == 30
    assert all("def " in text or "import" in text or "#" in text for text in texts(corpus, "train"))


@pytest.mark.slow
def test_standard_library_corpus_whole(tmp_path):
    documents = list(StandardLibrarySource().documents(Counter()))
    assert sum(len(text.encode()) for text in documents) > 5_000_000
    assert len(set(documents)) == len(documents)
    groups = {text.group for text in documents}
    assert {"json", "asyncio", "dataclasses"} < groups
    description = prepare(cache_dir=tmp_path, vocab_size=512).description
    for side in ("val", "test"):
        assert description["num_groups"][side] >= 8
        assert description["overlap"][side] < 0.05


def test_docstrings_come_in_source_order():
    source = '''"""Module."""
class A:
    """Class.

        Indented.
    """
    def f(self):
        """Method."""
        def g(): "no"; 1
if 1:
    async def h():
        \'\'\'Conditional.\'\'\'
else:
    def k():
        x = """not one"""
'''
    assert list(docstrings(source)) == ["Module.", "Class.\n\nIndented.", "Method.", "no", "Conditional."]
    with pytest.raises(SyntaxError):
        list(docstrings('"""x""" ('))
