"""Synthetic runs and a page parser for the tests of the report."""

from __future__ import annotations

import json
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from geonorm.experiments.rates import best_lr
from geonorm.experiments.summary import Design, summarize
from geonorm.experiments.trials import TEST_WINDOWS
from rich.console import Console

from geonorm.placements import parse
from geonorm.report import parse_results, summary_table, write_report
from geonorm.storage import write_json

LOSSES = {"geonorm:decay=sqrt": 1.551, "pre": 1.590, "post": 1.600, "deepnorm": 1.589, "sandwich": 1.606}
# The best is surrounded by neighbours a factor of sqrt(2) away.
EXTRA = {0.00283: 0.055, 0.004: 0.0, 0.00566: 0.05}
DOCUMENTS = np.repeat(np.arange(10), 6)


def build_results(
    losses=None,
    lrs=tuple(EXTRA),
    seeds=(0, 1, 2, 3),
    diverged=(),
    failed=(),
    noise=0.004,
    documents=DOCUMENTS,
    tuned=(),
):
    """Results as ``geonorm compare`` writes them, of made-up trials.

    With several rates the first seed chooses, the others run at its choice and report. ``diverged`` and ``failed`` hold
    ``(placement, lr, seed)``; None stands for any. ``noise`` is the spread over seeds.
    """
    rng = np.random.default_rng(0)
    shared = rng.normal(0, 0.3, len(documents))

    def hit(cases, *key):
        return any(all(want in (None, got) for want, got in zip(case, key, strict=True)) for case in cases)

    selection = seeds[0] if len(lrs) > 1 else None
    with tempfile.TemporaryDirectory() as root:

        def trial(text, base, lr, seed):
            placement = parse(text)
            name = placement.name
            loss = round(base + EXTRA[lr] * (3 if name == "post" else 1) + rng.normal(0, noise), 5)
            status = "failed" if hit(failed, name, lr, seed) else "ok"
            status = "diverged" if hit(diverged, name, lr, seed) else status
            ok = status == "ok"
            why = {"ok": "", "diverged": "loss was not finite at step 180", "failed": "out of memory <cpu>"}
            trial_id = f"{text.replace(':', '-')}-lr{lr}-seed{seed}"
            if ok:
                own = rng.normal(0, 0.01, len(documents))
                by_window = loss + shared - shared.mean() + own - own.mean()
                (Path(root) / trial_id).mkdir()
                write_json(
                    Path(root) / trial_id / TEST_WINDOWS, {"loss": list(by_window), "document": documents.tolist()}
                )
            return {
                "id": trial_id,
                "label": placement.label(),
                "placement": name,
                "options": placement.changed_options(),
                "seed": seed,
                "lr": lr,
                "val_loss": loss + 0.02 if ok else None,
                "val_bits_per_byte": (loss + 0.02) * 0.71 if ok else None,
                "test_loss": loss if ok else None,
                "test_bits_per_byte": round(loss * 0.71, 5) if ok else None,
                "train_loss": round(loss - 0.12, 5) if ok else None,
                "num_parameters": 1_800_000,
                "tokens": 1_024_000 if ok else 368_640,
                "seconds": 210.0 + 9 * seed,
                "status": status,
                "message": why[status],
                "tokens_per_second": 4870.0 - 40 * len(name) if ok else None,
                "peak_memory_bytes": 812_000_000 + 3_000_000 * len(name),
            }

        trials = []
        for text, base in (losses or LOSSES).items():
            if selection is None:
                trials += [trial(text, base, lr, seed) for lr in lrs for seed in seeds]
                continue
            mine = [trial(text, base, lr, selection) for lr in lrs]
            lr = best_lr(mine, selection)
            trials += mine + [trial(text, base, lr, seed) for seed in seeds[1:] if lr is not None]
        reporting = seeds if selection is None else seeds[1:]
        summary = summarize(trials, Path(root), Design(tuple(reporting), selection, frozenset(tuned)))
    return {
        "format": 2,
        "trials": trials,
        **summary,
        "rates": {
            "source": "given" if selection is None else "searched",
            "refined": selection is not None,
            "selection_seed": selection,
            "reporting_seeds": list(reporting),
            "found": "",
        },
        "environment": {
            "geonorm": "0.1.0",
            "torch": "2.13.0+cpu",
            "python": "3.11.7",
            "platform": "Linux-6.1-x86_64",
            "processor": "Intel(R) Xeon(R) @ 2.20GHz",
            "threads_per_trial": 1,
            "date": "2026-02-14",
        },
        "settings": {
            "width": 128, "depth": 8, "heads": 4, "length": 128, "batch": 16, "steps": 500, "warmup": 50,
            "schedule": "cosine", "betas": [0.9, 0.95], "weight_decay": 0.1, "clip": 1.0, "precision": "float32",
            "vocab_size": 512, "eval_windows": 256, "tie_embeddings": False, "max_angle": None,
        },
        "corpus": {
            "name": "python standard library", "num_documents_train": 1200, "num_documents_val": 130,
            "num_documents_test": 128, "num_groups_val": 130, "num_groups_test": 91, "num_bytes_train": 8_100_000,
            "num_tokens_train": 3_900_000, "num_tokens_val": 410_000, "num_tokens_test": 402_000,
            "largest_share_val": 0.08, "largest_share_test": 0.113, "overlap_val": 0.004, "overlap_test": 0.023,
            "overlap_ngram": 32, "bytes_per_token": 2.0769, "fingerprint": "9f2c41d07ab3",
        },
        "command": "geonorm compare --placements geonorm pre post deepnorm sandwich --seeds 0 1 2 3",
        "notes": ["The trials did not all run on the same version of the code."],
    }  # fmt: skip


def write_run(folder: Path, results, depth=8, steps=500):
    """Write ``results.json`` and believable metrics for its trials."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(results))
    for index, trial in enumerate(results["trials"]):
        if trial["status"] == "failed":
            continue
        rng = np.random.default_rng(index)
        rows = trial_rows(trial, rng, depth, steps)
        place = folder / "trials" / trial["id"]
        place.mkdir(parents=True, exist_ok=True)
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trial_rows(trial, rng, depth, steps):
    end, name = trial["val_loss"] or 2.5, trial["placement"]
    slope = {"pre": 1.4, "geonorm": 0.5, "post": -0.3, "deepnorm": 0.2, "sandwich": 0.9}.get(name, 0.0)
    layer = np.arange(1, depth + 1)
    rows = []

    def loss(step):
        part = step / steps
        return end + 4.4 * np.exp(-11 * part) + 0.75 * (1 - part) ** 1.6 * (0.9 + len(name) / 40)

    for step in range(10, steps + 1, 10):
        noisy = float(loss(step) - 0.1 + rng.normal(0, 0.05))
        rows.append({"kind": "train", "step": step, "tokens": step * 2048, "loss": noisy, "lr": 0.004,
                     "grad_norm": 0.9, "seconds": step * 0.4})  # fmt: skip
        if step % 50 == 0:
            value = float(loss(step))
            rows.append({"kind": "eval", "step": step, "tokens": step * 2048, "val_loss": value,
                         "val_bits_per_byte": value * 0.71})  # fmt: skip
    for step in (1, steps // 2, steps):
        scale = 1.0 if step == 1 else 0.25
        grad = scale * np.exp(-slope * layer / depth + rng.normal(0, 0.05, depth))
        base = {"pre": 0.9 / np.sqrt(layer), "geonorm": 0.7 / np.sqrt(layer), "post": 0.45 + 0 * layer}
        angle = base.get(name, 0.3 + 0.2 / layer) * np.exp(rng.normal(0, 0.04, depth))
        rows.append({"kind": "layers", "step": step, "grad_norm": grad.tolist(),
                     "angle": {"attention": (0.6 * angle).tolist(), "mlp": angle.tolist()}})  # fmt: skip
    return rows


class Page(HTMLParser):
    """Collects tags, attributes and visible text; checks that every element is closed in order."""

    VOID = ("meta", "br", "link", "img", "input", "hr")

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.words, self.open = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split()).replace("\N{MINUS SIGN}", "-").replace("\xa0", " ")


def report(tmp_path, results):
    write_run(tmp_path, results)
    return Page(write_report(tmp_path).read_text(encoding="utf-8")).text


def rendered(results, width=80):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(summary_table(parse_results(results)))
    return console.export_text()
