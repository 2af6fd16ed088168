"""Which files are read: order, patterns, names of any bytes, what is no regular file, what geonorm wrote itself."""

import json
import os
import socket
from collections import Counter

import pytest

from corpora import FEW, InterruptAfter, write_documents
from geonorm.cli import main
from geonorm.data import Corpus, prepare
from geonorm.data.sources import FileSource
from geonorm.errors import UserError


def read(*paths):
    skipped = Counter()
    return list(FileSource(paths).documents(skipped)), skipped


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_order_is_sorted_and_files_are_read_once(tmp_path):
    for name in ("b/2.txt", "a/9.md", "b/1.jsonl", ".hidden/x.txt", "b/.x.txt", "c[1]*.txt"):
        write(tmp_path / name, json.dumps({"text": name}) if name.endswith("jsonl") else name)
    expected = ["a/9.md", "b/1.jsonl", "b/2.txt", "c[1]*.txt"]
    assert read(tmp_path)[0] == expected
    assert read(tmp_path / "c[1]*.txt", tmp_path / "b", tmp_path / "b/2.txt", tmp_path / "a")[0] == expected


def test_bad_paths(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "a.bin", "x")
    write(tmp_path / "a.parquet.xz", "x")
    with pytest.raises(UserError, match="no data paths"):
        FileSource([])
    with pytest.raises(UserError, match=r"no such file or folder: .*missing\.txt"):
        FileSource([tmp_path / "missing.txt"])
    with pytest.raises(UserError, match=r"no readable file in the folder .*empty; supported suffixes: .*\.jsonl"):
        FileSource([tmp_path / "empty"])
    for name in ("a.bin", "a.parquet.xz"):
        with pytest.raises(UserError, match=rf"cannot read .*{name}.*supported suffixes"):
            FileSource([tmp_path / name])


def test_patterns(tmp_path):
    for name in ("a/1.txt", "a/b/2.txt", "a/b/.3.txt", "c/4.jsonl", "c/5.bin"):
        write(tmp_path / name, json.dumps({"text": name}) if name.endswith("jsonl") else name)
    assert read(tmp_path / "*/*.txt")[0] == ["a/1.txt"]
    assert read(tmp_path / "**/*.txt")[0] == ["a/1.txt", "a/b/2.txt"]
    everything = ["a/1.txt", "a/b/2.txt", "c/4.jsonl"]
    for pattern in ("*", "**", "[ac]"):
        assert read(tmp_path / pattern) == (everything, {"file with an unsupported suffix": 1})
    assert read(tmp_path / "**", tmp_path / "a", tmp_path / "a/1.txt")[0] == everything
    with pytest.raises(UserError, match=r"nothing matches .*\*\.md; check the pattern"):
        read(tmp_path / "*.md")
    with pytest.raises(UserError, match=r"no readable file matches .*c/\*\.bin; supported suffixes"):
        read(tmp_path / "c/*.bin")


def test_a_folder_named_after_all_its_files_is_no_mistake(tmp_path):
    path = write(tmp_path / "a.txt", "one")
    assert read(path, tmp_path)[0] == ["one"]


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    write(tmp_path / "a.txt", "fine")
    (tmp_path / "closed").mkdir()
    original = os.scandir

    def scandir(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return original(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"cannot list the folder .*closed: Permission denied"):
        FileSource([tmp_path])


@pytest.fixture
def odd(tmp_path):
    """A folder with one text and what only looks like text."""
    folder = tmp_path / "odd"
    write(folder / "good.txt", "good")
    os.mkfifo(folder / "pipe.txt")
    os.mkfifo(folder / "pipe.json")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(folder / "socket.txt"))
    (folder / "device.txt").symlink_to("/dev/zero")
    (folder / "loop.txt").symlink_to(folder / "loop.txt")
    (folder / "loop.bin").symlink_to(folder / "loop.bin")
    (folder / "gone.txt").symlink_to(folder / "nowhere.txt")
    (folder / "up").symlink_to(tmp_path)
    return folder


WHAT = {
    "pipe.txt": "pipe",
    "pipe.json": "pipe",
    "socket.txt": "socket",
    "device.txt": "device",
    "loop.txt": "link that leads to itself",
    "gone.txt": "link to nothing",
}


def test_only_regular_files_are_read_and_what_is_left_out_is_named(odd):
    link = {"up": "link to a folder"}
    for paths, more in (([odd], link), ([odd / "*.*"], {}), ([odd / "*"], link), ([odd / "**"], link)):
        source = FileSource(paths)
        skipped = Counter()
        assert list(source.documents(skipped)) == ["good"]
        assert skipped == {**Counter([*WHAT.values(), *more.values()]), "file with an unsupported suffix": 1}
        left_out = {odd / name: what for name, what in {**WHAT, **more}.items()}
        assert source.left_out == left_out
        assert set(source.notes()) == {f"Left out: {path} ({what})." for path, what in left_out.items()}


def test_what_is_no_regular_file_is_an_error_where_it_is_named_itself(odd):
    for name, what in WHAT.items():
        with pytest.raises(UserError, match=rf"{name} is a {what}; only regular files are read"):
            FileSource([odd / name])
    (odd / "good.txt").unlink()
    with pytest.raises(
        UserError, match=r"no readable file in the folder .*; left out: .*\.txt \((pipe|socket|device|li)"
    ):
        FileSource([odd])


def test_notes_are_few(tmp_path):
    write(tmp_path / "good.txt", "good")
    for number in range(23):
        os.mkfifo(tmp_path / f"{number}.txt")
    notes = FileSource([tmp_path]).notes()
    assert len(notes) == 21
    assert notes[-1] == "3 more were left out."


@pytest.fixture
def documents(tmp_path):
    return write_documents(tmp_path / "documents", count=20)


PREPARE = {"vocab_size": 257, "val_fraction": 0.2, "test_fraction": 0.2, **FEW}


def test_names_of_any_bytes_are_read_and_printed_with_escapes(documents, tmp_path, capsys):
    try:
        with open(os.fsencode(documents) + b"/caf\xe9.txt", "w") as file:
            file.write("A text in a file of an old name.\n" * 20)
        os.mkfifo(os.fsencode(documents) + b"/pipe\xe9.txt")
        with open(os.fsencode(documents) + b"/bad\xe9.jsonl", "w") as file:
            file.write("no JSON")
    except OSError:
        pytest.skip("this file system takes no such names")
    said = []
    corpus = prepare([documents], out=tmp_path / "corpus", report=said.append, skip_unreadable=True, **PREPARE)
    facts = (corpus.path / "description.json").read_text(encoding="ascii")
    assert r"caf\xe9.txt" in json.loads(facts)["sources"]
    for name in (r"pipe\xe9.txt (pipe)", r"bad\xe9.jsonl:1: not valid JSON"):
        assert any(name in note for note in json.loads(facts)["notes"])
    for line in said:
        line.encode("utf-8")
    with pytest.raises(UserError, match=r"bad\\xe9\.jsonl:1: not valid JSON"):
        prepare([documents], out=tmp_path / "other", **PREPARE)
    words = ["--vocab-size", "257", "--workers", "1", "--min-documents", "1", "--max-share", "1"]
    assert main(["prepare", str(documents), "--skip-unreadable", *words, "--out", str(tmp_path / "third")]) == 0
    assert r"pipe\xe9.txt" in capsys.readouterr().out
    # What geonorm is to write, or libraries below are to open, has to have a name in UTF-8.
    for words, message in (
        (["prepare", str(documents), "--out", "caf\udce9"], r"caf\xe9 is not UTF-8"),
        (["prepare", str(documents), "--tokenizer", "caf\udce9"], r"`tokenizer` caf\xe9 is not UTF-8"),
        (["prepare", str(documents), "--text-column", "\udce9"], r"`text_column` \xe9 is not UTF-8"),
        (["train", "--out", str(tmp_path / "caf\udce9")], r"caf\xe9 is not UTF-8"),
        (["inspect", "caf\udce9"], r"`model` caf\xe9 is not UTF-8"),
    ):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_name_over_two_lines_is_one_line_of_an_error(tmp_path):
    path = write(tmp_path / "a\nb.jsonl", "no JSON")
    with pytest.raises(UserError, match=r"a\\nb\.jsonl:1: not valid JSON"):
        read(path)


# --- what geonorm wrote ---------------------------------------------------------------------------------------------


def test_a_corpus_among_its_texts_is_not_read_as_text(documents, capsys):
    words = ["prepare", str(documents), "--vocab-size", "257", "--workers", "1", "--out", str(documents / "corpus")]
    words += ["--min-documents", "1", "--max-share", "1"]
    assert main(words) == 0
    made = {path.name: path.read_bytes() for path in (documents / "corpus").iterdir()}
    capsys.readouterr()
    assert main(words) == 0
    assert "tokens/s" not in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in (documents / "corpus").iterdir()} == made
    assert Corpus.load(documents / "corpus").description["skipped"] == {}
    for paths in ([documents], [documents / "*"], [documents / "**"], [documents / "**" / "*.json"]):
        if paths == [documents / "**" / "*.json"]:
            with pytest.raises(UserError, match=r"no readable file matches .*left out: .*prepared corpus of geonorm"):
                FileSource(paths)
            continue
        source = FileSource(paths)
        assert {path.parent for path, _ in source.files} == {documents}
        assert source.left_out == {documents / "corpus": "prepared corpus of geonorm"}
    with pytest.raises(UserError, match=r"no readable file in the folder .*prepared corpus of geonorm"):
        FileSource([documents / "corpus"])


def test_an_unfinished_corpus_is_not_read_as_text(documents):
    with pytest.raises(KeyboardInterrupt):
        prepare([documents], out=documents / "corpus", progress=InterruptAfter(1), **PREPARE)
    assert {path.parent for path, _ in FileSource([documents]).files} == {documents}
    assert prepare([documents], out=documents / "corpus", **PREPARE).description["skipped"] == {}


SMALL = ["steps=2", "data.seq_len=16", "global_batch_size=2", "data.vocab_size=257"]


@pytest.mark.slow
def test_a_comparison_within_its_text_can_be_gone_on_with(documents, monkeypatch, capsys):
    monkeypatch.setenv("GEONORM_CACHE", str(documents / "cache"))
    words = [
        "compare",
        *SMALL,
        "--preset",
        "tiny",
        "--data",
        str(documents),
        "--placements",
        "pre",
        "post",
        "--jobs",
        "1",
    ]
    words += ["--out", str(documents / "runs" / "mine")]
    assert main(words) == 0
    assert main([*words, "--resume"]) == 0, capsys.readouterr().err
    left_out = FileSource([documents]).left_out
    assert left_out.pop(documents / "runs" / "mine") == "comparison of geonorm"
    assert set(left_out.values()) == {"prepared corpus of geonorm"}


@pytest.mark.slow
def test_a_run_and_all_that_is_made_of_it_within_its_text(documents, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GEONORM_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "recipe.yaml", RECIPE)
    data = f"data.sources=[{documents}]"
    train = ["train", data, "--config", str(tmp_path / "recipe.yaml"), "--out", str(documents / "run")]
    assert main(train) == 0, capsys.readouterr().err
    assert main([*train, "--resume"]) == 0, capsys.readouterr().err
    model = str(documents / "model")
    assert main(["export", str(documents / "run"), "--out", model]) == 0
    text = ["--text", str(documents), "--length", "16"]
    results = documents / "eval.json"
    assert main(["eval", model, *text, "--out", str(results)]) == 0, capsys.readouterr().err
    first = json.loads(results.read_text())["text"]
    assert main(["inspect", model, *text, "--out", str(documents / "inspection")]) == 0, capsys.readouterr().err
    capsys.readouterr()
    for command in (
        ["eval", model, *text, "--out", str(results)],
        ["inspect", model, *text, "--out", str(tmp_path / "i")],
    ):
        assert main(command) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        for name, what in LEFT_OUT.items():
            assert f"Left out: {documents / name} ({what})." in said
    assert json.loads(results.read_text())["text"] == first


RECIPE = """
model: {hidden_size: 16, num_layers: 1, num_heads: 2, placement: geonorm}
data: {seq_len: 16, vocab_size: 257}
global_batch_size: 2
steps: 3
evaluation: {windows: 2}
"""
LEFT_OUT = {
    "run": "training run of geonorm",
    "model": "saved model of geonorm",
    "eval.json": "result of geonorm eval",
    "inspection": "inspection of geonorm",
}
