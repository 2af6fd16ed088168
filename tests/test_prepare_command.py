"""``geonorm prepare`` as a user meets it."""

import json
import os
import re
import subprocess
import sys

import pytest

from corpora import write_documents
from geonorm.cli import main
from geonorm.data import Corpus, Windows
from geonorm.errors import UserError


@pytest.fixture
def data(tmp_path):
    return write_documents(tmp_path / "data", count=20)


def test_plain_lines_and_a_summary(data, tmp_path):
    (data / "bad.txt").write_bytes(b"\xff")
    command = [sys.executable, "-m", "geonorm", "prepare", str(data / "*.txt"), "--out", str(tmp_path / "out")]
    options = ["--vocab-size", "257", "--skip-unreadable", "--min-documents", "1", "--max-share", "1"]
    environment = {**os.environ, "PYTHONUTF8": "1"}
    run = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    assert (run.returncode, run.stderr) == (0, "")
    assert "\x1b" not in run.stdout
    corpus = Corpus.load(tmp_path / "out")
    facts = corpus.description
    assert f"{facts['num_tokens']['train']:,} train, {facts['num_tokens']['val']:,} validation and" in run.stdout
    for words in (
        "1 x unreadable file",
        "bad.txt:1: byte 0xff",
        f"tokens/s, workers: {len(os.sched_getaffinity(0))}\n",
        "1.00 bytes per token",
    ):
        assert words in run.stdout
    again = subprocess.run([*command, *options], capture_output=True, text=True, env=environment)
    assert again.returncode == 0
    assert "tokens/s" not in again.stdout


def test_mistakes_are_one_line(data, capsys, tmp_path):
    for words, message in [
        (["nowhere.txt"], "no such file or folder: nowhere.txt"),
        ([str(data), "--tokenizer", str(data)], "cannot read a tokenizer from"),
        ([str(data), "--workers", "0"], "`workers` must be a whole number of at least 1"),
        ([str(data), "--val-fraction", "0.9"], "`val_fraction` and `test_fraction` must be at most 0.5 together"),
    ]:
        assert main(["prepare", *words, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
        assert error.count("\n") == 1


def test_compare_takes_what_prepare_made(data, tmp_path, capsys):
    assert (
        main(
            [
                "prepare",
                str(data),
                "--vocab-size",
                "300",
                "--min-documents",
                "1",
                "--max-share",
                "1",
                "--out",
                str(tmp_path / "corpus"),
            ]
        )
        == 0
    )
    run = ["compare", "steps=2", "data.seq_len=16", "global_batch_size=2", "evaluation.windows=2"]
    words = [
        "--preset",
        "tiny",
        "--data",
        str(tmp_path / "corpus"),
        "--placements",
        "pre",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main([*run, "data.vocab_size=999", *words]) == 2
    assert "`data.vocab_size` is given, but" in capsys.readouterr().err
    assert main([*run, *words, "--lrs", "1e-3", "--jobs", "1"]) == 0
    assert "vocab_size: 300" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_stream_shorter_than_a_window_and_one_token_more(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 10 + "\n" + "y" * 5 + "\n" + "z" * 5)
    main(
        [
            "prepare",
            str(tmp_path / "a.txt"),
            "--vocab-size",
            "257",
            *("--val-fraction", "0.25", "--test-fraction", "0.25", "--min-documents", "1"),
            "--out",
            str(tmp_path / "c"),
        ]
    )
    corpus = Corpus.load(tmp_path / "c")
    length = corpus.val.num_tokens
    assert Windows(corpus.val, length=length - 1).num_windows == 1
    with pytest.raises(
        UserError, match=rf"holds {length} tokens, but one window of length {length} needs {length + 1}"
    ):
        Windows(corpus.val, length=length)


def test_one_group_is_not_cut_as_if_it_were_one_document(tmp_path, capsys):
    lines = [json.dumps({"text": f"text {n} " * 20, "author": "same"}) for n in range(40)]
    (tmp_path / "one.jsonl").write_text("\n".join(lines))
    words = ["--group-by", "author", "--min-documents", "1", "--vocab-size", "300", "--out", str(tmp_path / "corpus")]
    assert main(["prepare", str(tmp_path / "one.jsonl"), *words]) == 2
    assert "all documents are of one group" in capsys.readouterr().err


def test_a_folder_with_a_lock_and_other_files_is_not_written_to(tmp_path, capsys):
    """Runs and comparisons have such a lock."""
    write_documents(tmp_path / "text")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".lock", "tokenizer.json", "download.partial"):
        (folder / name).write_text("mine")
    assert main(["prepare", str(tmp_path / "text"), "--vocab-size", "300", "--out", str(folder)]) == 2
    assert "is not empty and holds no corpus" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
        (".lock", "tokenizer.json", "download.partial"), "mine"
    )


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--dedup", "near", "`dedup` is 'near', but .* was prepared with None; leave `dedup` out"),
        ("--max-documents", "5", "`max_documents` is 5, but .* was prepared with None"),
        ("--vocab-size", "400", "`vocab_size` is 400, but .* was prepared with 300"),
        ("--test-fraction", "0.2", "`test_fraction` is 0.2, but .* was prepared with 0.1"),
    ],
)
def test_what_a_prepared_corpus_was_not_made_with_is_refused(tmp_path, capsys, option, value, message):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"the {number}. text " * 20)
    words = ["--vocab-size", "300", "--test-fraction", "0.1", "--min-documents", "1", "--max-share", "1"]
    assert main(["prepare", str(tmp_path), *words, "--out", str(tmp_path / "corpus")]) == 0
    assert main(["prepare", str(tmp_path / "corpus"), *words]) == 0
    capsys.readouterr()
    assert main(["prepare", str(tmp_path / "corpus"), option, value]) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_a_copy_in_two_groups_is_left_out(tmp_path):
    records = [{"text": f"text {number} of many", "author": f"a{number % 10}"} for number in range(40)]
    records += [{**record, "author": "copier"} for record in records]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    words = ["--group-by", "author", "--min-documents", "1", "--max-share", "1", "--vocab-size", "300"]
    assert main(["prepare", str(tmp_path / "a.jsonl"), *words, "--out", str(tmp_path / "corpus")]) == 0
    facts = Corpus.load(tmp_path / "corpus").description
    assert facts["skipped"] == {"copy of an earlier document": 40}
    assert facts["settings"]["dedup"] == "exact"
