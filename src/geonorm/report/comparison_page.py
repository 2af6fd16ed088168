"""The page of a comparison: what it says, in which order."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from geonorm.report.comparison_figures import comparison_figures
from geonorm.report.comparison_tables import (
    ENDS,
    interval_kinds,
    median_of,
    overview_table,
    ranking_table,
    rates_table,
    speed_table,
    trials_table,
)
from geonorm.report.finding import describe, describe_variant
from geonorm.report.format import counted, duration, grouped, listing, number, percent, rows_counted, scaled, setting
from geonorm.report.page import Page, Section, write_page
from geonorm.report.published import published_beside
from geonorm.report.results import Results, read_results
from geonorm.report.series import Series, gaps, load_series
from geonorm.report.tables import Table

MODEL = {
    "model.family": "{}",
    "model.num_layers": "{} layers",
    "model.hidden_size": "hidden size {}",
    "model.num_heads": "{} heads",
    "data.seq_len": "sequence length {}",
}
TRAINING = {"optimizer.name": "{}", "schedule.name": "{} schedule", "precision": "{}"}
RANKING = (
    "Each placement at the learning rate shown, lowest loss first. Losses are nats per token of the test "
    "text{brackets}. A row is better or worse only where a difference to the reference is shown; \u201cno "
    "verdict\u201d has its reason above."
)
PLOT = "In the plot, a dot is the {shown} and a bar its interval{line}; what reaches the edge goes on beyond it."
PUBLISHED = (
    "Values of {sources}, not of this run; nothing on this page is computed from them. This run has the size and, by "
    "the name of its sources, the text. Length of training, split, tokenizer and context may differ, and with them the "
    "loss."
)
SPEED = (
    "Medians over the trials at the learning rate shown, of training steps alone. Trials run at different times and "
    "beside each other, so these numbers follow the load of the machine as much as the placement: no comparison of "
    "speed can be read from them."
)


def write_report(out_dir: Path) -> Path:
    """Write ``report.html`` and ``figures/*.svg`` and ``*.pdf`` into the folder of a comparison.

    With several variants the names of figures begin with the number and the name of theirs.

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
    lacking = [sentence for one in series for sentence in gaps(one)]
    doubts = Section("What to hold against it", bullets=[*finding.doubts, *finding.notes, *lacking])
    if len(views) == 1:
        ranking, *others = _of_variant(views[0], series[0])
        published = [others.pop(0)] if published_beside(results) else []
        sections = [ranking, *published, doubts, *others]
    else:
        note = "In each variant lowest loss first, in nats per token of the test text"
        kinds = f", with 95% intervals over {interval_kinds(results)}" if interval_kinds(results) else ""
        note += f"; differences are taken to the reference of the same variant{kinds}."
        sections = [Section("All variants", tables=[overview_table(views)], note=note), doubts]
        for place, (view, rows) in enumerate(zip(views, series, strict=True), 1):
            name = view.variants[0].name
            headline, sentences = describe_variant(view)
            sections.append(Section(name, text=" ".join([f"{headline}.", *sentences]), level=1))
            sections += _of_variant(view, rows, f"{place}-{re.sub(r'[^a-zA-Z0-9.=,_-]+', '-', name)[:80]}-", 3)
    text = {
        key.removeprefix("num_").replace("_", " "): grouped(value) if "num_" in key and _is_number(value) else value
        for key, value in results.corpus.items()
    }
    columns = {"Settings": results.settings, "Text": text, "Versions and machine": results.environment}
    return Page(
        eyebrow="Where should a Transformer normalise?",
        subject=str(results.corpus.get("name") or "unnamed corpus"),
        date=str(results.environment.get("date") or ""),
        headline=finding.headline,
        lead=" ".join(finding.sentences),
        facts=_facts(results, views),
        sections=[
            *sections,
            Section("To repeat it", code=results.command, columns=columns),
            Section("All trials", tables=[trials_table(results)]),
        ],
    )


def _of_variant(results: Results, series: list[Series], prefix: str = "", level: int = 2) -> list[Section]:
    """The sections of one variant: ranking, papers' values where there are any, rates, figures, speed."""
    ranking, kinds, speed = ranking_table(results, series), interval_kinds(results), _speed_words(results)
    brackets = (
        f"; brackets are 95% intervals over {kinds}, those of differences at the level at which Holm's rule decides"
    )
    note = RANKING.format(brackets=f"{brackets} the row" if kinds else "")
    if ENDS in ranking.headings:
        by_difference = any(row.difference for row in results.summary)
        line = ", and the vertical line no difference" if by_difference else ""
        note += " " + PLOT.format(shown=f"difference to {results.reference}" if by_difference else "loss", line=line)
    sections = [Section("The comparison", tables=[ranking], note=f"{note} {speed}", level=level)]
    if published := published_beside(results):
        rows = [(one.placement, one.size, one.data, number(one.loss, 4), one.source) for one in published]
        table = Table(("Placement", "Size", "Text", "Val loss", "Source"), rows, left=(0, 1, 2, 4))
        note = PUBLISHED.format(sources=" and ".join(sorted({one.source for one in published})))
        sections.append(Section("What papers report", tables=[table], note=note, level=level))
    sections.append(Section("Learning rates", tables=[rates_table(series)], level=level))
    for section in comparison_figures(series, results.rates.selection_seed):
        panels = [replace(panel, name=prefix + panel.name) for panel in section.panels]
        sections.append(replace(section, panels=panels, level=level))
    if (speeds := speed_table(series)).rows:
        sections.append(Section("Speed and memory", tables=[speeds], note=f"{SPEED} {speed}", level=level))
    return sections


def _speed_words(results: Results) -> str:
    """What a column of speed compares."""
    ran = [trial for trial in results.trials if trial.tokens_per_second is not None]
    if not ran:
        return ""
    compiled = {**results.settings, **results.variants[0].values}.get("compile")
    steps = sorted({trial.step_impl for trial in ran if trial.placement == "geonorm" and trial.step_impl})
    step = f"GeoNorm's step by its implementation {listing(steps)}, " if steps else ""
    return (
        f"Tokens/s compares placements {'under torch.compile' if compiled else 'in eager mode'}: {step}the norms of "
        "all placements by torch's operations."
    )


def _facts(results: Results, views: list[Results]) -> list[tuple[str, str]]:
    """What was trained on what, as pairs of term and value."""
    settings, corpus, trials = results.settings, results.corpus, results.trials

    def said(forms: dict[str, str]) -> list[str]:
        return [form.format(setting(settings[key])) for key, form in forms.items() if settings.get(key) is not None]

    def known(form: str, key: str, write: Any = grouped) -> list[str]:
        return [form.format(write(corpus[key]))] if _is_number(corpus.get(key)) else []

    def held_out(side: str) -> list[str]:
        documents, groups = (corpus.get(f"{key}_{side}") for key in ("num_documents", "num_groups"))
        return [
            *known("{}", f"num_documents_{side}", lambda count: counted(count, "document")),
            *(known("{}", f"num_groups_{side}", lambda count: counted(count, "group")) if groups != documents else []),
            *known("{} tokens", f"num_tokens_{side}", scaled),
            *known("largest share {}", f"largest_share_{side}", percent),
            *known(f"{{}} in {corpus.get('overlap_ngram')}-grams of the training text", f"overlap_{side}", percent),
        ]

    sizes = dict.fromkeys(scaled(size) for view in views if (size := median_of(view.trials, "num_parameters")))
    # A diverged trial stopped early, so only finished ones tell how long a trial is.
    tokens = median_of([trial for trial in trials if trial.status == "ok"], "tokens")
    passes = known("{} passes over the text", "num_tokens_train", lambda count: f"{(tokens or 0) / count:.2g}")
    seconds = sum(trial.seconds for trial in trials)
    facts = {
        "Model": [*([f"{listing([*sizes])} parameters"] if sizes else []), *said(MODEL)],
        "Text": [
            str(corpus.get("name") or "unnamed corpus"),
            *known("{} to train on", "num_bytes_train", lambda count: scaled(count, "B")),
        ],
        "Chosen on": held_out("val"),
        "Reported on": held_out("test"),
        "Training": [
            *([f"{grouped(settings['steps'])} steps"] if _is_number(settings.get("steps")) else []),
            *([f"{scaled(tokens)} tokens", *passes] if tokens else []),
            *said(TRAINING),
        ],
        "Trials": [
            *([counted(len(views), "variant")] if len(views) > 1 else []),
            rows_counted(views[0].summary),
            counted(len({trial.lr for trial in trials}), "learning rate"),
            counted(len(results.rates.reporting_seeds), "reporting seed"),
            counted(len(trials), "trial"),
            *([f"{duration(seconds)} of training in sum"] if seconds else []),
        ],
    }
    # A line must not end between a number and its unit.
    joined = {term: re.sub(r"(?<=\d) (?=[\w%])", "\N{NO-BREAK SPACE}", ", ".join(said)) for term, said in facts.items()}
    return [(term, words) for term, words in joined.items() if words]


def _is_number(value: Any) -> bool:
    """True for a number that can be shown; the corpus and the settings are not typed."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
