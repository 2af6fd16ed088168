"""`geonorm eval` and `geonorm generate`: lm-eval tasks from local files, text, prompts, and what users get wrong."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import pytest
import torch

from geonorm import UserError
from geonorm.cli import main
from geonorm.evaluation import GenerationSettings, evaluate_tasks, generate, perplexity
from geonorm.models import rewire
from tiny_models import TEXT, save, tiny_llama, tiny_tokenizer

QUESTIONS = [
    {"question": "The stream walks on", "choices": ["a sphere", "two of the", "nobody"], "answer": 0},
    {"question": "It was the best of", "choices": ["pounds", "times", "layer gives a"], "answer": 1},
    {"question": "In 1984 a man's", "choices": ["caf\u00e9", "sphere", "worst"], "answer": 2},
]
PAGES = ["It was the best of times, it was the worst.", "Each layer gives a direction of its own."]


@pytest.fixture
def task_folder(tmp_path):
    pytest.importorskip("lm_eval")
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (folder / "pages.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in PAGES))
    (folder / "questions.yaml").write_text(
        "task: tiny_questions\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'questions.jsonl'}}}}}\n"
        "test_split: test\nfewshot_split: test\noutput_type: multiple_choice\n"
        "doc_to_text: '{{question}}'\ndoc_to_choice: choices\ndoc_to_target: answer\n"
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
    )
    (folder / "pages.yaml").write_text(
        "task: tiny_pages\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'pages.jsonl'}}}}}\n"
        "test_split: test\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{page}}'\n"
        "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n"
    )
    return folder


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))


def best_choice(model, tokenizer, row) -> int:
    """The choice whose tokens have the highest sum of log probabilities after the question."""
    scores = []
    for choice in row["choices"]:
        start, whole = (
            tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (row["question"], f"{row['question']} {choice}")
        )
        with torch.no_grad():
            logs = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        scores.append(sum(logs[at - 1, whole[at]].item() for at in range(len(start), len(whole))))
    return scores.index(max(scores))


@pytest.mark.parametrize("placement", [None, "geonorm"])
def test_tasks_of_lm_eval_give_what_a_loop_gives(placement, task_folder):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    if placement:
        rewire(model, placement).eval()
    rows = evaluate_tasks(model, tokenizer, ["tiny_questions", "tiny_pages"], include_path=[task_folder])
    found = {(row["task"], row["metric"]): row for row in rows}
    right = [best_choice(model, tokenizer, row) == row["answer"] for row in QUESTIONS]
    accuracy = found["tiny_questions", "acc"]
    assert accuracy["value"] == pytest.approx(sum(right) / 3)
    assert (accuracy["num_examples"], accuracy["num_fewshot"], accuracy["higher_is_better"]) == (3, 0, True)
    # Its rolling window begins each document after the same token and scores the first one too.
    own = perplexity(model, tokenizer, PAGES)
    assert found["tiny_pages", "bits_per_byte"]["value"] == pytest.approx(own.bits_per_byte, rel=1e-5)


def test_limit_and_examples(task_folder):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    options = {"include_path": [task_folder], "limit": 2, "num_fewshot": 1}
    (row,) = evaluate_tasks(model, tokenizer, ["tiny_questions"], **options)
    assert (row["num_examples"], row["num_fewshot"]) == (2, 1)


def test_tasks_that_cannot_run(task_folder, tmp_path):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    (task_folder / "pages.jsonl").unlink()
    for tasks, options, pattern in (
        ([], {}, "no task given"),
        (
            ["tiny_question"],
            {"include_path": [task_folder]},
            "unknown task 'tiny_question'; did you mean tiny_questions",
        ),
        (["tiny_pages"], {"include_path": [task_folder]}, "the tasks tiny_pages cannot be loaded"),
        (["tiny_pages"], {"include_path": [tmp_path / "gone"]}, "`include_path`: no such folder"),
        (["tiny_pages"], {"limit": 1.5}, "`limit` must be a number of examples, or a share"),
        (["tiny_pages"], {"num_fewshot": -1}, "`num_fewshot` must be"),
    ):
        with pytest.raises(UserError, match=pattern) as caught:
            evaluate_tasks(model, tokenizer, tasks, **options)
        assert "\n" not in str(caught.value)


# --- generate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [None, "geonorm"])
def test_greedy_text_is_the_likeliest_token_each_time(placement):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    if placement:
        rewire(model, placement).eval()
    out = io.StringIO()
    (text,) = generate(model, tokenizer, ["The stream"], GenerationSettings(12, temperature=0), out)
    ids = tokenizer("The stream")["input_ids"]
    start = len(ids)
    for _ in range(12):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert text == tokenizer.decode(ids[start:])
    assert out.getvalue() == f"The stream{text}\n"


def test_draws_follow_the_seed_and_not_the_company():
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    settings = GenerationSettings(20, temperature=1.0, seed=3)
    state = torch.get_rng_state()
    both = generate(model, tokenizer, ["It was", "", "It was"], settings, io.StringIO())
    assert torch.equal(torch.get_rng_state(), state)
    assert both[0] == both[2] == generate(model, tokenizer, ["It was"], settings, io.StringIO())[0]
    other = GenerationSettings(20, temperature=1.0, seed=4)
    assert generate(model, tokenizer, ["It was"], other, io.StringIO())[0] != both[0]
    # A tiny nucleus leaves the likeliest token alone.
    narrow = GenerationSettings(20, temperature=1.0, top_p=1e-6)
    greedy = GenerationSettings(20, temperature=0)
    assert generate(model, tokenizer, ["It"], narrow, io.StringIO()) == generate(
        model, tokenizer, ["It"], greedy, io.StringIO()
    )


def test_drawn_tokens_follow_the_whole_distribution():
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    # No cut to the 50 likeliest tokens by default: at a high temperature most draws lie beyond them.
    settings = GenerationSettings(60, temperature=1e4, top_p=1.0)
    (text,) = generate(model, tokenizer, ["It"], settings, io.StringIO())
    likeliest = model(torch.tensor([tokenizer("It")["input_ids"]])).logits[0, -1].topk(50).indices
    assert sum(index in likeliest for index in tokenizer(text)["input_ids"]) < 40


def test_beams_find_a_likelier_text_than_greedy_and_print_once():
    model, tokenizer = tiny_llama(initializer_range=0.3), tiny_tokenizer()
    ids = torch.tensor([tokenizer("It was")["input_ids"]])

    def found(beams: int) -> tuple[str, float]:
        settings = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        logs = model(whole).logits[0].log_softmax(-1)
        places = range(ids.shape[1], whole.shape[1])
        return tokenizer.decode(whole[0, ids.shape[1] :]), sum(logs[at - 1, whole[0, at]].item() for at in places)

    (greedy, low), (wanted, high) = found(1), found(8)
    assert high > low + 1
    out = io.StringIO()
    (text,) = generate(model, tokenizer, ["It was"], GenerationSettings(6, temperature=0, num_beams=8), out)
    assert text == wanted != greedy
    assert out.getvalue() == f"It was{text}\n"


def test_prompts_and_settings_that_cannot_be(capsys):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    for settings, pattern in (
        ({"temperature": -1}, r"`temperature` must be a number in \[0, "),
        ({"top_p": 0}, "`top_p` must be positive"),
        ({"top_p": 1.5}, r"`top_p` must be a number in \(0, 1\]"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be"),
        ({"num_beams": 0}, "`num_beams` must be"),
    ):
        with pytest.raises(UserError, match=pattern):
            GenerationSettings(**settings)
    with pytest.raises(UserError, match="more than the 256 positions of the model"):
        generate(model, tokenizer, [TEXT * 3], GenerationSettings())
    with pytest.raises(UserError, match="no chat template"):
        generate(model, tokenizer, ["Hi"], GenerationSettings(chat=True))
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="an empty prompt needs a BOS or EOS token"):
        generate(model, tokenizer, [""], GenerationSettings())


def test_help_appears_without_the_libraries_of_models():
    code = (
        "import contextlib, sys\n"
        "from geonorm.cli import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])\n"
        "heavy = {'transformers', 'datasets', 'lm_eval', 'matplotlib', 'ray', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]"


# --- commands -------------------------------------------------------------------------------------------------------


def run(*arguments) -> int:
    return main([str(argument) for argument in arguments])


def test_eval_command(task_folder, tmp_path, capsys):
    stock = save(tiny_llama(), tmp_path / "stock")
    (tmp_path / "a.txt").write_text(PAGES[0])
    (tmp_path / "b.jsonl").write_text(json.dumps({"body": PAGES[1]}) + "\n")
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    options = ["--tasks", "tiny_questions", "--include-path", task_folder, "--out", tmp_path / "r.json"]
    assert run("eval", stock, "--text", *files, "--text-column", "body", "--length", 16, "--stride", 4, *options) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "r.json").read_text())
    assert f"{found['text']['bits_per_byte']:.4f}" in said
    assert "tiny_questions" in said
    own = perplexity(tiny_llama(), tiny_tokenizer(), PAGES, length=16, stride=4)
    assert found["text"]["loss"] == pytest.approx(own.loss, rel=1e-6)
    assert found["tasks"][0]["metric"] == "acc"
    assert found["placement"] is None


def test_what_is_scored_is_kept_when_tasks_fail(task_folder, tmp_path, capsys):
    stock = save(tiny_llama(), tmp_path / "stock")
    (tmp_path / "a.txt").write_text(PAGES[0])
    options = ["--text", tmp_path / "a.txt", "--include-path", task_folder, "--out", tmp_path / "r.json"]
    assert run("eval", stock, *options, "--tasks", "tiny_questions", "--limit", 1.5) == 2
    # A setting out of range shows before anything is loaded.
    assert "`limit` must be a number of examples" in capsys.readouterr().err
    assert not (tmp_path / "r.json").exists()
    (task_folder / "pages.jsonl").unlink()
    assert run("eval", stock, *options, "--tasks", "tiny_pages") == 2
    said = capsys.readouterr()
    assert "the tasks tiny_pages cannot be loaded" in said.err
    found = json.loads((tmp_path / "r.json").read_text())
    assert f"{found['text']['bits_per_byte']:.4f}" in said.out
    assert found["tasks"] == []


def test_generate_command_reads_prompts_and_standard_input(tmp_path, capsys, monkeypatch):
    model = rewire(tiny_llama(), "geonorm")
    folder = save(model, tmp_path / "ours")
    assert run("generate", folder, "--prompt", "It was", "The", "--max-new-tokens", 5, "--temperature", 0) == 0
    first = capsys.readouterr().out
    assert first.startswith("It was")
    assert "\n\nThe" in first
    monkeypatch.setattr("sys.stdin", io.StringIO("It was"))
    assert run("generate", folder, "--max-new-tokens", 5, "--temperature", 0) == 0
    assert capsys.readouterr().out.strip() == first.split("\n\n")[0]


def test_mistakes_at_the_command_line(tmp_path, capsys, monkeypatch):
    stock = save(tiny_llama(), tmp_path / "stock")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for arguments, pattern in (
        (["eval", stock], "nothing to evaluate; name tasks with --tasks or files with --text"),
        (["eval", stock, "--text", tmp_path / "gone.txt"], "no such file or folder"),
        (["eval", stock, "--text", stock / "config.json", "--out", tmp_path], "must be a file in a folder that exists"),
        (["generate", stock], "no prompt given; use --prompt TEXT"),
        (["generate", tmp_path / "gone", "--prompt", "a"], "no such model"),
    ):
        assert run(*arguments) == 2
        assert pattern in capsys.readouterr().err
