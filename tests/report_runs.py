"""Synthetic runs and a page parser for the tests of the report."""

from __future__ import annotations

import json
import statistics
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from rich.console import Console
from scipy import stats

from geonorm.report import summary_table, write_report

LOSSES = {"geonorm": 1.551, "pre": 1.590, "post": 1.600, "deepnorm": 1.589, "sandwich": 1.606}


OPTIONS = {"geonorm": {"decay": "sqrt"}}


EXTRA = {0.002: 0.075, 0.004: 0.0, 0.008: 0.06}


def build_results(
    losses=None, lrs=(0.002, 0.004, 0.008), seeds=(0, 1), diverged=(), failed=(), reference="pre", options=None
):
    """Synthetic results as ``geonorm compare`` writes them.

    ``diverged`` and ``failed`` hold ``(placement, lr, seed)``; None stands for any.
    """
    rng = np.random.default_rng(0)
    losses, options = losses or LOSSES, options or OPTIONS

    def hit(cases, *key):
        return any(all(want in (None, got) for want, got in zip(case, key, strict=True)) for case in cases)

    trials = []
    for name, base in losses.items():
        for lr in lrs:
            for seed in seeds:
                loss = round(base + EXTRA[lr] * (3 if name == "post" else 1) + rng.normal(0, 0.004), 5)
                status = "failed" if hit(failed, name, lr, seed) else "ok"
                status = "diverged" if hit(diverged, name, lr, seed) else status
                ok = status == "ok"
                why = {"ok": "", "diverged": "loss was not finite at step 180", "failed": "out of memory <cpu>"}
                trials.append(
                    {
                        "id": f"{name}-lr{lr}-seed{seed}",
                        "label": name,
                        "placement": name,
                        "options": options.get(name, {}),
                        "seed": seed,
                        "lr": lr,
                        "val_loss": loss if ok else None,
                        "val_bits_per_byte": round(loss * 0.71, 5) if ok else None,
                        "train_loss": round(loss - 0.12, 5) if ok else None,
                        "num_parameters": 1_800_000,
                        "tokens": 1_024_000 if ok else 368_640,
                        "seconds": 210.0 + 9 * seed,
                        "status": status,
                        "message": why[status],
                        "tokens_per_second": 4870.0 - 40 * len(name) if ok else None,
                        "peak_memory_bytes": 812_000_000 + 3_000_000 * len(name),
                    }
                )
    summary = [summarise(name, trials, lrs, options.get(name, {})) for name in losses]
    add_differences(summary, trials, reference)
    summary.sort(key=lambda row: (row["val_loss_mean"] is None, row["val_loss_mean"] or 0))
    return {
        "trials": trials,
        "summary": summary,
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
            "num_bytes_train": 8_100_000, "num_tokens_train": 3_900_000, "num_tokens_val": 410_000,
            "bytes_per_token": 2.0769, "fingerprint": "9f2c41d07ab3",
        },
        "command": "geonorm compare --placements geonorm pre post deepnorm sandwich --lrs 0.002 0.004 0.008 --seeds 2",
        "notes": ["Each placement runs at its own learning rate; all see the same batches in the same order."],
    }  # fmt: skip


def summarise(name, trials, lrs, options):
    mine = [t for t in trials if t["placement"] == name]
    by_lr = {lr: [t["val_loss"] for t in mine if t["lr"] == lr and t["status"] == "ok"] for lr in lrs}
    means = {lr: statistics.mean(values) for lr, values in by_lr.items() if values}
    row = {
        "label": name + (f"({', '.join(f'{k}={v}' for k, v in options.items())})" if options else ""),
        "placement": name,
        "options": options,
        "best_lr": None,
        "val_loss_mean": None,
        "val_loss_ci": None,
        "ci_kind": "seeds",
        "val_bits_per_byte_mean": None,
        "num_seeds": 0,
        "lrs_tried": list(lrs),
        "num_diverged": sum(t["status"] == "diverged" for t in mine),
        "lr_at_edge": False,
        "difference": None,
    }
    if means:
        best = min(means, key=means.__getitem__)
        values = by_lr[best]
        count = len(values)
        half = stats.t.ppf(0.975, count - 1) * statistics.stdev(values) / count**0.5 if count > 1 else 0.03
        row |= {
            "best_lr": best,
            "val_loss_mean": means[best],
            "val_loss_ci": [means[best] - half, means[best] + half],
            "ci_kind": "seeds" if count > 1 else "windows",
            "val_bits_per_byte_mean": means[best] * 0.71,
            "num_seeds": count,
            "lr_at_edge": best in (min(lrs), max(lrs)),
        }
    return row


def add_differences(summary, trials, reference):
    base = next((row for row in summary if row["placement"] == reference), None)
    if base is None or base["val_loss_mean"] is None:
        return

    def losses(row):
        return {
            t["seed"]: t["val_loss"]
            for t in trials
            if t["placement"] == row["placement"] and t["lr"] == row["best_lr"] and t["status"] == "ok"
        }

    for row in summary:
        if row is base or row["val_loss_mean"] is None:
            continue
        mine, theirs = losses(row), losses(base)
        gaps = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
        half = stats.t.ppf(0.975, len(gaps) - 1) * statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else 0.006
        mean = statistics.mean(gaps)
        kind = "paired seeds" if len(gaps) > 1 else "paired windows"
        row["difference"] = {"reference": base["label"], "mean": mean, "ci": [mean - half, mean + half], "kind": kind}


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
    console.print(summary_table(results))
    return console.export_text()
