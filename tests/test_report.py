"""The report: what the page and the table say equals what the results hold."""

from __future__ import annotations

import copy
import json
import re
import statistics
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from geonorm.errors import UserError
from geonorm.report import summary_table, write_report
from geonorm.report.curves import loss_curve, running_mean
from geonorm.report.figures import spread
from geonorm.report.finding import describe
from geonorm.report.format import short_labels
from geonorm.report.load import load_run, read_metrics

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


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Five placements, three rates, two seeds; one diverged at a rate, one failed, one without a finished trial."""
    folder = tmp_path_factory.mktemp("full")
    results = build_results(diverged=[("post", 0.008, None), ("deepnorm", None, None)], failed=[("sandwich", 0.002, 0)])
    write_run(folder, results)
    # A killed trial leaves half a line, and a trial may have lost its metrics.
    metrics = folder / "trials" / "geonorm-lr0.004-seed0" / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"kind":"train","step":510,"lo')
    (folder / "trials" / "pre-lr0.004-seed1" / "metrics.jsonl").unlink()
    path = write_report(folder)
    return folder, results, path.read_text(encoding="utf-8")


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


def test_numbers_on_the_page_are_those_of_the_results(full):
    _, results, html = full
    text = Page(html).text
    for row in results["summary"]:
        if row["val_loss_mean"] is None:
            continue
        low, high = row["val_loss_ci"]
        assert f"{row['val_loss_mean']:.3f} [{low:.3f}, {high:.3f}] {row['val_bits_per_byte_mean']:.3f}" in text
        if row["difference"]:
            low, high = row["difference"]["ci"]
            assert f"{row['difference']['mean']:+.3f} [{low:+.3f}, {high:+.3f}]" in text
    for trial in results["trials"]:
        if trial["status"] == "ok":
            assert f"{trial['val_loss']:.3f} {trial['train_loss']:.3f} {trial['val_bits_per_byte']:.3f}" in text
    for value in (results["command"], "9f2c41d07ab3", "2.13.0+cpu", "0.9, 0.95", *results["notes"]):
        assert value in text


def test_rows_are_best_first_and_unfinished_last(full):
    _, results, html = full
    names = re.findall(r'<span class="name"[^>]*>(\w+)</span>', html)
    assert names == [row["placement"] for row in results["summary"]]
    assert names[0] == "geonorm"
    assert names[-1] == "deepnorm"


def test_page_is_well_formed_and_self_contained(full):
    html = full[2]
    page = Page(html)
    assert page.open == []
    assert html.startswith("<!doctype html>")
    assert ("lang", "en") in page.attributes
    assert any(name == "content" and value.startswith("width=device-width") for name, value in page.attributes)
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    assert not re.search(r"https?:|@import|url\((?!#)|//[a-z]", html)
    references = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert references
    assert all(value.startswith("#") for value in references)


def test_ids_are_unique_and_references_resolve(full):
    page = Page(full[2])
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    wanted = {value[1:] for name, value in page.attributes if name == "href"}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", full[2]))
    wanted |= {value for name, value in page.attributes if name in ("aria-labelledby", "aria-describedby")}
    assert wanted <= set(ids)


def test_figures_have_labels_captions_and_scheme_colours(full):
    html = full[2]
    plots = re.findall(r'<svg class="plot"[^>]*>', html)
    assert len(plots) == 7
    assert all('role="img" aria-label="' in plot for plot in plots)
    assert html.count("<figcaption>") == html.count("<figure") == 4
    body = html[html.index("</style>") :]
    assert "var(--geonorm)" in body
    assert not re.findall(r"(?:stroke|fill): #(?!f{6}\b|0{6}\b)\w+", body)  # a fixed colour would not turn dark


def test_files_for_a_paper_are_written_and_repeat_byte_for_byte(full):
    folder, _, html = full
    names = {path.name for path in (folder / "figures").iterdir()}
    stems = (
        "loss-eval",
        "loss-train",
        "learning-rate",
        "gradient-start",
        "gradient-end",
        "angle-attention",
        "angle-mlp",
    )
    assert names == {stem + ending for stem in stems for ending in (".svg", ".pdf")}
    before = {path.name: path.read_bytes() for path in (folder / "figures").iterdir()}
    assert before["loss-eval.pdf"].startswith(b"%PDF")
    assert write_report(folder).read_text(encoding="utf-8") == html
    assert {path.name: path.read_bytes() for path in (folder / "figures").iterdir()} == before


def test_figures_do_not_depend_on_the_users_matplotlib_settings(full):
    import matplotlib

    folder, _, html = full
    with matplotlib.rc_context({"lines.linewidth": 9, "axes.facecolor": "red", "svg.hashsalt": "other"}):
        assert write_report(folder).read_text(encoding="utf-8") == html


def test_truncated_and_missing_metrics_are_told(full):
    text = Page(full[2]).text
    assert "1 unreadable line in the metrics of trial geonorm-lr0.004-seed0" in text
    assert "Trial pre-lr0.004-seed1 has no metrics file" in text


def test_page_without_any_metrics_has_no_training_figures(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(build_results()))
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert len(re.findall(r'<svg class="plot"', html)) == 1  # the learning rates come from the results
    assert "Loss during training" not in html


def test_read_metrics_skips_bad_lines_and_keeps_the_later_of_two_rows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = ['{"kind":"train","step":20,"loss":3.0}', '{"kind":"tr', '{"kind":"train","step":10,"loss":NaN}', "[1]"]
    path.write_text("\n".join([*rows, '{"kind":"train","step":20,"loss":2.5}', '{"kind":"new","step":1}']))
    metrics = read_metrics(path)
    assert metrics.skipped == 2
    assert [(row["step"], row["loss"]) for row in metrics.train] == [(10, None), (20, 2.5)]
    assert not read_metrics(tmp_path / "absent").found


def test_long_logs_are_thinned_to_what_a_line_can_show(tmp_path):
    results = build_results(losses={"pre": 1.6}, lrs=(0.004,), seeds=(0,))
    write_run(tmp_path, results, steps=20_000)
    curve = loss_curve(load_run(tmp_path).series[0], "train", 5)
    assert len(curve.x) == 400
    assert curve.x[0] == 10
    assert curve.x[-1] == 20_000


def test_user_text_is_escaped_everywhere(tmp_path):
    evil = "<script>alert(1)</script>"
    results = build_results(losses={evil: 1.5, "pre": 1.6}, options={evil: {"x": '"><script>$\\frac'}}, lrs=(0.004,))
    for trial in results["trials"]:
        trial["id"] = trial["id"].replace("/", "_")
        trial["message"] = evil
    results["corpus"]["name"] = results["settings"]["path"] = results["command"] = results["notes"][0] = evil
    results["environment"]["platform"] = results["environment"]["date"] = evil
    write_run(tmp_path, results)
    html = write_report(tmp_path).read_text(encoding="utf-8")
    assert "<script" not in html.lower()
    assert "&lt;script&gt;" in html
    assert Page(html).open == []


def test_finding_when_geonorm_wins(full):
    _, results, _ = full
    finding = describe(results)
    gap = next(row for row in results["summary"] if row["placement"] == "geonorm")["difference"]
    assert finding.headline == f"GeoNorm ends {-gap['mean']:.3f} nats below Pre-Norm"
    assert "excludes zero" in " ".join(finding.sentences)
    assert any("DeepNorm, 6 diverged" in doubt and "none finished" in doubt for doubt in finding.doubts)
    assert any("SandwichNorm, 1 failed (learning rate 0.002)" in doubt for doubt in finding.doubts)


def test_finding_says_when_geonorm_does_not_win(tmp_path):
    results = build_results({**LOSSES, "geonorm": 1.62, "post": 1.5})
    finding = describe(results)
    assert finding.headline.endswith("GeoNorm does not win")
    assert "GeoNorm does not win: GeoNorm (decay=sqrt) is" in " ".join(finding.sentences)
    results = build_results({"pre": 1.5, "post": 1.6, "geonorm": 1.7})
    assert describe(results).headline == "No placement ends below Pre-Norm here"
    assert "GeoNorm does not win" in report(tmp_path, results)


def test_finding_does_not_call_noise_a_win():
    results = build_results(lrs=(0.004,))
    row = results["summary"][0]
    row["difference"]["ci"] = [-0.05, 0.01]
    finding = describe(results)
    assert "within the noise" in finding.headline
    assert "includes zero" in " ".join(finding.sentences)


def test_edge_of_the_grid_is_not_settled(tmp_path):
    results = build_results(lrs=(0.004, 0.008))
    text = report(tmp_path, results)
    assert "the comparison is not settled for them" in text
    assert "lowest learning rate tried, 0.004" in text
    assert "lr at edge of grid" in text


def test_windows_interval_is_told_apart_from_seeds(tmp_path):
    text = report(tmp_path, build_results(lrs=(0.004,), seeds=(0,)))
    assert "do not contain the variation from seed to seed" in text
    assert "nats below Pre-Norm, with one seed each" in text
    assert "Only one learning rate was tried" in text
    assert "Sensitivity to the learning rate" not in text
    assert "edge" not in text


def test_no_finished_trial(tmp_path):
    results = build_results(diverged=[(None, None, None)])
    for trial in results["trials"]:
        trial["peak_memory_bytes"] = None
    text = report(tmp_path, results)
    assert "No trial finished, so there is nothing to compare" in text
    assert "loss was not finite at step 180" in text
    assert "None" not in text
    assert "nan" not in text


def test_reference_without_finished_trial(tmp_path):
    text = report(tmp_path, build_results(failed=[("pre", None, None)]))
    assert "Pre-Norm has no finished trial, so there is no difference to it" in text


def test_single_finished_placement():
    assert describe(build_results(failed=[("pre", None, None)], losses={"pre": 1.6, "post": 1.5})).headline.startswith(
        "Only Post-Norm finished"
    )


def test_nulls_are_dashes(tmp_path):
    results = build_results()
    for trial in results["trials"]:
        trial |= {"tokens_per_second": None, "peak_memory_bytes": None, "train_loss": None, "seconds": None}
    for row in results["summary"]:
        row |= {"val_loss_ci": None, "difference": None, "val_bits_per_byte_mean": None}
    text = report(tmp_path, results)
    assert "None" not in text
    assert "Speed and memory" not in text


def test_a_damaged_folder_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"no results\.json"):
        write_report(tmp_path)
    (tmp_path / "results.json").write_text('{"trials": [')
    with pytest.raises(UserError, match="not valid JSON"):
        write_report(tmp_path)
    results = build_results()
    for change, message in (
        (lambda r: r.pop("corpus"), "no `corpus`"),
        (lambda r: r.update(notes="x"), "JSON list under `notes`"),
        (lambda r: r["summary"][1].pop("options"), r"`summary\[1\]` has no `options`"),
        (lambda r: r["trials"][0].update(id="../../etc"), "plain folder name"),
    ):
        broken = copy.deepcopy(results)
        change(broken)
        (tmp_path / "results.json").write_text(json.dumps(broken))
        with pytest.raises(UserError, match=message):
            write_report(tmp_path)


def test_terminal_table_fits_80_columns_and_holds_every_number(full):
    results = full[1]
    text = rendered(results)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 80
    order = [line.split()[0] for line in lines if line.strip() and line.split()[0] in LOSSES]
    assert order == [row["placement"] for row in results["summary"]]
    for row in results["summary"]:
        if row["val_loss_mean"] is not None:
            assert f"{row['val_loss_mean']:.3f}" in text
            assert "[{:.3f}, {:.3f}]".format(*row["val_loss_ci"]) in text
            if row["difference"]:
                assert "[{:+.3f}, {:+.3f}]".format(*row["difference"]["ci"]) in text
    assert "seeds" in text
    assert "6 of 6 trials diverged" in rendered(results, 120)


def test_labels_keep_only_the_options_that_differ():
    def row(placement, **options):
        return {"placement": placement, "options": options}

    rows = [
        row("geonorm", decay="sqrt", alpha=1.0),
        row("geonorm", decay="none", alpha=1.0),
        row("pre", x=1),
        row("post"),
    ]
    assert short_labels(rows) == ["geonorm sqrt", "geonorm none", "pre", "post"]
    rows = [
        row("pre"),
        row("pre", normalize_entry=True),
        row("geonorm", max_angle=0.785),
        row("geonorm", max_angle=None),
    ]
    assert short_labels(rows) == ["pre", "pre normalize_entry", "geonorm max_angle=0.785", "geonorm max_angle=none"]


def test_spread_keeps_distance_order_and_bounds():
    wanted = [50.0, 51.0, 10.0, 49.0, 99.0]
    placed = spread(wanted, 12, 0, 100)
    assert np.all(np.diff(np.sort(placed)) >= 12 - 1e-9)
    assert np.argsort(placed).tolist() == np.argsort(wanted).tolist()
    assert placed[2] == 10
    assert min(placed) >= 0
    assert max(placed) <= 100
    assert np.mean([placed[i] for i in (0, 1, 3)]) == pytest.approx(50)


def test_running_mean_equals_direct_average():
    values = np.random.default_rng(0).normal(size=20)
    smooth = running_mean(values, 5)
    assert smooth[10] == pytest.approx(values[8:13].mean())
    assert smooth[1] == pytest.approx(values[0:3].mean())
    assert smooth[0] == pytest.approx(values[0])
    assert smooth[-1] == pytest.approx(values[-1])
