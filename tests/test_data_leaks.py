"""What stands on two sides of a corpus: copies, near-duplicates, runs of tokens."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from corpora import FEW
from geonorm.data import prepare
from geonorm.data.leaks import Deduplication, overlap
from geonorm.data.token_file import write_tokens
from geonorm.data.tokenizer import train_tokenizer

SPLIT = {"val_fraction": 0.2, "test_fraction": 0.2, **FEW}


def story(seed, words=400):
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefghij", k=5)) for _ in range(words))


def changed(text, share, seed=0):
    """The text with a share of its words replaced, in one stretch."""
    words = text.split()
    end = round(len(words) * share)
    return " ".join([*story(seed + 1000, end).split(), *words[end:]])


def kept(kind, documents):
    skipped = Counter()
    return list(Deduplication(kind).distinct(documents, skipped)), dict(skipped)


def test_copies_and_near_duplicates_are_left_out_and_counted():
    texts = [story(seed) for seed in range(20)]
    copies = [texts[3] + "\n", texts[4].upper()]
    near = [changed(texts[5], 0.05), changed(texts[6], 0.1)]
    other = [changed(texts[7], 0.6)]
    assert kept(None, texts + copies) == (texts + copies, {})
    assert kept("exact", texts + copies + near) == (texts + near, {"copy of an earlier document": 2})
    assert kept("near", texts + copies + near + other) == (
        texts + other,
        {"copy of an earlier document": 2, "near-duplicate of an earlier document": 2},
    )


def test_a_second_pass_leaves_out_the_same():
    documents = [story(1), story(2), changed(story(1), 0.05), "", "x", story(3)]
    made = Deduplication("near")
    first, second = (list(made.distinct(documents, Counter())) for _ in range(2))
    assert first == second == [documents[0], documents[1], "", "x", story(3)]


@pytest.mark.parametrize("words", [8, 16])
def test_overlap_is_the_share_of_tokens_in_runs_that_are_in_train_too(tmp_path, words):
    tokenizer = train_tokenizer(["x"], 257)
    rng = np.random.default_rng(0)

    def noise(size):
        return "".join(map(chr, rng.integers(33, 127, size)))

    shared = noise(50)
    train = write_tokens([noise(5000) + shared + noise(777), noise(30)], tokenizer, tmp_path / "train.tokens")
    held = write_tokens([noise(200) + shared + noise(100), shared[: words - 1]], tokenizer, tmp_path / "val.tokens")
    assert overlap(train, held, words) == pytest.approx(50 / held.num_tokens)
    assert overlap(train, train, words) == pytest.approx((5827 + 30) / train.num_tokens)


def test_runs_over_the_end_of_a_document_do_not_count(tmp_path):
    tokenizer = train_tokenizer(["x"], 257)
    train = write_tokens(["abcdef", "ghijkl"], tokenizer, tmp_path / "train.tokens")
    assert overlap(train, train, 8) == 0


def test_a_corpus_says_what_leaks_and_keeps_groups_together(tmp_path):
    chorus = story(99, 40)
    records = [{"text": f"{story(n, 60)} {chorus}", "author": f"a{n % 24}"} for n in range(96)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    lines = []
    corpus = prepare(
        [tmp_path / "a.jsonl"], vocab_size=257, group_by="author", out=tmp_path / "c", report=lines.append, **SPLIT
    )
    facts = corpus.description
    assert facts["num_documents"] == {side: 4 * count for side, count in facts["num_groups"].items()}
    for side in ("val", "test"):
        assert facts["largest_share"][side] == pytest.approx(1 / facts["num_groups"][side], rel=0.01)
        assert facts["overlap"][side] == pytest.approx(len(chorus) / len(records[0]["text"]), rel=0.05)
        windows = corpus.held_out(side, 32, 50)
        assert len(set(windows.groups.tolist())) == facts["num_groups"][side]
    assert any("of the tokens lie in a run of 32 that is in the training text too" in line for line in lines)
