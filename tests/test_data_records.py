"""What is inside a string is never changed: JSON, JSON lines, Parquet and Hub datasets keep one rule."""

import gzip
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from geonorm.data import hub as hub_module
from geonorm.data.hub import HubSource
from geonorm.data.sources import FileSource
from geonorm.errors import UserError

# Every one of these was read as something else, or lost, by a reader that guesses types.
TEXTS = [
    "\ufeffa mark",
    "nul\0nul",
    "2020-01-01",
    "007",
    "1e5",
    "null",
    "None",
    "NaN",
    "true",
    '{"a": 1}',
    "a\u2028b\r\nc",
    " x ",
]


def dress(records: list[str], kind: str) -> tuple[str, str]:
    """Name and content of a file of JSON objects that are written out."""
    if kind == "jsonl":
        return "a.jsonl", "\n".join(records)
    return "a.json", {"list": f"[{', '.join(records)}]", "lines": "\n".join(records)}[kind]


@pytest.fixture
def read(tmp_path):
    """Reads records from a file, and from a dataset in the form that the Hub has."""

    def read(records: list[str], kind: str, hub: bool) -> list[str]:
        name, text = dress(records, kind)
        folder = tmp_path / "dataset"
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode())
        source = HubSource(f"hf://{folder}") if hub else FileSource([folder / name])
        source.folder = tmp_path / "kept"
        return list(source.documents(Counter()))

    return read


KINDS = pytest.mark.parametrize("kind", ["jsonl", "list", "lines"])
HUB = pytest.mark.parametrize("hub", [False, True], ids=["file", "hub"])


@KINDS
@HUB
def test_strings_come_as_they_are(read, kind, hub):
    assert read([json.dumps({"text": text, "id": number}) for number, text in enumerate(TEXTS)], kind, hub) == TEXTS


@KINDS
@HUB
@pytest.mark.parametrize(
    ("record", "message"),
    [
        (r'{"text": "\ud83dABC tail"}', r"lone surrogate U\+D83D at character 0"),
        ('{"text": 5}', "`text` is of type int, not a string"),
        ('{"text": true}', "`text` is of type bool"),
        ('{"text": {"a": 1}}', "`text` is of type dict"),
        ('{"text": "a", "text": "b"}', "the key `text` is given more than once"),
        ('"text"', "a JSON str, not an object"),
    ],
)
def test_a_record_that_is_no_text_is_refused_with_its_place(read, record, message, kind, hub):
    # Beside a good one, because a reader that guesses brings all records of a file to one type.
    place = {"list": "record 2"}.get(kind, ":2")
    with pytest.raises(UserError, match=message) as caught:
        read(['{"text": "good"}', record], kind, hub)
    assert ("row 2" if hub else place) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_of_no_interest_may_repeat(read):
    assert read(['{"id": 1, "id": 2, "text": "a", "more": {"text": 1, "text": 2}}'], "list", False) == ["a"]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_bytes_that_are_not_utf8_in_a_list_are_named_with_their_line(tmp_path, suffix):
    data = b'[{"text": "ok"},\n {"text": "na\xefve"}]'
    path = tmp_path / f"a.json{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    with pytest.raises(UserError, match=r"a\.json(\.gz)?:2: byte 0xef at offset 13 of the line is not UTF-8"):
        list(FileSource([path]).documents(Counter()))


def test_lines_after_blank_ones_and_one_object_over_several_lines(tmp_path):
    (tmp_path / "a.json").write_text('\n\n{"text": "a"}\n\n{"text": "b"}\n')
    (tmp_path / "b.json").write_text('{\n"text":\n"c"}\n')
    (tmp_path / "c.json").write_text("[]")
    (tmp_path / "d.jsonl").write_text("\n \n")
    skipped = Counter()
    assert list(FileSource([tmp_path]).documents(skipped)) == ["a", "b", "c"]
    assert skipped == {"empty file": 2}


def test_a_stream_of_json_files_goes_on_where_it_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(hub_module, "KEPT_CHARACTERS", 10)
    folder = tmp_path / "dataset"
    folder.mkdir()
    texts = [f"text {number}" for number in range(9)]
    for at in range(3):
        lines = "\n".join(json.dumps({"text": text}) for text in texts[3 * at : 3 * at + 3])
        (folder / f"train-{at}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for stop in range(1, 9):
        kept = tmp_path / f"kept{stop}"
        source = HubSource(f"hf://{folder}")
        source.folder = kept
        some = source.documents(Counter())
        assert [next(some) for _ in range(stop)] == texts[:stop]
        some.close()
        source = HubSource(f"hf://{folder}")
        source.folder = kept
        assert list(source.documents(Counter())) == texts


def test_words_for_null_in_a_stream_of_csv_are_text(tmp_path):
    (tmp_path / "train.csv").write_text("id,text\n1,null\n2,None\n3,plain\n4,NA\n")
    source = HubSource(f"hf://{tmp_path}")
    source.folder = tmp_path / "kept"
    assert list(source.documents(Counter())) == ["null", "None", "plain", "NA"]


# --- Parquet --------------------------------------------------------------------------------------------------------


def test_a_parquet_file_without_rows_is_an_empty_file(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "c.parquet")
    skipped = Counter()
    assert list(FileSource([tmp_path]).documents(skipped)) == ["x"]
    assert skipped == {"empty file": 2}


def test_columns_that_are_not_read_may_be_of_any_type(tmp_path):
    columns = {
        "text": pa.array(["a", "b"]),
        "wait": pa.array([1, 2], pa.duration("us")),
        "digits": pa.array([1, 2], pa.decimal128(30, 2)),
        "tree": pa.array([{"text": "no"}, None]),
        "bytes": pa.array([b"\xff", b""], pa.binary()),
        "text.more": pa.array([1, 2]),
    }
    features = {"info": {"features": {"text": {"dtype": "string", "_type": "Value"}, "x": {"_type": "Hologram"}}}}
    table = pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(features)})
    pq.write_table(table, tmp_path / "a.parquet")
    assert list(FileSource([tmp_path]).documents(Counter())) == ["a", "b"]


def test_parquet_text_that_cannot_be_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"na\xefve"], pa.binary()).buffers())
    pq.write_table(pa.table({"text": bad}), path)
    with pytest.raises(UserError, match=r"a\.parquet, row 2: text is not UTF-8"):
        list(FileSource([path]).documents(Counter()))
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    with pytest.raises(UserError, match=r"a\.parquet has more than one column `text`"):
        list(FileSource([path]).documents(Counter()))
    pq.write_table(pa.table({"text": pa.array(["a", None, "b"]).dictionary_encode()}), path)
    assert list(FileSource([path]).documents(Counter())) == ["a", "b"]
