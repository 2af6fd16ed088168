"""Streams of Hub datasets, run on datasets that lie on this machine in the form that the Hub has."""

import os
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from geonorm.data import hub, prepare
from geonorm.data.hub import HubSource
from geonorm.errors import UserError

OPTIONS = {"vocab_size": 257, "val_fraction": 0.2, "test_fraction": 0.2, "min_documents": 1, "max_share": 1.0}


@pytest.fixture
def dataset(tmp_path):
    """Three Parquet files of 20 rows in two splits; one row is null and one says so."""
    folder = tmp_path / "dataset"
    folder.mkdir()
    for number, split in enumerate(("train", "train", "test")):
        texts = [f"{split} {number} {row}" for row in range(20)]
        texts[3:5] = [None, "null"]
        table = pa.table({"text": texts, "other": texts[::-1]})
        pq.write_table(table, folder / f"{split}-{number}.parquet", row_group_size=6)
    return folder


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of a few documents."""
    monkeypatch.setattr(hub, "KEPT_CHARACTERS", 40)


TRAIN = [
    text
    for number in (0, 1)
    for row in range(20)
    if (text := "null" if row == 4 else f"train {number} {row}") and row != 3
]


def source(dataset, tmp_path, words=""):
    made = HubSource(f"hf://{dataset}{words}")
    made.folder = tmp_path / "kept"
    return made


def read(made):
    skipped = Counter()
    return list(made.documents(skipped)), skipped


def test_names():
    made = HubSource("hf://owner/name:config@validation#body")
    assert (made.name, made.config, made.split, made.column) == ("owner/name", "config", "validation", "body")
    made = HubSource("hf://owner/name", "content")
    assert (made.name, made.config, made.split, made.column) == ("owner/name", None, "train", "content")
    assert made.names == ["hf://owner/name@train#content"]
    assert HubSource("hf:/owner/name").name == "owner/name"  # what a Path makes of it
    assert HubSource("hf:///a/b").name == "/a/b"
    for wrong in ("hf://", "hf://a:b:c", "hf://a@"):
        with pytest.raises(UserError, match="is not of the form hf://OWNER/NAME"):
            HubSource(wrong)


def test_rows_in_order_and_nulls_counted(dataset, tmp_path):
    assert read(source(dataset, tmp_path)) == (TRAIN, {"null text": 2})
    assert read(source(dataset, tmp_path / "other", "@test#other"))[0][0] == "test 2 19"


class Watched:
    """A stream of `datasets` that notes which rows it gave, and breaks off after some."""

    def __init__(self, rows, given, breaks_after=None):
        self.rows, self.given, self.breaks_after = rows, given, breaks_after

    def __getattr__(self, name):
        return getattr(self.rows, name)

    def select_columns(self, names):
        return Watched(self.rows.select_columns(names), self.given, self.breaks_after)

    def __iter__(self):
        for row in self.rows:
            if len(self.given) == self.breaks_after:
                raise ConnectionError("gone")
            self.given.append(row["text"])
            yield row


def watch(patch, breaks_after=None):
    """Watch every stream that is opened; returns the texts that they give."""
    import datasets

    given, load = [], datasets.load_dataset_builder

    def load_watched(*arguments, **options):
        builder = load(*arguments, **options)
        stream = builder.as_streaming_dataset
        builder.as_streaming_dataset = lambda **options: Watched(stream(**options), given, breaks_after)
        return builder

    patch.setattr(datasets, "load_dataset_builder", load_watched)
    return given


@pytest.mark.parametrize("taken", [1, 7, 30])
def test_a_stream_goes_on_behind_what_was_kept(dataset, tmp_path, small_parts, monkeypatch, taken):
    with monkeypatch.context() as patch:
        watch(patch, taken)
        with pytest.raises(UserError, match=rf"broke off after {taken} rows \(ConnectionError: gone\); run the same"):
            read(source(dataset, tmp_path))
    given = watch(monkeypatch)
    assert read(source(dataset, tmp_path)) == (TRAIN, {"null text": 2})
    assert 40 - taken <= len(given) <= 40 - taken + 6


def test_every_row_is_fetched_once(dataset, tmp_path, small_parts, monkeypatch):
    # Two passes are made, survey and encoding; with a limit, none goes beyond it.
    with monkeypatch.context() as patch:
        given = watch(patch)
        corpus = prepare([f"hf://{dataset}"], out=tmp_path / "few", max_documents=9, **OPTIONS)
    assert [text for text in given if text is not None] == TRAIN[:9]
    assert sum(corpus.description["num_documents"].values()) == 9
    given = watch(monkeypatch)
    corpus = prepare([f"hf://{dataset}"], out=tmp_path / "all", **OPTIONS)
    assert [text for text in given if text is not None] == TRAIN
    assert corpus.description["skipped"] == {"null text": 2}
    assert not (corpus.path / ".building").exists()


def test_a_damaged_part_is_fetched_again(dataset, tmp_path, small_parts):
    made = source(dataset, tmp_path)
    read(made)
    (made.folder / "000002.json.gz").write_bytes(b"?")
    assert read(source(dataset, tmp_path)) == (TRAIN, {"null text": 2})


def test_hub_and_files_together(dataset, tmp_path):
    (tmp_path / "a.txt").write_text("from a file")
    corpus = prepare([f"hf://{dataset}", tmp_path / "a.txt"], out=tmp_path / "out", **OPTIONS)
    assert sum(corpus.description["num_documents"].values()) == len(TRAIN) + 1
    assert corpus.description["sources"] == ["a.txt", f"hf://{dataset}@train#text"]
    made = Tokenizer.from_file(str(corpus.tokenizer_path))
    first = corpus.train.tokens[: list(corpus.train.tokens).index(corpus.eos_id)]
    assert made.decode(first) in {"from a file", *TRAIN}


def test_the_key_follows_split_and_content(dataset, tmp_path):
    key = source(dataset, tmp_path).fingerprint()
    assert source(dataset, tmp_path).fingerprint() == key
    assert source(dataset, tmp_path, "@test").fingerprint() != key
    os.utime(dataset / "train-0.parquet", ns=(1, 1))
    assert source(dataset, tmp_path).fingerprint() != key


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("@nowhere", r"cannot open the dataset .*@nowhere#text \(ValueError: .*nowhere"),
        (":nothing", r"cannot open the dataset .*:nothing@train#text \(ValueError: .*nothing"),
        ("#body", r"has no column `body`; its columns are: other, text"),
    ],
)
def test_mistakes_are_one_line(dataset, tmp_path, words, message):
    with pytest.raises(UserError, match=message) as caught:
        prepare([f"hf://{dataset}{words}"], out=tmp_path / "out", **OPTIONS)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_no_network_is_one_line(monkeypatch, tmp_path):
    import datasets

    def unreachable(*args, **options):
        raise ConnectionError("Couldn't reach 'owner/name' on the Hub (LocalEntryNotFoundError)\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    with pytest.raises(
        UserError, match=r"cannot open the dataset hf://owner/name@train#text \(Conn.*network$"
    ) as caught:
        prepare(["hf://owner/name"], out=tmp_path / "out", **OPTIONS)
    assert "\n" not in str(caught.value)
