"""The report: one HTML file that needs nothing beside it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from geonorm.errors import UserError
from geonorm.report import format as fmt
from geonorm.report import style
from geonorm.report.curves import top_of_pack
from geonorm.report.drawing import Block
from geonorm.report.figures import make_figures
from geonorm.report.finding import Finding, describe
from geonorm.report.load import Run, load_run
from geonorm.report.published import SOURCE, published_beside
from geonorm.report.results import Results
from geonorm.report.table import Cells, interval_kinds, median_of, summary_cells
from geonorm.storage import write_text

NBSP = "\N{NO-BREAK SPACE}"
HEADINGS = {
    "loss": "Loss during training",
    "lr": "Sensitivity to the learning rate",
    "gradient": "Gradient norm by layer",
    "angle": "Angle of each step by layer",
}
SHAPE_KEYS = (
    ("depth", "{} layers"),
    ("width", f"width{NBSP}{{}}"),
    ("heads", "{} heads"),
    ("length", f"window{NBSP}{{}}"),
)


@dataclass(frozen=True)
class Dot:
    """The small plot in a row of the table; positions are percentages of its width."""

    x: float | None
    low: float | None
    high: float | None
    beyond: bool
    reference: bool
    colour: str


@dataclass(frozen=True)
class Rate:
    """One row of the table of learning rates, written out."""

    placement: str
    colour: str
    chosen: str
    tried: str
    tuned: str


@dataclass(frozen=True)
class Speed:
    """One row of the speed table: measured medians."""

    placement: str
    colour: str
    tokens: str
    memory: str


def write_report(out_dir: Path) -> Path:
    """Write ``report.html`` and ``figures/*.svg`` and ``*.pdf`` into a run folder.

    The page is one file without scripts and without references to anything outside it. The same run folder gives
    the same bytes.

    Args:
        out_dir: a folder that holds ``results.json`` and ``trials/<id>/metrics.jsonl``. Missing or cut-off metrics
            only leave gaps in the figures, and the page says so.

    Returns:
        the path of the page.

    Raises:
        UserError: ``results.json`` is missing or damaged, or the folder cannot be written to.
    """
    out_dir = Path(out_dir)
    run = load_run(out_dir)
    figures_dir = out_dir / "figures"
    path = out_dir / "report.html"
    try:
        with style.context():
            blocks = page_blocks(make_figures(run), figures_dir, HEADINGS)
        write_text(path, render(run, describe(run.results), blocks))
    except OSError as error:
        raise UserError(f"cannot write the report into {out_dir}: {error}") from None
    return path


def templates() -> Environment:
    """The page's templates, which escape every text that they are given."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["minus"] = lambda text: str(text).replace("-", "\N{MINUS SIGN}")
    return environment


def page_blocks(drawn: list[Block], figures_dir: Path, headings: dict[str, str]) -> list[dict[str, Any]]:
    """Save every panel as SVG and PDF and return the blocks for the template; call inside `style.context`."""
    figures_dir.mkdir(parents=True, exist_ok=True)
    blocks = []
    for block in drawn:
        panels = []
        for panel in block.panels:
            style.save_files(panel.figure, figures_dir / panel.name)
            svg = style.inline_svg(panel.figure, panel.name, str(escape(panel.label)))
            # Safe: drawn by matplotlib, which escapes the text it draws; the label is escaped above.
            panels.append(Markup(svg))
        blocks.append({"title": headings[block.key], "panels": panels, "caption": block.caption})
    return blocks


def render(run: Run, finding: Finding, blocks: list[dict[str, Any]]) -> str:
    """Fill in the template.

    Args:
        run: the run folder.
        finding: the sentences.
        blocks: one dict a figure: ``title``, ``panels`` (SVG markup) and ``caption``.
    """
    results = run.results
    cells = summary_cells(results)
    dots, scale = _dots(cells, [one.look.colour for one in run.series])
    return (
        templates()
        .get_template("template.html.j2")
        .render(
            finding=finding,
            facts=_facts(results),
            cells=list(zip(cells, dots, strict=True)),
            scale=scale,
            kinds=" or ".join(interval_kinds(results.summary)),
            reference=results.reference,
            rates=_rates(run),
            blocks=blocks,
            remarks=run.remarks,
            notes=results.notes,
            published=[
                (value.placement, value.size, value.data, fmt.number(value.loss, 4))
                for value in published_beside(results)
            ],
            published_source=SOURCE,
            speeds=_speeds(run),
            trials=_trials(results),
            settings={key: fmt.setting(value) for key, value in results.settings.items()},
            corpus=_corpus(results.corpus),
            environment={key: fmt.setting(value) for key, value in results.environment.items()},
            command=results.command,
            eyebrow="Where should a Transformer normalise?",
            subject=results.corpus.get("name") or "unnamed corpus",
            date=str(results.environment.get("date") or ""),
            colours=style.CSS_COLOURS,
        )
    )


def _facts(results: Results) -> list[tuple[str, str]]:
    """What was trained on what, as pairs of term and value."""
    settings, corpus, trials = results.settings, results.corpus, results.trials
    shape = [form.format(fmt.setting(settings[key])) for key, form in SHAPE_KEYS if settings.get(key) is not None]
    # A diverged trial stopped early, so only finished ones tell how long a trial is.
    ok = [trial for trial in trials if trial.status == "ok"]
    size, tokens = median_of(trials, "num_parameters"), median_of(ok, "tokens")
    facts = []
    model = [f"{fmt.scaled(size)} parameters"] if size else []
    if model + shape:
        facts.append(("Model", ", ".join(model + shape)))
    text = [str(corpus.get("name") or "unnamed corpus")]
    if _number(corpus.get("num_bytes_train")):
        text.append(f"{fmt.scaled(corpus['num_bytes_train'], 'B')} to train on")
    facts.append(("Text", ", ".join(text)))
    facts += [
        (term, words)
        for term, side in (("Chosen on", "val"), ("Reported on", "test"))
        if (words := _side(corpus, side))
    ]
    training = [f"{fmt.grouped(settings['steps'])} steps"] if _number(settings.get("steps")) else []
    if tokens:
        training.append(f"{fmt.scaled(tokens)} tokens")
        if _number(corpus.get("num_tokens_train")):
            training.append(f"{tokens / corpus['num_tokens_train']:.2g} passes over the text")
    if training:
        facts.append(("Training", ", ".join(training)))
    reporting = results.rates.reporting_seeds
    parts = [fmt.rows_counted(results.summary), fmt.counted(len({trial.lr for trial in trials}), "learning rate")]
    parts.append(f"{fmt.counted(len(reporting), 'reporting seed')}")
    total = sum(trial.seconds or 0 for trial in trials)
    parts.append(fmt.counted(len(trials), "trial"))
    if total:
        parts.append(f"{fmt.duration(total)} of training in sum")
    facts.append(("Trials", ", ".join(parts)))
    # A line must not end between a number and its unit.
    return [(term, re.sub(r"(?<=\d) (?=[\w%])", NBSP, value)) for term, value in facts]


def _side(corpus: dict[str, Any], side: str) -> str:
    """A held-out side in words: how many documents, how much one of them makes, how much of it is in training too."""
    documents, groups, tokens = (corpus.get(f"{key}_{side}") for key in ("num_documents", "num_groups", "num_tokens"))
    words = []
    if isinstance(documents, int):
        words.append(fmt.counted(documents, "document"))
    if isinstance(groups, int) and groups != documents:
        words.append(fmt.counted(groups, "group"))
    if isinstance(tokens, int):
        words.append(f"{fmt.scaled(tokens)} tokens")
    if _number(corpus.get(f"largest_share_{side}")):
        words.append(f"largest share {fmt.percent(corpus[f'largest_share_{side}'])}")
    if _number(corpus.get(f"overlap_{side}")):
        words.append(
            f"{fmt.percent(corpus[f'overlap_{side}'])} in {corpus.get('overlap_ngram')}-grams of the training text"
        )
    return ", ".join(words)


def _number(value: Any) -> bool:
    """True for a number that can be shown; the corpus and the settings are not typed."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rates(run: Run) -> list[Rate]:
    rows = []
    for one in run.series:
        tried = ", ".join(fmt.learning_rate(lr) for lr in one.row.lrs_tried)
        tuned = "yes" if one.row.tuned else "no"
        rows.append(Rate(one.short, one.look.colour, fmt.learning_rate(one.row.best_lr), tried, tuned))
    return rows


def _dots(cells: list[Cells], colours: list[str]) -> tuple[list[Dot], dict[str, Any] | None]:
    """The row plots on one scale: differences where there are any, else losses with their intervals."""
    by_difference = any(entry.row.difference for entry in cells)
    values: list[tuple[float | None, tuple[float, float] | None]] = []
    for entry in cells:
        row, difference = entry.row, entry.row.difference
        if by_difference:
            own = (difference.mean, difference.ci_corrected) if difference else (None, None)
            values.append((0.0, None) if entry.is_reference else own)
        else:
            values.append((row.test_loss_mean, row.test_loss_ci))
    means = sorted(mean for mean, _ in values if mean is not None)
    if len(means) < 2:
        return [Dot(None, None, None, False, False, "ink") for _ in cells], None
    # One collapsed row would press all others into a line: it gets an arrow at the edge instead.
    limit = top_of_pack(means)
    kept = [mean for mean in means if mean <= limit]
    edges = [b for mean, bounds in values if mean is not None and mean <= limit for b in bounds or ()]
    span = max(kept[-1] - kept[0], 1e-4)
    # Two seeds can give an interval a hundred times as wide as the spread of the rows.
    low = max(min(kept + edges), kept[0] - 2 * span)
    high = min(max(kept + edges), kept[-1] + 2 * span)
    # Rows can be equal to the bit, as a placement and the same one spelt otherwise are.
    pad = 0.04 * max(high - low, span)
    low, high = low - pad, high + pad

    def place(value: float) -> float:
        return round(100 * min(max((value - low) / (high - low), 0.0), 1.0), 2)

    dots = []
    for entry, colour, (mean, bounds) in zip(cells, colours, values, strict=True):
        if mean is None:
            dots.append(Dot(None, None, None, False, entry.is_reference, colour))
        else:
            ends = (place(bounds[0]), place(bounds[1])) if bounds else (None, None)
            dots.append(Dot(place(mean), *ends, mean > high, entry.is_reference, colour))
    cut = any(b < low or b > high for mean, bounds in values if mean is not None and mean <= high for b in bounds or ())
    zero = place(0.0) if by_difference and low <= 0 <= high else None
    return dots, {"difference": by_difference, "zero": zero, "beyond": any(dot.beyond for dot in dots), "cut": cut}


def _speeds(run: Run) -> list[Speed]:
    speeds = []
    for one in run.series:
        tokens, memory = median_of(one.trials, "tokens_per_second"), median_of(one.trials, "peak_memory_bytes")
        if tokens is not None or memory is not None:
            speeds.append(Speed(one.short, one.look.colour, fmt.grouped(tokens), fmt.scaled(memory, "B")))
    return speeds


def _trials(results: Results) -> list[dict[str, str]]:
    digits = max(fmt.loss_digits(results.summary), 3)
    order = {key: index for index, key in enumerate(dict.fromkeys(t.placement for t in results.trials))}
    ranked = sorted(results.trials, key=lambda t: (order[t.placement], fmt.options_text(t.options), t.lr, t.seed))
    return [
        {
            "placement": trial.placement,
            "options": fmt.options_text(trial.options),
            "lr": fmt.learning_rate(trial.lr),
            "seed": str(trial.seed),
            "val": fmt.number(trial.val_loss, digits),
            "test": fmt.number(trial.test_loss, digits),
            "train": fmt.number(trial.train_loss, digits),
            "tokens": fmt.scaled(trial.tokens),
            "time": fmt.duration(trial.seconds),
            "status": trial.status,
            "message": trial.message,
        }
        for trial in ranked
    ]


def _corpus(corpus: dict[str, Any]) -> dict[str, str]:
    words = {key: key.removeprefix("num_").replace("_", " ") for key in corpus}
    return {
        words[key]: fmt.grouped(value) if key.startswith("num_") and _number(value) else fmt.setting(value)
        for key, value in corpus.items()
    }
