"""Reading files: records, encodings, compression, and errors that name file and line."""

import gzip
import json
import lzma
import os
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from geonorm.data.sources import FileSource
from geonorm.errors import UserError

COMPRESS = {".xz": lzma.compress, ".gz": gzip.compress, ".zst": zstandard.compress}


def read(*paths, column="text"):
    skipped = Counter()
    return list(FileSource(paths, column).documents(skipped)), skipped


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    return path


def jsonl(*records):
    return "\n".join(json.dumps(record, ensure_ascii=False) for record in records)


RECORDS = jsonl({"text": "a\u2028b"}, {"text": "c\r\nd", "id": 1}, {"text": None}, {"id": 2}, {"text": "null"})
TEXTS = ["a\u2028b", "c\r\nd", "null"]


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".zst"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_jsonl_in_every_dress_gives_the_same_records(tmp_path, suffix, mark, end):
    data = mark + RECORDS.encode().replace(b"\n", end) + end + end
    path = write(tmp_path / f"a.jsonl{suffix}", COMPRESS.get(suffix, bytes)(data))
    documents, skipped = read(path)
    assert documents == TEXTS
    assert skipped == {"null text": 2}


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".zst"])
def test_text_file_is_one_document_without_mark_and_with_plain_line_ends(tmp_path, suffix):
    data = "\ufeffone\r\ntwo\u2028\x0b\r\n\r\nlast".encode()
    path = write(tmp_path / f"a.txt{suffix}", COMPRESS.get(suffix, bytes)(data))
    assert read(path)[0] == ["one\ntwo\u2028\x0b\n\nlast"]


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".zst"])
def test_several_streams_in_one_file_are_all_read(tmp_path, suffix):
    pack = COMPRESS[suffix]
    path = write(tmp_path / f"a.jsonl{suffix}", pack(b'{"text": "a"}\n') + pack(b'{"text": "b"}\n'))
    source = FileSource([path])
    source.fingerprint()
    assert list(source.documents(Counter())) == ["a", "b"]


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".zst"])
def test_cut_compressed_file_is_an_error(tmp_path, suffix):
    data = COMPRESS[suffix](os.urandom(40_000).hex().encode())
    path = write(tmp_path / f"a.txt{suffix}", data[:-500])
    source = FileSource([path])
    with pytest.raises(UserError, match=r"cannot read .*a\.txt"):
        (source.fingerprint(), list(source.documents(Counter())))


def test_dates_and_changing_columns_do_not_disturb_the_text(tmp_path):
    # A reader that infers a schema from the first 10 MB makes timestamps of these and stops at the last one.
    lines = [{"text": "2020-01-01", "k": number} for number in range(3)] + [{"text": "2020-01-02T00:00:00", "k": "s"}]
    path = write(tmp_path / "a.jsonl", jsonl(*lines))
    assert read(path)[0] == ["2020-01-01"] * 3 + ["2020-01-02T00:00:00"]


@pytest.mark.parametrize(
    "data",
    [
        RECORDS,
        json.dumps([json.loads(line) for line in RECORDS.split("\n")]),
        json.dumps([json.loads(line) for line in RECORDS.split("\n")], indent=1),
    ],
    ids=["lines", "list", "indented"],
)
def test_json_as_lines_or_list(tmp_path, data):
    documents, skipped = read(write(tmp_path / "a.json", data))
    assert documents == TEXTS
    assert skipped == {"null text": 2}


def test_parquet_keeps_strings_and_counts_nulls(tmp_path):
    table = pa.table({"text": ["null", None, "None", "x"], "n": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    write(tmp_path / "b.parquet", b"")
    documents, skipped = read(tmp_path)
    assert documents == ["null", "None", "x"]
    assert skipped == {"null text": 1, "empty file": 1}


def test_empty_files_beside_good_ones_are_counted(tmp_path):
    write(tmp_path / "a.txt", "")
    write(tmp_path / "b.txt", "good")
    write(tmp_path / "c.jsonl", "")
    write(tmp_path / "d.json", "")
    write(tmp_path / "e.json.xz", lzma.compress(b""))
    write(tmp_path / "f.bin", "?")
    documents, skipped = read(tmp_path)
    assert documents == ["good"]
    assert skipped == {"empty file": 4, "file with an unsupported suffix": 1}


def test_one_line_of_50_mb(tmp_path):
    text = "word " * 10_000_000
    path = write(tmp_path / "a.jsonl", json.dumps({"text": text}))
    documents, _ = read(path)
    assert len(documents) == 1
    assert documents[0] == text


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["b.txt", "b.jsonl"])
def test_invalid_byte_is_reported_with_file_and_line(tmp_path, name, suffix):
    for number in range(3):
        write(tmp_path / f"a{number}.txt", "fine\n")
    data = b'{"text": "ok"}\n{"text": "na\xefve"}\n'
    write(tmp_path / (name + suffix), COMPRESS.get(suffix, bytes)(data))
    write(tmp_path / "c.txt", "fine\n")
    with pytest.raises(UserError, match=rf"{name}{suffix}:2: byte 0xef at offset 12 .*UTF-8"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", '{"text": "ok"}\n\n{"text": "q', r"a\.jsonl:3: not valid JSON"),
        ("a.jsonl", '["ok"]', r"a\.jsonl:1: a JSON list"),
        ("a.jsonl", '{"text": ["ok"]}', r"a\.jsonl:1: `text` is of type list"),
        ("a.jsonl", '{"text": "a\\ud800"}', r"a\.jsonl:1: lone surrogate U\+D800 at character 1"),
        ("a.jsonl", '{"body": "x", "id": 1}\n' * 5, r"no column `text`; its columns are: body, id"),
        ("a.jsonl", '{"body": "x", "id": 1}\n' * 1000 + "not JSON", r"no column `text`; its columns are: body, id"),
        ("a.json", '[{"body": "x"}]', r"no column `text`; its columns are: body"),
        ("a.json", '[{"body": "x"', r"cannot read .*a\.json"),
        ("a.json", '{"text": 5}', r"a\.json:1: `text` is of type int"),
        ("a.parquet", "not Parquet", r"cannot read .*a\.parquet as Parquet"),
        ("a.txt.xz", "not xz", r"cannot read .*a\.txt\.xz"),
    ],
)
def test_bad_records_are_named(tmp_path, name, data, message):
    path = write(tmp_path / name, data)
    with pytest.raises(UserError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_parquet_errors(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="no column `text`; its columns are: body, n"):
        read(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="row 1: `n` is of type int"):
        read(tmp_path / "a.parquet", column="n")
    assert read(tmp_path / "a.parquet", column="body")[0] == ["x"]


def test_fingerprint_follows_the_content(tmp_path):
    path = write(tmp_path / "a.txt", "one")
    before = FileSource([path]).fingerprint()
    assert FileSource([tmp_path]).fingerprint() == before
    assert FileSource([path], "body").fingerprint() != before
    write(path, "two")
    assert FileSource([path]).fingerprint() != before


def test_reading_is_offline_silent_and_leaves_nothing_at_home(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "data").mkdir()
    for number in range(40):
        write(tmp_path / "data" / f"{number}.txt", str(number))
    write(tmp_path / "data" / "a.jsonl", RECORDS)
    code = (
        "import sys, collections\n"
        "import geonorm.data\n"
        "assert not {'datasets', 'tokenizers'} & set(sys.modules)\n"
        "from geonorm.data.sources import FileSource\n"
        "print(len(list(FileSource([sys.argv[1]]).documents(collections.Counter()))))\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    environment |= {"HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "data")], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert (run.stdout, run.stderr) == ("43\n", "")
    assert list((tmp_path / "home").rglob("*")) == []


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_a_last_line_counts_with_and_without_its_end(tmp_path, suffix, end):
    lines = jsonl({"text": "a"}, {"text": "b"}) + end
    path = write(tmp_path / f"a.jsonl{suffix}", COMPRESS.get(suffix, bytes)(lines.encode()))
    assert read(path)[0] == ["a", "b"]
    text = write(tmp_path / f"a.txt{suffix}", COMPRESS.get(suffix, bytes)(f"one\ntwo{end}".encode()))
    assert read(text)[0] == [f"one\ntwo{end}"]


def damaged_folder(tmp_path):
    write(tmp_path / "a.txt", "good a")
    write(tmp_path / "b.txt", b"na\xefve")
    write(tmp_path / "c.txt", "good c")
    write(tmp_path / "d.txt.gz", b"not gzip")
    write(tmp_path / "e.jsonl", jsonl({"text": "good e"}) + "\n{broken\n" + jsonl({"text": "lost"}))
    write(tmp_path / "f.parquet", b"not Parquet")
    write(tmp_path / "h.txt", "good h")
    return tmp_path


def test_the_first_unreadable_file_stops_and_is_named(tmp_path):
    with pytest.raises(UserError, match=r"b\.txt:1: byte 0xef"):
        list(FileSource([damaged_folder(tmp_path)]).documents(Counter()))


def test_a_file_that_vanishes_is_named(tmp_path):
    write(tmp_path / "a.txt", "one")
    write(tmp_path / "b.txt", "two")
    source = FileSource([tmp_path])
    (tmp_path / "a.txt").unlink()
    for use in (lambda: list(source.documents(Counter())), source.fingerprint):
        with pytest.raises(UserError, match=r"cannot read .*a\.txt: No such file or directory"):
            use()


def test_unreadable_files_can_be_skipped_and_are_named(tmp_path):
    source = FileSource([damaged_folder(tmp_path)], skip_unreadable=True)
    source.fingerprint()
    for _ in range(2):  # every pass gives the same
        skipped = Counter()
        assert list(source.documents(skipped)) == ["good a", "good c", "good e", "good h"]
        assert skipped == {"unreadable file": 4}
    assert sorted(path.name for path in source.unreadable) == ["b.txt", "d.txt.gz", "e.jsonl", "f.parquet"]
    assert "e.jsonl:2: not valid JSON" in source.unreadable[tmp_path / "e.jsonl"]
    assert sum("Skipped from its first fault on" in note for note in source.notes()) == 4
