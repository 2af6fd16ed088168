"""Worker processes, and going on after a kill."""

import json
import multiprocessing
import os
import signal
import time

import pytest

from corpora import FEW, write_documents
from geonorm.data import build, parallel, prepare, shards
from geonorm.data.prepare import prepare as function
from geonorm.errors import UserError

OPTIONS = {"vocab_size": 300, "val_fraction": 0.2, "test_fraction": 0.2, **FEW}
NAMES = [
    *("description.json", "token_bytes.npy", "tokenizer.json", "train.tokens", "train.tokens.json"),
    *("val.tokens", "val.groups.npy", "test.tokens", "test.groups.npy"),
]


@pytest.fixture
def data(tmp_path):
    return write_documents(tmp_path / "data", count=30)


@pytest.fixture
def small_shards(monkeypatch):
    """About 15 shards instead of one."""
    monkeypatch.setattr(build, "group", _small_groups)


def _small_groups(documents):
    return shards.group(documents, 2_000)


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


def test_groups_follow_the_documents_alone():
    assert list(shards.group(["aa", "b", "cccc", "d"], 3)) == [["aa", "b"], ["cccc"], ["d"]]
    assert list(shards.group([], 3)) == []


def _killed_after(data, out, count):
    """Encode ``count`` shards, then die as by ``kill -9``."""
    build.group = _small_groups
    encode, done = shards.ShardEncoder.__call__, 0

    def encode_or_die(self, number, texts):
        nonlocal done
        if done == count:
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        return encode(self, number, texts)

    shards.ShardEncoder.__call__ = encode_or_die
    prepare([data], out=out, **OPTIONS)


def test_finished_shards_survive_a_kill_and_are_verified(data, tmp_path, small_shards, monkeypatch):
    out = tmp_path / "out"
    process = multiprocessing.get_context("spawn").Process(target=_killed_after, args=(data, out, 5))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    folder = out / ".building" / "shards"
    assert len(list(folder.glob("*.json"))) == 5
    # One was damaged since, and one half written.
    ids = bytearray((folder / "000001.ids").read_bytes())
    ids[7] ^= 1
    (folder / "000001.ids").write_bytes(ids)
    (folder / "000005.ids").write_bytes(b"half")
    with pytest.raises(UserError, match=r"holds an unfinished corpus of other text or settings"):
        prepare([data], out=out, vocab_size=301)
    monkeypatch.setattr(build, "train_tokenizer", None)  # the tokenizer is taken over as well
    lines = []
    corpus = prepare([data], out=out, report=lines.append, **OPTIONS)
    assert corpus.build.num_kept_shards == 4
    assert any(f"4 of {corpus.build.num_shards} shards kept" in line for line in lines)
    monkeypatch.undo()
    assert contents(corpus) == contents(prepare([data], out=tmp_path / "straight", **OPTIONS))


def test_a_shard_of_other_documents_is_not_taken_over(tmp_path, data):
    corpus = prepare([data], out=tmp_path / "out", **OPTIONS)
    encode = shards.ShardEncoder(tmp_path, corpus.tokenizer_path, "<|endoftext|>")
    made = encode(0, ["one", "two"])
    assert shards.finished(tmp_path, 0, ["one", "two"]) == made
    assert shards.finished(tmp_path, 0, ["one", "tw0"]) is None
    assert shards.finished(tmp_path, 1, ["one", "two"]) is None


class Recorder:
    """A worker's task that writes down its process and can end it."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, number, fatal=False):
        if fatal:
            os._exit(9)
        (self.folder / str(number)).write_text(str(os.getpid()))
        return number


def test_only_a_few_tasks_are_taken_ahead(tmp_path):
    taken = []

    def tasks():
        for number in range(20):
            # Results that are not back yet: the task in hand and at most one more than there are workers.
            assert number - len(results) <= 3
            taken.append(number)
            yield (number,)

    results = []
    for result in parallel.spread(Recorder, (tmp_path,), tasks(), 2):
        results += [result]
    assert sorted(results) == taken == list(range(20))
    assert str(os.getpid()) not in {path.read_text() for path in tmp_path.iterdir()}


def test_a_single_task_needs_no_process(tmp_path):
    assert list(parallel.spread(Recorder, (tmp_path,), iter([(7,)]), 4)) == [7]
    assert (tmp_path / "7").read_text() == str(os.getpid())


def test_a_worker_that_dies_is_one_line(tmp_path):
    with pytest.raises(UserError, match="a worker process was killed or could not start; if memory ran out use fewer"):
        list(parallel.spread(Recorder, (tmp_path,), iter([(0, True), (1, True), (2, True)]), 2))


def _spread_and_die(folder):
    for _ in parallel.spread(Recorder, (folder,), iter([(number,) for number in range(10)]), 2):
        if len(list(folder.iterdir())) >= 3:
            os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_a_killed_parent(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=_spread_and_die, args=(tmp_path,))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    workers = {int(path.read_text()) for path in tmp_path.iterdir()}
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
    with pytest.raises(UserError, match="`vocab_size` is 999, but .* was prepared with 300"):
        prepare([corpus.path], vocab_size=999)
    for extra in ({"tokenizer": corpus.path}, {"out": tmp_path / "x"}):
        with pytest.raises(UserError, match="is a prepared corpus; give it alone"):
            prepare([corpus.path], **extra)
    with pytest.raises(UserError, match="is a prepared corpus; give it alone"):
        prepare([corpus.path, data])


def test_progress_counts_up(data, tmp_path, small_shards):
    seen = []
    corpus = function([data], out=tmp_path / "out", progress=seen.append, **OPTIONS)
    encoding = [progress for progress in seen if progress.stage == "encoding"]
    assert len(encoding) == corpus.build.num_shards
    last = encoding[-1]
    assert last.num_tokens == sum(corpus.description["num_tokens"].values())
    assert last.num_bytes == last.total_bytes == sum(corpus.description["num_bytes"].values())
    assert [p.num_documents for p in encoding] == sorted({p.num_documents for p in encoding})
    assert json.loads((corpus.path / "description.json").read_text()) == corpus.description
