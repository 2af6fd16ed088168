"""Prompts with completions, and conversations: which tokens have a label, in every format and on every way."""

import hashlib
import json
import pickle
import shutil

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from corpora import InterruptAfter
from geonorm.cli import main
from geonorm.data import Corpus, TokenFile, Windows, prepare, shards
from geonorm.data.records import Document
from geonorm.data.token_file import write_tokens
from geonorm.data.tokenizer import EOS, train_tokenizer
from geonorm.data.windows import spread_windows
from geonorm.errors import UserError
from turns import CHATML, answers, chat_tokenizer, conversations, write_lines

SIDES = ("train", "val", "test")
SHARES = {"vocab_size": 257, "val_fraction": 0.2, "test_fraction": 0.2}


def documents(corpus):
    """Ids and mask of each document, by side and in order."""
    found = []
    for side in SIDES:
        file = getattr(corpus, side)
        ends = np.flatnonzero(file.tokens == corpus.eos_id) + 1
        found += zip(np.split(file.tokens, ends)[:-1], np.split(file.mask, ends)[:-1], strict=True)
    return found


def texts(corpus):
    """What has no label and what has, for each document, without the end-of-text token."""
    decode = corpus.tokenizer.decode
    parts = [(ids[:-1], mask[:-1]) for ids, mask in documents(corpus)]
    return sorted(
        (decode(ids[~mask], skip_special_tokens=False), decode(ids[mask], skip_special_tokens=False))
        for ids, mask in parts
    )


def contents(corpus):
    return {path.name: path.read_bytes() for path in corpus.path.iterdir()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("answers")
    return prepare([write_lines(folder / "a.jsonl", answers())], out=folder / "out", **SHARES)


def test_completions_have_labels_and_prompts_are_context(plain):
    records = answers()
    assert texts(plain) == sorted((record["prompt"], record["completion"]) for record in records)
    assert all(mask[-1] for _, mask in documents(plain)), "an answer is followed by its end"
    labels = plain.description["num_labels"]
    assert labels == plain.num_labels == {side: int(getattr(plain, side).mask.sum()) for side in SIDES}
    assert sum(labels.values()) == sum(len(record["completion"].encode()) + 1 for record in records)
    for side in SIDES:
        path, file = plain.path / f"{side}.mask", getattr(plain, side)
        data = path.read_bytes()
        assert len(data) == file.num_tokens
        assert set(data) == {0, 1}
        assert file.metadata["mask_sha256"] == hashlib.sha256(data).hexdigest()
        assert (pickle.loads(pickle.dumps(file)).mask == file.mask).all()


def test_the_ids_are_those_of_the_whole_text_which_has_no_mask(plain, tmp_path):
    joined = [{"text": record["prompt"] + record["completion"]} for record in answers()]
    corpus = prepare([write_lines(tmp_path / "a.jsonl", joined)], out=tmp_path / "out", **SHARES)
    for side in SIDES:
        mine, theirs = getattr(corpus, side), getattr(plain, side)
        assert (mine.tokens == theirs.tokens).all()
        assert mine.mask is None
        assert mine.identity == mine.metadata["sha256"] != theirs.identity
        assert mine.num_labels == mine.num_tokens
    assert not list(corpus.path.glob("*.mask"))
    assert "num_labels" not in corpus.description
    assert "mask_sha256" not in corpus.train.metadata
    assert corpus.description["fingerprint"] != plain.description["fingerprint"]


def stored(records, path):
    if path.suffix == ".jsonl":
        return write_lines(path, records)
    if path.suffix == ".json":
        path.write_text(json.dumps(records))
        return path
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


@pytest.mark.parametrize("name", ["a.json", "a.parquet", "hub of jsonl", "hub of parquet"])
@pytest.mark.parametrize("kind", ["answers", "conversations"])
def test_every_format_gives_the_same(tmp_path, name, kind):
    records = answers() if kind == "answers" else conversations()
    options = SHARES if kind == "answers" else {**SHARES, "tokenizer": chat_tokenizer(tmp_path / "tokenizer")}
    # A column that is not asked for, which would not be read.
    records = [{**record, "other": number} for number, record in enumerate(records)]
    want = prepare([stored(records, tmp_path / "a.jsonl")], out=tmp_path / "lines", **options)
    if name.startswith("hub"):
        (tmp_path / "set").mkdir()
        stored(records, tmp_path / "set" / f"train.{name.split()[-1]}")
        source = f"hf://{tmp_path}/set"
    else:
        source = stored(records, tmp_path / name)
    got = prepare([source], out=tmp_path / "got", **options)
    assert [getattr(got, side).identity for side in SIDES] == [getattr(want, side).identity for side in SIDES]


def test_a_token_on_the_edge_belongs_to_the_completion(tmp_path):
    """The blank that ends the prompt is one token with the word that begins the completion."""
    tokenizer = train_tokenizer(["The capital is Paris.\n" * 50], 300)
    assert tokenizer.encode(" Paris").tokens == ["ĠParis"]
    document = Document("The capital is Paris.", labelled=[(15, 21)])
    assert document[15:] == "Paris."
    file = write_tokens([document, "Paris is plain."], tokenizer, tmp_path / "t")
    first = int(np.flatnonzero(file.tokens == file.metadata["eos_id"])[0])
    assert tokenizer.decode(file.tokens[: first + 1][file.mask[: first + 1]]) == " Paris."
    assert file.mask[first:].all()


def test_blank_parts_and_nulls(tmp_path):
    edges = [
        {"prompt": "", "completion": "all of it is an answer"},
        {"prompt": "the answer is to say nothing", "completion": ""},
        {"prompt": None, "completion": "no prompt"},
        {"prompt": "no completion", "completion": None},
        {"prompt": " ", "completion": "\n"},
    ]
    corpus = prepare([write_lines(tmp_path / "a.jsonl", answers() + edges)], out=tmp_path / "out", **SHARES)
    assert corpus.description["skipped"] == {"blank document": 1, "null text": 2}
    assert ("", "all of it is an answer") in texts(corpus)
    silent = next((ids, mask) for ids, mask in documents(corpus) if mask.sum() == 1)
    assert silent[1][-1], "what is to be learned is that the text ends"


def test_a_named_text_column_comes_first(tmp_path, capsys):
    both = [{**record, "text": f"text {number}"} for number, record in enumerate(answers())]
    corpus = prepare([write_lines(tmp_path / "a.jsonl", both)], out=tmp_path / "text", **SHARES)
    assert corpus.train.mask is None
    corpus = prepare([tmp_path / "a.jsonl"], out=tmp_path / "prompt", text_column="prompt", **SHARES)
    assert corpus.train.mask is None
    path = write_lines(tmp_path / "b.jsonl", answers())
    with pytest.raises(UserError, match="no column `body`; its columns are: completion, prompt"):
        prepare([path], text_column="body", out=tmp_path / "none", **SHARES)


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = chat_tokenizer(folder / "tokenizer")
    return prepare(
        [write_lines(folder / "a.jsonl", conversations())], tokenizer=tokenizer, out=folder / "out", **SHARES
    ), AutoTokenizer.from_pretrained(tokenizer)


def test_what_the_assistant_says_has_labels_as_transformers_tells(chat):
    corpus, tokenizer = chat
    want = []
    for record in conversations():
        told = tokenizer.apply_chat_template(
            record["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert 0 < sum(told["assistant_masks"]) < len(told["input_ids"])
        want.append((list(told["input_ids"]), [bool(label) for label in told["assistant_masks"]]))
    got = documents(corpus)
    assert sorted((ids[:-1].tolist(), mask[:-1].tolist()) for ids, mask in got) == sorted(want)
    assert all(mask[-1] for _, mask in got), "nothing but a line feed follows the last turn"
    assert corpus.description["notes"] == []


def test_a_conversation_that_spells_a_special_token_is_left_out(tmp_path):
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    bad = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a <|stop|> b"}]}]}
    corpus = prepare(
        [write_lines(tmp_path / "a.jsonl", [*conversations(), bad])], tokenizer=tokenizer, out=tmp_path / "o", **SHARES
    )
    assert corpus.description["skipped"] == {"conversation that spells a special token": 1}
    assert len(documents(corpus)) == 60


def test_another_template_makes_another_corpus(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", conversations())
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    corpora = [prepare([path], tokenizer=tokenizer, cache_dir=tmp_path / "cache", **SHARES)]
    chat_tokenizer(tmp_path / "tokenizer", CHATML.replace("'\n' }}{% endfor", "'\n\n' }}{% endfor"))
    corpora.append(prepare([path], tokenizer=tokenizer, cache_dir=tmp_path / "cache", **SHARES))
    assert corpora[0].path != corpora[1].path
    assert corpora[0].train.num_tokens != corpora[1].train.num_tokens


@pytest.mark.parametrize(
    ("template", "records", "eos", "message"),
    [
        (
            CHATML.replace("generation", "if true", 1).replace("endgeneration", "endif"),
            None,
            EOS,
            "has no {% generation",
        ),
        (None, None, EOS, "has no chat template, which conversations need; take one that has"),
        (CHATML, None, "<|stop|>", "writes <|stop|> inside a conversation, so it cannot end a document; name another"),
        (
            "{{ raise_exception('roles must alternate') }}{% generation %}{% endgeneration %}",
            None,
            EOS,
            "a.jsonl:1: the chat template refuses these `messages` (roles must alternate)",
        ),
        (
            CHATML,
            [{"messages": [{"role": "user", "content": "a"}, "b"]}],
            EOS,
            "a.jsonl:1: `messages` is a list in which",
        ),
        (CHATML, [{"messages": "a"}], EOS, None),
        (CHATML, [{"prompt": ["a"], "completion": "b"}], EOS, "a.jsonl:1: `prompt` is of type list, not a string"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, template, records, eos, message):
    path = write_lines(tmp_path / "a.jsonl", records or conversations())
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", template, eos)
    code = main(["prepare", str(path), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert code == 2
    assert error.count("\n") == 1
    assert message is None or message in error


def test_conversations_need_a_tokenizer(tmp_path, capsys):
    path = write_lines(tmp_path / "a.jsonl", conversations())
    # It is not a fault of the file.
    assert main(["prepare", str(path), "--out", str(tmp_path / "out"), "--skip-unreadable"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: conversations need the chat template of a tokenizer")
    assert error.count("\n") == 1


def test_workers_and_shards_and_interruptions_change_nothing(plain, tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", answers())
    monkeypatch.setattr(shards, "SHARD_CHARACTERS", 500)
    two = prepare([path], out=tmp_path / "2", workers=2, **SHARES)
    assert two.build.num_shards > 3
    assert contents(two) == contents(plain)

    with pytest.raises(KeyboardInterrupt):
        prepare([path], out=tmp_path / "on", progress=InterruptAfter(3), **SHARES)
    damaged = tmp_path / "on" / ".building" / "shards" / "000001.npz"
    with np.load(damaged) as found:
        mask = found["mask"].tobytes()
    data = damaged.read_bytes()
    assert data.count(mask) == 1
    damaged.write_bytes(data.replace(mask, bytes(len(mask))))
    on = prepare([path], out=tmp_path / "on", **SHARES)
    assert on.build.num_kept_shards == 2
    assert contents(on) == contents(plain)


def test_a_stream_that_was_kept_keeps_its_labels(tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    stored([{**record, "who": "a"} for record in answers()], tmp_path / "set" / "train.parquet")
    monkeypatch.setattr("geonorm.data.hub.KEPT_CHARACTERS", 500)
    # The tokenizer is trained in a first pass, and the second reads what that one kept.
    corpus = prepare([f"hf://{tmp_path}/set"], out=tmp_path / "out", **SHARES)
    assert texts(corpus) == sorted((record["prompt"], record["completion"]) for record in answers())


def test_groups_keep_their_labels(tmp_path):
    records = [{**record, "who": number // 3} for number, record in enumerate(answers())]
    corpus = prepare([write_lines(tmp_path / "a.jsonl", records)], group_by="who", out=tmp_path / "out", **SHARES)
    assert texts(corpus) == sorted((record["prompt"], record["completion"]) for record in records)


def test_one_record_is_cut_with_its_labels(tmp_path):
    lines = [f"line {number}\n" for number in range(40)]
    record = {"prompt": "".join(lines[:10]), "completion": "".join(lines[10:])}
    limits = {"min_documents": 1, "max_share": 1.0}
    corpus = prepare([write_lines(tmp_path / "a.jsonl", [record])], out=tmp_path / "out", **SHARES, **limits)
    ids, mask = corpus.train.tokens[:-1], corpus.train.mask[:-1]
    assert corpus.tokenizer.decode(ids[~mask]) == record["prompt"]
    assert corpus.val.mask is None
    held_out = "".join(corpus.tokenizer.decode(side.tokens[:-1]) for side in (corpus.val, corpus.test))
    assert corpus.tokenizer.decode(ids[mask]) + held_out == record["completion"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_mask_that_is_not_the_one_prepared_is_refused(plain, tmp_path, damage):
    folder = tmp_path / "copy"
    shutil.copytree(plain.path, folder)
    mask = folder / "train.mask"
    data = bytearray(mask.read_bytes())
    if damage == "gone":
        mask.unlink()
    else:
        data[5] ^= 1
        mask.write_bytes(data if damage == "flipped" else data[:-1])
    with pytest.raises(UserError, match=r"train\.mask is missing or not what was prepared"):
        Corpus.load(folder)


def masked_file(tmp_path, labelled):
    """A file of 0, 1, 2 ... of which the ids in ``labelled`` have a label, and an end-of-text id."""
    words = [f"w{number}" for number in range(40)]
    starts = np.cumsum([0, *(len(word) + 1 for word in words)])
    spans = [(starts[number], starts[number] + len(words[number])) for number in labelled]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([EOS])
    return write_tokens([Document(" ".join(words), labelled=spans)], made, tmp_path / "t")


def test_windows_carry_the_mask_and_those_without_a_label_are_left_out(tmp_path):
    # The first id of a window is never predicted: 10 counts for the window before the one that it begins.
    labelled = [3, 4, 10, 27, 28]
    windows = Windows(masked_file(tmp_path, labelled), length=5, seed=1)
    assert windows.num_windows == 3
    run = [(windows.batch(start, 1)[0], windows.mask(start, 1)[0]) for start in range(6)]
    assert {int(ids[0]) for ids, _ in run[:3]} == {int(ids[0]) for ids, _ in run[3:]} == {0, 5, 25}
    for ids, mask in run:
        assert ids.tolist() == list(range(ids[0], ids[0] + 6))
        assert ids[mask].tolist() == [number for number in labelled if ids[0] <= number <= ids[0] + 5]
    assert (windows.mask(0, 6) == [mask for _, mask in run]).all()
    held_out = spread_windows(windows.token_file, np.zeros(1, dtype=np.int32), 5, 99)
    assert held_out.ids[:, 0].tolist() == [0, 5, 25]
    assert held_out.ids[held_out.mask].tolist() == [3, 4, 10, 27, 28]


def test_a_file_without_a_window_that_has_a_label_is_refused(tmp_path):
    with pytest.raises(UserError, match="no window of length 5 in which a token has a label"):
        Windows(masked_file(tmp_path, [0]), length=5)


def test_a_file_written_anew_without_a_mask_has_none(tmp_path):
    assert masked_file(tmp_path, [3]).mask is not None
    assert write_tokens(["a b"], train_tokenizer(["a b"], 257), tmp_path / "t").mask is None
    assert not (tmp_path / "t.mask").exists()
    assert TokenFile(tmp_path / "t").mask is None
