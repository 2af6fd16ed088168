"""What ``results.json`` holds, typed: the one place where the report says what it reads."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from geonorm.errors import UserError
from geonorm.training.recipe import build

RESULTS = "results.json"
FORMAT = 2
VERDICTS = ("better", "worse", "no difference shown", None)
_REMEDY = "run the comparison again to rewrite it"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trial; losses in nats a token, None where it did not end well."""

    id: str
    label: str
    placement: str
    options: dict[str, Any]
    seed: int
    lr: float
    status: str
    message: str = ""
    val_loss: float | None = None
    test_loss: float | None = None
    test_bits_per_byte: float | None = None
    train_loss: float | None = None
    num_parameters: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: float | None = None
    step: str | None = None


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
    """One row of the summary: a placement with its options at its chosen rate.

    Attributes:
        num_seeds: reporting seeds in the mean; 0 where the seed that chose the rate is all there is.
        num_lost: reporting seeds that did not end well.
        tuned: the rate was searched to a factor of sqrt(2).
        verdict: ``"better"``, ``"worse"``, ``"no difference shown"``; None where none can be given.
        no_verdict: why not; None for the reference and where there is one.
    """

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
    no_verdict: str | None


@dataclasses.dataclass(frozen=True)
class Rates:
    """How the learning rates were found and which seeds report.

    Attributes:
        source: ``"searched"``, ``"given"``, ``"tuned"`` (beforehand, for this very comparison) or ``"untuned"``.
        found: how, where they were tuned beforehand.
    """

    source: str
    refined: bool
    selection_seed: int | None
    reporting_seeds: tuple[int, ...]
    found: str = ""


@dataclasses.dataclass(frozen=True)
class Results:
    """The content of ``results.json``; the summary stands lowest test loss first."""

    trials: tuple[Trial, ...]
    summary: tuple[Row, ...]
    reference: str | None
    rates: Rates
    environment: dict[str, Any]
    settings: dict[str, Any]
    corpus: dict[str, Any]
    command: str
    notes: tuple[str, ...]

    def trials_of(self, row: Row) -> list[Trial]:
        """Every trial of a row, at every learning rate."""
        return [trial for trial in self.trials if trial.label == row.label]

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


def parse_results(data: Any, where: str = RESULTS) -> Results:
    """Check the content of ``results.json`` and give it its types.

    Raises:
        UserError: as `read_results`.
    """
    if not isinstance(data, dict):
        raise UserError(f"{where} must hold a JSON object, got {type(data).__name__}")
    if data.get("format") != FORMAT:
        raise UserError(
            f"{where} is of another version of geonorm (format {data.get('format', 1)}, this one reads {FORMAT}; 1 has "
            "no losses on a test text); run the comparison again into another folder"
        )
    try:
        results = build(Results, data, ignore_unknown=True)
    except UserError as error:
        raise UserError(f"{where}: {error}; {_REMEDY}") from None
    for index, trial in enumerate(results.trials):
        if Path(trial.id).name != trial.id or "\\" in trial.id:
            raise UserError(f"{where}: `trials[{index}].id` must be a plain folder name, got {trial.id!r}; {_REMEDY}")
        if not 0 < trial.lr < math.inf:
            raise UserError(f"{where}: `trials[{index}].lr` must be positive, got {trial.lr}; {_REMEDY}")
    for index, row in enumerate(results.summary):
        if row.verdict not in VERDICTS:
            known = ", ".join(repr(verdict) for verdict in VERDICTS[:-1])
            raise UserError(f"{where}: `summary[{index}].verdict` must be {known} or null; {_REMEDY}")
        if row.verdict and (not row.difference or not row.difference.ci_corrected or results.reference is None):
            raise UserError(
                f"{where}: `summary[{index}].verdict` stands without `difference`, its `ci_corrected` and `reference`; "
                f"{_REMEDY}"
            )
    if results.reference is not None and results.reference_row is None:
        raise UserError(f"{where}: `reference` {results.reference!r} is the label of no row in `summary`; {_REMEDY}")
    return results
