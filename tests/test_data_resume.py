"""Worker processes, and going on after a kill."""

import json
import multiprocessing
import os
import signal
import time

import pytest

from corpora import FEW, InterruptAfter, write_documents
from geonorm.data import prepare, shards
from geonorm.data.shards import encode_shards
from geonorm.data.tokenizer import EOS, train_tokenizer
from geonorm.errors import UserError
from geonorm.progress_bar import ProgressBar

OPTIONS = {"vocab_size": 300, "val_fraction": 0.2, "test_fraction": 0.2, **FEW}
NAMES = [
    *("description.json", "token_bytes.npy", "tokenizer.json", "train.tokens", "train.tokens.json"),
    *("val.tokens", "val.groups.npy", "test.tokens", "test.groups.npy"),
]
# Gives about 15 shards instead of one.
SMALL = 2_000


@pytest.fixture
def data(tmp_path):
    return write_documents(tmp_path / "data", count=30)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", SMALL)


def contents(corpus):
    return {name: (corpus.path / name).read_bytes() for name in NAMES}


def test_the_result_depends_neither_on_the_workers_nor_on_the_shards(data, tmp_path, small_shards, monkeypatch):
    one = prepare([data], out=tmp_path / "1", **OPTIONS)
    three = prepare([data], out=tmp_path / "3", workers=3, **OPTIONS)
    assert one.build.num_shards == three.build.num_shards > 9
    assert contents(one) == contents(three)
    monkeypatch.undo()
    whole = prepare([data], out=tmp_path / "whole", **OPTIONS)
    assert whole.build.num_shards == 1
    assert contents(whole) == contents(one)


def test_a_program_that_is_not_the_command_gets_one_worker_unless_it_asks(data, tmp_path):
    assert prepare([data], out=tmp_path / "out", **OPTIONS).build.workers == 1


def _killed_after(data, out, count):
    """Encode ``count`` shards, then die as by ``kill -9``."""
    shards.SHARD_CHARACTERS = SMALL
    die = InterruptAfter(count, lambda: os.kill(os.getpid(), signal.SIGKILL))
    prepare([data], out=out, progress=die, **OPTIONS)


def test_finished_shards_survive_a_kill_and_are_verified(data, tmp_path, small_shards):
    out = tmp_path / "out"
    process = multiprocessing.get_context("spawn").Process(target=_killed_after, args=(data, out, 5))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    folder = out / ".building" / "shards"
    assert sorted(path.name for path in folder.iterdir()) == [f"{number:06d}.npz" for number in range(5)]
    # One was damaged since, one is of other documents, and one is half written.
    damaged = bytearray((folder / "000001.npz").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (folder / "000001.npz").write_bytes(damaged)
    (folder / "000002.npz").write_bytes((folder / "000003.npz").read_bytes())
    (folder / "000005.npz").write_bytes(b"half")
    with pytest.raises(UserError, match=r"holds an unfinished corpus of other text or settings"):
        prepare([data], out=out, vocab_size=301)
    lines = []
    corpus = prepare([data], out=out, report=lines.append, **OPTIONS)
    assert not any("training a tokenizer" in line for line in lines), "it is taken over as well"
    assert corpus.build.num_kept_shards == 3
    assert any(f"3 of {corpus.build.num_shards} shards kept" in line for line in lines)
    assert contents(corpus) == contents(prepare([data], out=tmp_path / "straight", **OPTIONS))


@pytest.fixture
def encoder(tmp_path):
    """Arguments of what encodes, with a folder for shards."""
    return _encoder(tmp_path)


def _encoder(folder):
    train_tokenizer(["some text"], 257).save(str(folder / "tokenizer.json"))
    (folder / "shards").mkdir()
    return folder / "shards", folder / "tokenizer.json", EOS


def test_only_a_few_lists_are_taken_ahead(encoder):
    taken, results, processes = [], [], 0

    def tasks():
        for number in range(20):
            # Results that are not back yet: the task in hand and at most one more than there are workers.
            assert number - len(results) <= 3
            taken.append(number)
            yield number, ["a text"] * (number + 1)

    for counts in encode_shards(encoder, tasks(), 2):
        results.append(counts["num_documents"] - 1)
        processes = max(processes, len(multiprocessing.active_children()))
    assert sorted(results) == taken == list(range(20))
    assert processes == 2
    assert not multiprocessing.active_children()


def test_a_single_list_needs_no_process(encoder):
    for counts in encode_shards(encoder, iter([(7, ["a text"])]), 4):
        assert counts["num_tokens"] == len("a text") + 1
        assert not multiprocessing.active_children()
    assert [path.name for path in encoder[0].iterdir()] == ["000007.npz"]


class Fatal:
    """Ends the process that receives it."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_worker_that_dies_is_one_line(encoder):
    with pytest.raises(UserError, match="a worker process was killed or could not start; if memory ran out use fewer"):
        list(encode_shards(encoder, iter([(number, [Fatal()]) for number in range(3)]), 2))


def _encode_and_die(folder):
    for _ in encode_shards(_encoder(folder), ((number, ["a text"]) for number in range(10)), 2):
        (folder / "pids").write_text(json.dumps([process.pid for process in multiprocessing.active_children()]))
        os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_a_killed_parent(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_encode_and_die, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    workers = json.loads((tmp_path / "pids").read_text())
    assert len(workers) == 2
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if os.path.exists(f"/proc/{pid}/exe")]


def test_a_folder_with_something_else_is_left_alone(data, tmp_path):
    out = tmp_path / "out"
    prepare([data], out=out, **OPTIONS)
    assert prepare([data], out=out, **OPTIONS).build is None
    with pytest.raises(UserError, match=r"out holds a corpus of other text or settings; name another folder"):
        prepare([data], out=out, vocab_size=301)
    with pytest.raises(UserError, match=r"data is not empty and holds no corpus; name another folder"):
        prepare([data], out=data, **OPTIONS)
    with pytest.raises(UserError, match=r"000\.txt is a file; name a folder"):
        prepare([data], out=data / "000.txt", **OPTIONS)


def test_a_prepared_corpus_is_data(data, tmp_path):
    corpus = prepare([data], out=tmp_path / "out", **OPTIONS)
    lines = []
    again = prepare([corpus.path], report=lines.append)
    assert again.description == corpus.description
    assert "its own vocabulary and split are used" in lines[0]
    with pytest.raises(UserError, match=r"`vocab_size` is 999, but .* was prepared with 300; leave `vocab_size` out"):
        prepare([corpus.path], vocab_size=999)
    for extra in ({"tokenizer": corpus.path}, {"out": tmp_path / "x"}):
        with pytest.raises(UserError, match="is a prepared corpus; give it alone"):
            prepare([corpus.path], **extra)
    with pytest.raises(UserError, match="is a prepared corpus; give it alone"):
        prepare([corpus.path, data])


class Seen(ProgressBar):
    """Keeps what an encoding shows: megabytes, all of them, and the counts."""

    def __init__(self):
        super().__init__()
        self.encoding = []

    def show(self, done, total, note="", counts=None):
        if self.what == "encoding":
            self.encoding.append((done, total, counts))


def test_counts_grow_to_those_of_the_corpus(data, tmp_path, small_shards):
    seen = Seen()
    corpus = prepare([data], out=tmp_path / "out", progress=seen, **OPTIONS)
    assert len(seen.encoding) == corpus.build.num_shards
    megabytes, total, counts = seen.encoding[-1]
    assert counts["tokens"] == sum(corpus.description["num_tokens"].values())
    assert megabytes == total == sum(corpus.description["num_bytes"].values()) / 1e6
    documents = [counts["documents"] for _, _, counts in seen.encoding]
    assert documents == sorted(set(documents))
    assert json.loads((corpus.path / "description.json").read_text()) == corpus.description


def test_the_size_of_a_text_is_estimated_where_it_is_read_once(tmp_path, small_shards):
    lines = [json.dumps({"text": f"line {number} " * 20}) for number in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    train_tokenizer(["line 1 "], 257).save(str(tmp_path / "tokenizer.json"))
    seen = Seen()
    options = {"tokenizer": tmp_path / "tokenizer.json", "out": tmp_path / "out"}
    corpus = prepare([tmp_path / "a.jsonl"], progress=seen, **options, **FEW)
    size = sum(corpus.description["num_bytes"].values()) / 1e6
    totals = [total for _, total, _ in seen.encoding]
    assert totals == pytest.approx([size] * len(totals), rel=0.25)
    assert totals[-1] == size
