"""What ``results.json`` holds, typed: the one place where the report says what it reads."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from geonorm.errors import UserError
from geonorm.storage import write_json
from geonorm.training.recipe import build
from geonorm.training.result import RunResult

RESULTS = "results.json"
# The report refuses results of another format, in which the same words can stand for other numbers.
FORMAT = 3
VERDICTS = ("better", "worse", "no difference shown", None)
# Why a row has no verdict.
REASONS = (
    "not finished",
    "seed lost",
    "reference lost a seed",
    "few seeds",
    "not tuned",
    "reference not tuned",
    "few documents",
    "no seed shared",
)
FEWEST_SEEDS = 3
FEWEST_DOCUMENTS = 8
_REMEDY = "run the comparison again to rewrite it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(RunResult):
    """One trial: what tells it from the others, and how it ended.

    Attributes:
        id: name of its folder under ``trials/``.
        variant: name of its variant, empty where no other key than placement, rate and seed is varied.
        label: placement with its unusual options, the same for every rate and seed.
        options: those of the placement that differ from its defaults.
    """

    id: str
    variant: str = ""
    label: str
    placement: str
    options: dict[str, Any]
    seed: int
    lr: float


@dataclasses.dataclass(frozen=True)
class Difference:
    """Test loss less that of the reference, seed by seed and window by window.

    Attributes:
        mean: in nats a token.
        ci: 95 % interval of this difference alone; ci_corrected: wide enough for all rows together (Holm).
        kind: what they are over, such as ``"seeds and documents"``.
        num_seeds: reporting seeds that both rows have.
    """

    mean: float
    ci: tuple[float, float] | None
    ci_corrected: tuple[float, float] | None
    kind: str
    num_seeds: int


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the summary: a placement with its options at its chosen rate, in one variant.

    Attributes:
        variant: see :class:`Trial`.
        num_seeds: reporting seeds in the mean; 0 where the seed that chose the rate is all there is.
        num_lost: reporting seeds that did not end well.
        tuned: the rate was searched to a factor of sqrt(2).
        verdict: ``"better"``, ``"worse"``, ``"no difference shown"``; None where none can be given.
        no_verdict: why not, one or more of `REASONS`; empty for the reference and where there is a verdict.
        num_documents: documents (or groups) in the windows of the test text; 0 where not on record.
    """

    variant: str
    label: str
    placement: str
    options: dict[str, Any]
    best_lr: float | None
    test_loss_mean: float | None
    test_loss_ci: tuple[float, float] | None
    ci_kind: str
    test_bits_per_byte_mean: float | None
    num_seeds: int
    num_lost: int
    lrs_tried: tuple[float, ...]
    tuned: bool
    difference: Difference | None
    verdict: str | None
    no_verdict: tuple[str, ...]
    num_documents: int = 0


@dataclasses.dataclass(frozen=True)
class Rates:
    """How the learning rates were found and which seeds report.

    Attributes:
        source: ``"searched"``, ``"given"``, ``"tuned"`` (beforehand, for this very comparison) or ``"untuned"``.
        found: how, where they were tuned beforehand.
        inherited: labels that run at the rate that was tuned for their placement without its options.
        other_corpus: the rates were tuned on another text than this one.
    """

    source: str
    refined: bool
    selection_seed: int | None
    reporting_seeds: tuple[int, ...]
    found: str = ""
    inherited: tuple[str, ...] = ()
    other_corpus: bool = False


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is varied besides placement, rate and seed; differences are taken within a variant.

    Attributes:
        name: such as ``"optimizer.name=muon,model.num_layers=8"``; empty where nothing else is varied.
        values: by dotted key.
        reference: label of the row that the differences are taken to; None without one.
    """

    name: str
    values: dict[str, Any]
    reference: str | None


@dataclasses.dataclass(frozen=True)
class Results:
    """The content of ``results.json``: numbers and names, no sentences.

    Attributes:
        trials: in the order in which they were planned.
        summary: variant by variant, in each lowest test loss first.
        variants: at least one; see `of_variant`.
        complete: every trial has ended.
        num_other_trials: trials in the folder that this comparison does not name.
        settings: what all trials share, by dotted key of the run's configuration.
        num_windows: windows that each held-out side has, by side.
    """

    trials: tuple[Trial, ...]
    summary: tuple[Row, ...]
    variants: tuple[Variant, ...]
    rates: Rates
    complete: bool
    num_other_trials: int
    environment: dict[str, Any]
    settings: dict[str, Any]
    corpus: dict[str, Any]
    num_windows: dict[str, int]
    command: str
    format: int = FORMAT

    def of_variant(self, variant: Variant) -> Results:
        """The results of one variant alone."""
        trials, rows = ([one for one in all_ if one.variant == variant.name] for all_ in (self.trials, self.summary))
        return dataclasses.replace(self, trials=tuple(trials), summary=tuple(rows), variants=(variant,))

    @property
    def reference(self) -> str | None:
        """Label of the reference of the only, or first, variant."""
        return self.variants[0].reference

    def trials_of(self, row: Row) -> list[Trial]:
        """Every trial of a row, at every learning rate."""
        return [trial for trial in self.trials if (trial.variant, trial.label) == (row.variant, row.label)]

    def shown_trials(self, row: Row) -> list[Trial]:
        """The trials whose mean a row shows, by seed."""
        if row.best_lr is None:
            return []
        seeds = self.rates.reporting_seeds if row.num_seeds else (self.rates.selection_seed,)
        at_best = [t for t in self.trials_of(row) if math.isclose(t.lr, row.best_lr, rel_tol=1e-9)]
        return sorted((t for t in at_best if t.status == "ok" and t.seed in seeds), key=lambda trial: trial.seed)

    @property
    def finished(self) -> list[Row]:
        """Rows with a loss."""
        return [row for row in self.summary if row.test_loss_mean is not None]

    @property
    def reference_row(self) -> Row | None:
        """The row that the differences are taken to."""
        return next((row for row in self.summary if row.label == self.reference), None)


def read_results(out_dir: Path) -> Results:
    """Read ``results.json`` of a run folder.

    Raises:
        UserError: it is missing, is not JSON, is of another version of geonorm, or a value in it is not what it should
            be; the message names the file, the value and what was expected.
    """
    path = Path(out_dir) / RESULTS
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(
            f"no results.json in {out_dir}: give the folder that `geonorm compare` wrote its results to"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    try:
        data = json.loads(text, parse_constant=lambda _: None)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON (line {error.lineno}: {error.msg}); {_REMEDY}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deep; {_REMEDY}") from None
    return parse_results(data, str(path))


def write_results(out_dir: Path, results: Results) -> None:
    """Write ``results.json``, whole at any time."""
    write_json(Path(out_dir) / RESULTS, dataclasses.asdict(results))


def parse_results(data: Any, where: str = RESULTS) -> Results:
    """Check the content of ``results.json`` and give it its types.

    Raises:
        UserError: as `read_results`.
    """
    if not isinstance(data, dict):
        raise UserError(f"{where} must hold a JSON object, got {type(data).__name__}")
    if data.get("format") != FORMAT:
        raise UserError(
            f"{where} is of another version of geonorm (format {data.get('format', 1)}, this one reads {FORMAT}); run "
            "the comparison again into another folder"
        )
    try:
        results = build(Results, data, ignore_unknown=True)
    except UserError as error:
        raise UserError(f"{where}: {error}; {_REMEDY}") from None
    if not results.variants:
        raise UserError(f"{where}: `variants` is empty; {_REMEDY}")
    for index, trial in enumerate(results.trials):
        if Path(trial.id).name != trial.id or "\\" in trial.id:
            raise UserError(f"{where}: `trials[{index}].id` must be a plain folder name, got {trial.id!r}; {_REMEDY}")
        if not 0 < trial.lr < math.inf:
            raise UserError(f"{where}: `trials[{index}].lr` must be positive, got {trial.lr}; {_REMEDY}")
    names = {variant.name: variant for variant in results.variants}
    for index, row in enumerate(results.summary):
        at = f"{where}: `summary[{index}]"
        if row.verdict not in VERDICTS:
            known = ", ".join(repr(verdict) for verdict in VERDICTS[:-1])
            raise UserError(f"{at}.verdict` must be {known} or null; {_REMEDY}")
        if unknown := [reason for reason in row.no_verdict if reason not in REASONS]:
            raise UserError(f"{at}.no_verdict` has the unknown reason {unknown[0]!r}; {_REMEDY}")
        if row.variant not in names:
            raise UserError(f"{at}.variant` {row.variant!r} is the name of no variant; {_REMEDY}")
        reference = names[row.variant].reference
        if row.verdict and (not row.difference or not row.difference.ci_corrected or reference is None):
            raise UserError(f"{at}.verdict` stands without `difference`, its `ci_corrected` and a reference; {_REMEDY}")
    for variant in results.variants:
        rows = results.of_variant(variant).summary
        if variant.reference is not None and variant.reference not in [row.label for row in rows]:
            raise UserError(f"{where}: `reference` {variant.reference!r} is the label of no row; {_REMEDY}")
    return results
