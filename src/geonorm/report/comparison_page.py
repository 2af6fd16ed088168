"""The page of a comparison: what it says, in which order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from geonorm.report import format as fmt
from geonorm.report.comparison_figures import comparison_figures
from geonorm.report.comparison_table import Cells, interval_kinds, median_of, summary_cells
from geonorm.report.curves import top_of_pack
from geonorm.report.finding import describe, describe_variant
from geonorm.report.page import Cell, Page, Section, Strip, Table, write_page
from geonorm.report.published import SOURCE, published_beside
from geonorm.report.results import Results, read_results
from geonorm.report.series import Series, gaps, load_series

SHAPE = (
    ("model.family", "{}"),
    ("model.num_layers", "{} layers"),
    ("model.hidden_size", "hidden size {}"),
    ("model.num_heads", "{} heads"),
    ("data.seq_len", "sequence length {}"),
)
TRAINING = (("optimizer.name", "{}"), ("schedule.name", "{} schedule"), ("precision", "{}"))


def write_report(out_dir: Path) -> Path:
    """Write ``report.html`` and ``figures/*.svg`` and ``*.pdf`` into the folder of a comparison.

    Args:
        out_dir: a folder that holds ``results.json`` and ``trials/<id>/metrics.jsonl``. Missing or cut-off metrics
            only leave gaps in the figures, and the page says so.

    Returns:
        the path of the page.

    Raises:
        UserError: ``results.json`` is missing or damaged, or the folder cannot be written to.
    """
    results = read_results(Path(out_dir))
    views = [results.of_variant(variant) for variant in results.variants]
    series = [load_series(Path(out_dir), view) for view in views]
    return write_page(Path(out_dir) / "report.html", lambda: _page(results, views, series))


def _page(results: Results, views: list[Results], series: list[list[Series]]) -> Page:
    finding = describe(results)
    several = len(views) > 1
    doubts = Section(
        "What to hold against it",
        bullets=[*finding.doubts, *finding.notes, *(gap for one in series for gap in gaps(one))],
    )
    if several:
        sections = [_overview(results, views), doubts]
        for number, (view, rows) in enumerate(zip(views, series, strict=True), 1):
            headline, sentences = describe_variant(view)
            text = " ".join([f"{headline}.", *sentences])
            sections.append(Section(view.variants[0].name, text=text, level=1))
            sections += _of_variant(view, rows, doubts=None, prefix=f"{number}-{_slug(view.variants[0].name)}-", level=3)
    else:
        sections = _of_variant(views[0], series[0], doubts=doubts, prefix="", level=2)
    repeat = Section(
        "To repeat it",
        code=results.command,
        columns={
            "Settings": results.settings,
            "Text": {
                key.removeprefix("num_").replace("_", " "): fmt.grouped(value)
                if key.startswith("num_") and _is_number(value)
                else value
                for key, value in results.corpus.items()
            },
            "Versions and machine": results.environment,
        },
    )
    return Page(
        eyebrow="Where should a Transformer normalise?",
        subject=str(results.corpus.get("name") or "unnamed corpus"),
        date=str(results.environment.get("date") or ""),
        headline=finding.headline,
        lead=" ".join(finding.sentences),
        facts=_facts(results, views),
        sections=[*sections, repeat, _trials(results, several=several)],
    )


def _slug(name: str) -> str:
    return re.sub(r"[^\w.=,-]+", "-", name)


def _of_variant(
    results: Results, series: list[Series], *, doubts: Section | None, prefix: str, level: int
) -> list[Section]:
    """The sections of one variant, which are the page where there is only one."""
    sections = [_ranking(results, series, level), *_published(results, level)]
    if doubts is not None:
        sections.append(doubts)
    rows = [
        [
            Cell(one.short, colour=one.look.colour),
            fmt.learning_rate(one.row.best_lr),
            ", ".join(map(fmt.learning_rate, one.row.lrs_tried)),
            "yes" if one.row.tuned else "no",
        ]
        for one in series
    ]
    table = Table(("Placement", "Rate", "Tried", "Searched to \N{SQUARE ROOT}2"), rows, kind="speed")
    sections.append(Section("Learning rates", tables=[table], level=level))
    for block in comparison_figures(series, results.rates.selection_seed, prefix):
        sections.append(Section(block.title, panels=block.panels, caption=block.caption, level=level))
    return sections + _speed(results, series, level)


def _overview(results: Results, views: list[Results]) -> Section:
    """All variants in one table, in each the placements as its summary ranks them."""
    rows = []
    for view in views:
        for place, one in enumerate(summary_cells(view)):
            difference = _difference(one)
            name = Cell(view.variants[0].name if place == 0 else "")
            rows.append([name, Cell(one.row.placement, [one.options] if one.options else []), one.lr, one.loss, difference])
    headings = ("Variant", "Placement", "lr", "Test loss", "Difference")
    kinds = interval_kinds(results)
    note = (
        "In each variant lowest loss first, in nats per token of the test text; differences are taken to the reference of "
        f"the same variant{f', with 95% intervals over {kinds}' if kinds else ''}."
    )
    return Section("All variants", tables=[Table(headings, rows, left=(0, 1))], note=note)


def _difference(one: Cells) -> Cell:
    if one.is_reference:
        return Cell("reference", quiet=True)
    shown = one.row.difference and one.row.difference.ci_corrected
    remarks = [one.verdict] if one.verdict else []
    return Cell(one.difference, [one.difference_interval] if shown else [], remarks, strong=bool(one.row.difference))


def _ranking(results: Results, series: list[Series], level: int) -> Section:
    cells, reference = summary_cells(results), results.reference
    strips, words = _strips(cells)
    short = reference if reference and len(reference) < 12 else "reference"
    against = f"Against {short}" if reference else "Difference"
    rows = []
    for one, series_of, strip in zip(cells, series, strips, strict=True):
        colour, done = series_of.look.colour, one.row.test_loss_mean is not None
        name = Cell(one.row.placement, [one.options] if one.options else [], one.notes, colour)
        loss = Cell(one.loss, [one.loss_interval] if one.row.test_loss_ci else [], strong=done)
        row = [name, one.lr, loss, one.bits, _difference(one), one.speed, one.seeds]
        rows.append([*row[:5], Cell(colour=colour, strip=strip), *row[5:]] if words else row)
    headings = ["Placement", "lr", "Test loss", "Bits/byte", against, "Tokens/s", "Seeds"]
    if words:
        headings.insert(5, ("\N{LEFTWARDS ARROW} lower loss", "higher \N{RIGHTWARDS ARROW}"))  # type: ignore[arg-type]
    kinds = interval_kinds(results)
    note = ["Each placement at the learning rate shown, lowest loss first. Losses are nats per token of the test text"]
    if kinds:
        note[0] += (
            f"; brackets are 95% intervals over {kinds}, those of differences at the level at which Holm's rule decides "
            "the row"
        )
    note[0] += "."
    note.append(
        "A row is better or worse only where a difference to the reference is shown; \u201cno verdict\u201d has its "
        "reason above."
    )
    note += [words.replace("REFERENCE", str(reference))] if words else []
    note += _speed_words(results)
    return Section("The comparison", tables=[Table(headings, rows, kind="ranking")], note=" ".join(note), level=level)


def _strips(cells: list[Cells]) -> tuple[list[Strip | None], str]:
    """Small plots on one scale and what they show: differences where there are any, else losses."""
    nothing: list[Strip | None] = [None] * len(cells)
    by_difference = any(one.row.difference for one in cells)
    values: list[tuple[float | None, tuple[float, float] | None]] = []
    for one in cells:
        row, difference = one.row, one.row.difference
        if not by_difference:
            values.append((row.test_loss_mean, row.test_loss_ci))
        elif difference:
            values.append((difference.mean, difference.ci_corrected))
        else:
            values.append((0.0 if one.is_reference else None, None))
    means = sorted(mean for mean, _ in values if mean is not None)
    if len(means) < 2:
        return nothing, ""
    # One collapsed row would press all others into a line: it gets an arrow at the edge instead.
    limit = top_of_pack(means)
    kept = [mean for mean in means if mean <= limit]
    bounds = [bound for mean, ends in values if mean is not None and mean <= limit for bound in ends or ()]
    span = max(kept[-1] - kept[0], 1e-4)
    # Two seeds can give an interval a hundred times as wide as the spread of the rows.
    low, high = max(min(kept + bounds), kept[0] - 2 * span), min(max(kept + bounds), kept[-1] + 2 * span)
    cut = any(bound < low or bound > high for bound in bounds)
    # Rows can be equal to the bit, as a placement and the same one spelt otherwise are.
    pad = 0.04 * max(high - low, span)
    low, high = low - pad, high + pad

    def at(value: float) -> float:
        return round(100 * min(max((value - low) / (high - low), 0.0), 1.0), 2)

    line = at(0.0) if by_difference and low <= 0 <= high else None
    strips = list(nothing)
    for index, (one, (mean, ends)) in enumerate(zip(cells, values, strict=True)):
        if mean is not None:
            said = f"difference {one.difference} {one.difference_interval}"
            said = f"loss {one.loss} {one.loss_interval}" if not by_difference else said
            label = f"{one.row.placement}: {'reference' if by_difference and one.is_reference else said}"
            strips[index] = Strip(label, at(mean), (at(ends[0]), at(ends[1])) if ends else None, line, mean > high)
    words = "In the plot, the dot is the loss and the bar its interval."
    if by_difference:
        vertical = ", and the vertical line no difference" if line is not None else ""
        words = f"In the plot, the dot is the difference to REFERENCE, the bar its interval{vertical}."
    words += " A bar that reaches the edge goes on beyond it." if cut else ""
    words += " An arrow stands for a value off the scale." if means[-1] > high else ""
    return strips, words


def _published(results: Results, level: int) -> list[Section]:
    rows = [(one.placement, one.size, one.data, fmt.number(one.loss, 4)) for one in published_beside(results)]
    table = Table(("Placement", "Size", "Text", "Val loss"), rows, left=(0, 1, 2), kind="speed")
    note = (
        f"Values of {SOURCE}, not of this run; nothing on this page is computed from them. This run has the size and, by "
        "the name of its sources, the text. Length of training, split, tokenizer and context may differ, and with them "
        "the loss."
    )
    return [Section("What the paper reports", tables=[table], note=note, level=level)] if rows else []


def _speed_words(results: Results) -> list[str]:
    """What a column of speed compares, in a sentence; nothing where none was measured."""
    ran = [trial for trial in results.trials if trial.tokens_per_second is not None]
    if not ran:
        return []
    compiled = {**results.settings, **results.variants[0].values}.get("compile")
    mode = "under torch.compile" if compiled else "in eager mode"
    steps = sorted({trial.step_impl for trial in ran if trial.placement == "geonorm" and trial.step_impl})
    step = f", GeoNorm's step by its implementation {fmt.listing(steps)}" if steps else ""
    return [f"Tokens/s: every placement trained {mode}{step}, the norms of all placements by torch's operations."]


def _speed(results: Results, series: list[Series], level: int) -> list[Section]:
    rows = []
    for one in series:
        tokens, memory = (median_of(one.trials, key) for key in ("tokens_per_second", "peak_memory_bytes"))
        if tokens is not None or memory is not None:
            rows.append([Cell(one.short, colour=one.look.colour), fmt.grouped(tokens), fmt.scaled(memory, "B")])
    note = (
        "Medians over the trials at the learning rate shown, of training steps alone. Trials run at different times and "
        "beside each other, so these numbers follow the load of the machine as much as the placement: no comparison of "
        "speed can be read from them."
    )
    table = Table(("Placement", "Tokens/s", "Peak memory"), rows, kind="speed")
    note = " ".join([note, *_speed_words(results)])
    return [Section("Speed and memory", tables=[table], note=note, level=level)] if rows else []


def _facts(results: Results, views: list[Results]) -> list[tuple[str, str]]:
    """What was trained on what, as pairs of term and value."""
    settings, corpus, trials = results.settings, results.corpus, results.trials

    def said(forms: tuple[tuple[str, str], ...]) -> list[str]:
        return [form.format(fmt.setting(settings[key])) for key, form in forms if settings.get(key) is not None]

    sizes = [size for view in views if (size := median_of(view.trials, "num_parameters"))]
    counts = list(dict.fromkeys(fmt.scaled(size) for size in sizes))
    model = [f"{fmt.listing(counts)} parameters"] if counts else []
    text = [str(corpus.get("name") or "unnamed corpus")]
    if _is_number(corpus.get("num_bytes_train")):
        text.append(f"{fmt.scaled(corpus['num_bytes_train'], 'B')} to train on")
    training = [f"{fmt.grouped(settings['steps'])} steps"] if _is_number(settings.get("steps")) else []
    # A diverged trial stopped early, so only finished ones tell how long a trial is.
    tokens = median_of([trial for trial in trials if trial.status == "ok"], "tokens")
    if tokens:
        training.append(f"{fmt.scaled(tokens)} tokens")
        if _is_number(corpus.get("num_tokens_train")):
            training.append(f"{tokens / corpus['num_tokens_train']:.2g} passes over the text")
    counted = [fmt.counted(len(views), "variant")] if len(views) > 1 else []
    counted += [fmt.rows_counted(views[0].summary), fmt.counted(len({trial.lr for trial in trials}), "learning rate")]
    counted += [fmt.counted(len(results.rates.reporting_seeds), "reporting seed"), fmt.counted(len(trials), "trial")]
    if total := sum(trial.seconds for trial in trials):
        counted.append(f"{fmt.duration(total)} of training in sum")
    facts = {
        "Model": model + said(SHAPE),
        "Text": text,
        "Chosen on": _side(corpus, "val"),
        "Reported on": _side(corpus, "test"),
        "Training": training + said(TRAINING),
        "Trials": counted,
    }
    # A line must not end between a number and its unit.
    return [
        (term, re.sub(r"(?<=\d) (?=[\w%])", "\N{NO-BREAK SPACE}", ", ".join(parts)))
        for term, parts in facts.items()
        if parts
    ]


def _side(corpus: dict[str, Any], side: str) -> list[str]:
    """A held-out side in words: how many documents, how much one of them makes, how much of it is in training too."""
    documents, groups, tokens, share, overlap = (
        value if _is_number(value := corpus.get(f"{key}_{side}")) else None
        for key in ("num_documents", "num_groups", "num_tokens", "largest_share", "overlap")
    )
    words = [fmt.counted(documents, "document")] if documents is not None else []
    words += [fmt.counted(groups, "group")] if groups not in (None, documents) else []
    words += [f"{fmt.scaled(tokens)} tokens"] if tokens is not None else []
    words += [f"largest share {fmt.percent(share)}"] if share is not None else []
    ngram = corpus.get("overlap_ngram")
    words += [f"{fmt.percent(overlap)} in {ngram}-grams of the training text"] if overlap is not None else []
    return words


def _is_number(value: Any) -> bool:
    """True for a number that can be shown; the corpus and the settings are not typed."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _trials(results: Results, *, several: bool) -> Section:
    digits = max(fmt.loss_digits(results.summary), 3)
    # The summary's rates and seeds, row by row; planned later, a refined rate stands between the others.
    order = {key: place for place, key in enumerate(dict.fromkeys((t.variant, t.label) for t in results.trials))}
    rows = []
    for trial in sorted(results.trials, key=lambda t: (order[t.variant, t.label], t.lr, t.seed)):
        numbers = [
            fmt.learning_rate(trial.lr),
            str(trial.seed),
            *(fmt.number(loss, digits) for loss in (trial.test_loss, trial.val_loss, trial.train_loss)),
            fmt.scaled(trial.tokens),
            fmt.duration(trial.seconds),
        ]
        dim = trial.status != "ok"
        options = fmt.options_text(trial.options)
        row = [Cell(trial.placement, [options] if options else []), *(Cell(text, quiet=dim) for text in numbers)]
        row.append(Cell(trial.status, [trial.message] if trial.message else []))
        rows.append([*row[:1], Cell(trial.variant), *row[1:]] if several else row)
    headings = ["Placement", "lr", "Seed", "Test loss", "Val loss", "Train loss", "Tokens", "Time", "Status"]
    if several:
        headings.insert(1, "Variant")
    left = (0, 1, 9) if several else (0, 8)
    return Section("All trials", tables=[Table(headings, rows, left=left, kind="trials")])
