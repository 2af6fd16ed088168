"""Made-up comparisons and a page parser for the tests of the report."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from rich.console import Console

from geonorm.placements import parse
from geonorm.report import print_summary, write_report
from geonorm.report.results import Difference, Rates, Results, Row, Trial, Variant, write_results

LOSSES = {"geonorm:decay=sqrt": 1.551, "pre": 1.590, "post": 1.600, "deepnorm": 1.589, "sandwich": 1.606}
# The best is surrounded by neighbours a factor of sqrt(2) away.
EXTRA = {0.00283: 0.055, 0.004: 0.0, 0.00566: 0.05}
ENVIRONMENT = {
    "geonorm": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7", "platform": "Linux-6.1-x86_64",
    "processor": "Intel(R) Xeon(R) @ 2.20GHz", "threads_per_trial": 1, "date": "2026-02-14",
}  # fmt: skip
SETTINGS = {
    "model.family": "llama", "model.hidden_size": 128, "model.num_layers": 8, "model.num_heads": 4,
    "model.tie_embeddings": False, "data.seq_len": 128, "global_batch_size": 16, "steps": 500,
    "optimizer.name": "adamw", "optimizer.betas": [0.9, 0.95], "optimizer.weight_decay": 0.1,
    "schedule.name": "cosine", "schedule.warmup": 50, "precision": "float32", "compile": False,
    "evaluation.windows": 256, "max_angle": None,
}  # fmt: skip
CORPUS = {
    "name": "python standard library", "num_documents_train": 1200, "num_documents_val": 130,
    "num_documents_test": 128, "num_groups_val": 130, "num_groups_test": 91, "num_bytes_train": 8_100_000,
    "num_tokens_train": 3_900_000, "num_tokens_val": 410_000, "num_tokens_test": 402_000,
    "largest_share_val": 0.08, "largest_share_test": 0.113, "overlap_val": 0.004, "overlap_test": 0.023,
    "overlap_ngram": 32, "bytes_per_token": 2.0769, "fingerprint": "9f2c41d07ab3",
}  # fmt: skip


def build_results(
    losses=None,
    lrs=tuple(EXTRA),
    seeds=(0, 1, 2, 3),
    diverged=(),
    failed=(),
    noise=0.004,
    num_documents=10,
    tuned=(),
):
    """Results of made-up trials, with intervals that are only plausible.

    With several rates the first seed chooses, the others run at its choice and report. ``diverged`` and ``failed`` hold
    ``(placement, lr, seed)``; None stands for any. ``noise`` is the spread over seeds. ``tuned`` holds labels.
    """
    rng = np.random.default_rng(0)
    ends = {"ok": "", "diverged": "loss was not finite at step 180", "failed": "out of memory <cpu>"}

    def hit(cases, *key):
        return any(all(want in (None, got) for want, got in zip(case, key, strict=True)) for case in cases)

    def trial(text, base, lr, seed):
        placement = parse(text)
        name = placement.name
        loss = round(base + EXTRA[lr] * (3 if name == "post" else 1) + rng.normal(0, noise), 5)
        status = "failed" if hit(failed, name, lr, seed) else "ok"
        status = "diverged" if hit(diverged, name, lr, seed) else status
        measured = {
            "val_loss": loss + 0.02, "val_bits_per_byte": (loss + 0.02) * 0.71, "test_loss": loss,
            "test_bits_per_byte": round(loss * 0.71, 5), "train_loss": round(loss - 0.12, 5),
            "tokens_per_second": 4870.0 - 40 * len(name),
        }  # fmt: skip
        return Trial(
            id=f"{text.replace(':', '-')}-lr{lr}-seed{seed}",
            label=placement.label(),
            placement=name,
            options=placement.changed_options(),
            seed=seed,
            lr=lr,
            status=status,
            message=ends[status],
            step=500 if status == "ok" else 180,
            tokens=1_024_000 if status == "ok" else 368_640,
            seconds=210.0 + 9 * seed,
            num_parameters=1_800_000,
            peak_memory_bytes=812_000_000 + 3_000_000 * len(name),
            step_impl="autograd",
            code="0.1.0 1f2e3d",
            **(measured if status == "ok" else {}),
        )

    selection = seeds[0] if len(lrs) > 1 else None
    reporting = seeds if selection is None else seeds[1:]
    trials, rows, shown_losses = [], [], {}
    for text, base in (losses or LOSSES).items():
        mine = [trial(text, base, lr, seed) for lr in lrs for seed in (seeds if selection is None else seeds[:1])]
        lr = min((one for one in mine if one.status == "ok"), key=lambda one: one.val_loss, default=mine[0]).lr
        if selection is not None and any(one.status == "ok" for one in mine):
            mine += [trial(text, base, lr, seed) for seed in reporting]
        at_lr = [one for one in mine if one.lr == lr]
        shown = [one for one in at_lr if one.status == "ok" and one.seed in (reporting or seeds)]
        trials += mine
        label = mine[0].label
        shown_losses[label] = {one.seed: one.test_loss for one in shown}
        mean = float(np.mean([one.test_loss for one in shown])) if shown else None
        rows.append(
            Row(
                variant="",
                label=label,
                placement=mine[0].placement,
                options=mine[0].options,
                best_lr=lr if shown else None,
                test_loss_mean=mean,
                test_loss_ci=(mean - 0.106, mean + 0.106) if shown else None,
                ci_kind=("seeds and documents" if len(shown) > 1 else "documents") if shown else "",
                test_bits_per_byte_mean=float(np.mean([one.test_bits_per_byte for one in shown])) if shown else None,
                num_seeds=len(shown) if reporting else 0,
                num_lost=len([one for one in at_lr if one.seed in reporting]) - len(shown) if reporting else 0,
                lrs_tried=tuple(sorted(lrs)),
                tuned=label in tuned or (bool(shown) and min(lrs) < lr < max(lrs)),
                difference=None,
                verdict=None,
                no_verdict=(),
                num_documents=num_documents,
            )
        )
    candidates = [row for row in rows if row.placement == "pre" and row.best_lr]
    reference = min(candidates, key=lambda row: row.test_loss_mean, default=None)
    if reference is not None:
        rows = [
            row if row is reference or not row.best_lr else judged(row, reference, shown_losses, noise) for row in rows
        ]
    rows.sort(key=lambda row: (row.test_loss_mean is None, row.num_lost > 0, row.test_loss_mean or 0.0))
    return Results(
        trials=tuple(trials),
        summary=tuple(rows),
        variants=(Variant("", {}, reference.label if reference else None),),
        rates=Rates("given" if selection is None else "searched", selection is not None, selection, tuple(reporting)),
        complete=True,
        num_other_trials=0,
        environment=dict(ENVIRONMENT),
        settings=dict(SETTINGS),
        corpus=dict(CORPUS),
        num_windows={"val": 900, "test": 880},
        command="geonorm compare --placements geonorm pre post deepnorm sandwich --seeds 0 1 2 3",
    )


def judged(row, reference, losses, noise):
    """The row with its difference to the reference, seed by seed, and a verdict or the reason for none."""
    seeds = sorted(losses[row.label].keys() & losses[reference.label].keys())
    differences = [losses[row.label][seed] - losses[reference.label][seed] for seed in seeds]
    mean = float(np.mean(differences))
    many = len(seeds) > 1
    half = 4 * noise + 0.002 if many else 0.01
    low, high = mean - 1.2 * half, mean + 1.2 * half
    num_seeds = len(seeds) if row.num_seeds and reference.num_seeds else 0
    difference = Difference(
        mean, (mean - half, mean + half), (low, high), "seeds and documents" if many else "documents", num_seeds
    )
    cases = {
        "seed lost": row.num_lost,
        "reference lost a seed": reference.num_lost,
        "few seeds": num_seeds < 3,
        "not tuned": not row.tuned,
        "reference not tuned": not reference.tuned,
        "few documents": row.num_documents < 8,
    }
    reasons = tuple(reason for reason, holds in cases.items() if holds)
    verdict = "no difference shown" if low <= 0 <= high else "better" if mean < 0 else "worse"
    return dataclasses.replace(row, difference=difference, verdict=None if reasons else verdict, no_verdict=reasons)


def in_variants(parts):
    """One `Results` of several, by the values that are varied."""
    trials, rows, variants = [], [], []
    for number, (values, part) in enumerate(parts):
        name = ",".join(f"{key}={value}" for key, value in values.items())
        trials += [dataclasses.replace(one, variant=name, id=f"v{number}-{one.id}") for one in part.trials]
        rows += [dataclasses.replace(one, variant=name) for one in part.summary]
        variants.append(Variant(name, values, part.reference))
    varied = {key for values, _ in parts for key in values}
    settings = {key: value for key, value in SETTINGS.items() if key not in varied}
    return dataclasses.replace(
        parts[0][1], trials=tuple(trials), summary=tuple(rows), variants=tuple(variants), settings=settings
    )


def with_trials(results, change):
    """The same with other trials: ``change`` takes each with its number and returns what to replace in it."""
    trials = tuple(dataclasses.replace(one, **change(number, one)) for number, one in enumerate(results.trials))
    return dataclasses.replace(results, trials=trials)


def write_run(folder: Path, results, depth=8, steps=500):
    """Write ``results.json`` and believable metrics for its trials."""
    folder.mkdir(parents=True, exist_ok=True)
    write_results(folder, results)
    for index, trial in enumerate(results.trials):
        if trial.status == "failed":
            continue
        rng = np.random.default_rng(index)
        rows = trial_rows(trial, rng, depth, steps)
        place = folder / "trials" / trial.id
        place.mkdir(parents=True, exist_ok=True)
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trial_rows(trial, rng, depth, steps):
    end, name = trial.val_loss or 2.5, trial.placement
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
    print_summary(results, console)
    return console.export_text()
