"""An inspection in sentences: what was found, and what to hold against it."""

from __future__ import annotations

import math
import statistics
from typing import Any

from geonorm.report.finding import Finding
from geonorm.report.format import MISSING, counted, grouped, listing

LAW_WORDS = {
    "none": "the same at every depth",
    "harmonic": "falling as 1/k",
    "sqrt": "falling as 1/sqrt(k)",
    "linear": "falling linearly to the last layer",
}
SERIES_NAMES = {"attention": "attention", "mlp": "MLP", "both": "both"}
# Above this typical error a law describes nothing, even if the others are worse.
POOR_FIT = 0.25
# A median angle that moves by so much when the first tokens count is not that of the text alone.
NOTABLE_INFLUENCE = 0.02
LONG_FIRST_TOKEN = 5


def describe_inspection(results: dict[str, Any]) -> Finding:
    """Say what the measurements show.

    Args:
        results: the content of ``inspection.json``.
    """
    models = results["models"]
    headline = _headline(models[0]) if len(models) == 1 else f"{counted(len(models), 'model')} side by side along depth"
    sentences = [sentence for model in models for sentence in _sentences(model, alone=len(models) == 1)]
    doubts = [doubt for model in models for doubt in _doubts(model, results, alone=len(models) == 1)]
    if results["text"]["cut"]:
        doubts.append(f"Of the text only the first {grouped(results['text']['characters'])} characters were read.")
    if len({tuple(model["tokens"]["lengths"]) + (model["tokens"]["total"],) for model in models}) > 1:
        doubts.append("The models have different tokenizers, so their windows hold different stretches of the text.")
    return Finding(headline, sentences, list(dict.fromkeys(doubts)))


def law_words(fits: dict[str, Any]) -> str:
    """The best law of a set of fits in words, such as ``falling as k^-0.31``."""
    if fits["best"] is None:
        return "without a law (too few layers)"
    best = best_fit(fits)
    if best["law"] != "power":
        return LAW_WORDS[best["law"]]
    exponent = best["exponent"]
    return f"{'falling' if exponent > 0 else 'growing'} as k^{-exponent:.2f}"


def best_fit(fits: dict[str, Any]) -> dict[str, Any]:
    """The fit that ``best`` names."""
    return next(fit for fit in fits["fits"] if fit["law"] == fits["best"])


def degrees(radians: float | None, digits: int = 1) -> str:
    """An angle in degrees, or a dash where there is none."""
    return MISSING if radians is None else f"{math.degrees(radians):.{digits}f}"


def size(value: float | None) -> str:
    """A length or a step with three significant digits, without an exponent where that is readable."""
    if value is None:
        return MISSING
    if value != 0 and not 1e-4 <= abs(value) < 1e5:
        return f"{value:.1e}"
    digits = 2 if value == 0 else max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{min(digits, 4)}f}"


def _headline(model: dict[str, Any]) -> str:
    fits = model["laws"]["both"]["inner"]
    if fits["best"] is None:
        return f"Too few layers in {model['name']} to tell how its angles change with depth"
    middle = _typical_angle(model)
    found = law_words(fits)
    if best_fit(fits)["law"] == "none":
        return f"{model['name']} shows no decay: between its first and last block a step turns the stream by {middle}°"
    return f"Between first and last block, the steps of {model['name']} turn the stream by about {middle}°, {found}"


def _typical_angle(model: dict[str, Any]) -> str:
    inner = [row["angle"]["median"] for row in model["sublayers"] if 1 < row["layer"] < model["num_layers"]]
    return degrees(statistics.median(inner), 0)


def _sentences(model: dict[str, Any], *, alone: bool) -> list[str]:
    rows = model["sublayers"]
    name = "" if alone else f"{model['name']}: "
    first, last = rows[0], rows[-1]
    start, end = first["radius"]["median"], model["radius_end"]["median"]
    ends = [f"{degrees(row['angle']['median'], 0)}°" for row in (*rows[:2], *rows[-2:])]
    angles = (
        f"attention turns the stream by {ends[0]} and the MLP by {ends[1]} in the first block, by {ends[2]} and "
        f"{ends[3]} in the last"
    )
    if not alone:
        laws = f"between them {law_words(model['laws']['both']['inner'])}"
        return [f"{name}{angles}, {laws}; radius {size(start)} to {size(end)}."]
    turns = f"{angles[0].upper()}{angles[1:]} (medians over {grouped(model['tokens']['counted'])} tokens)."
    if math.isclose(start, end, rel_tol=1e-3):
        radius = f"Its radius stays at {size(start)}."
    else:
        way = "grows" if end > start else "falls"
        radius = (
            f"Its radius {way} from {size(start)} to {size(end)} (RMS), so geonorm would need a step size of "
            f"{size(first['alpha']['median'])} in the first sub-layer and {size(last['alpha']['median'])} in the last "
            f"to make the same turns{_between(model)}."
        )
    return [turns, radius]


def _between(model: dict[str, Any]) -> str:
    fits = model["alpha_laws"]["both"]["inner"]
    return "" if fits["best"] is None else f", between first and last block {law_words(fits)}"


def _doubts(model: dict[str, Any], results: dict[str, Any], *, alone: bool) -> list[str]:
    tokens = model["tokens"]
    of = "" if alone else f" of {model['name']}"
    doubts = []
    fits = model["laws"]["both"]["inner"]
    if fits["best"] is not None and best_fit(fits)["error"] > POOR_FIT:
        error = best_fit(fits)["error"]
        doubts.append(
            f"The best law misses a typical angle{of} by {error:.0%}: attention and MLP, or single layers, differ by "
            "more than the depth explains."
        )
    doubts.append(_first_token(model, of))
    asked = results["settings"]["windows"]
    if tokens["windows"] < asked:
        text = f"The text fills {counted(tokens['windows'], 'window')}{' for ' + model['name'] if of else ''}"
        doubts.append(f"{text} and not the {asked} that were asked for.")
    if tokens["counted"] < 256:
        doubts.append(f"Only {tokens['counted']} tokens{of} were counted; quartiles of so few are rough.")
    unusable = sum(model["laws"][series]["all"]["num_left_out"] for series in ("attention", "mlp"))
    if unusable:
        doubts.append(
            f"{counted(unusable, 'sub-layer')}{of} did not turn the stream; no law can hold an angle of zero."
        )
    return doubts


def _first_token(model: dict[str, Any], of: str) -> str:
    skip = model["tokens"]["skip_first"]
    longest = max(model["sublayers"], key=lambda row: row["first_radius"] / (row["radius"]["median"] or math.inf))
    ratio = longest["first_radius"] / (longest["radius"]["median"] or math.inf)
    where = f"layer {longest['layer']}"
    sink = (
        f"at {where} its stream is {size(ratio)} times as long as the median token's"
        if ratio > LONG_FIRST_TOKEN
        else f"its stream is at most {size(ratio)} times as long as the median token's"
    )
    if skip == 0:
        return f"The first token of each window{of} is counted; {sink}."
    which = "first token" if skip == 1 else f"first {skip} tokens"
    influence = model["first_token_influence"]
    change = f"counting {'it' if skip == 1 else 'them'} as well changes a median angle by at most {influence:.2%}"
    strong = ", which is not negligible" if influence > NOTABLE_INFLUENCE else ""
    return f"The {which} of each window{of} {'is' if skip == 1 else 'are'} left out: {sink}, and {change}{strong}."


def text_words(results: dict[str, Any]) -> str:
    """Which text was used, in a phrase."""
    text = results["text"]
    return f"{text['name']} ({grouped(text['characters'])} characters, sha256 {text['sha256']})"


def token_words(model: dict[str, Any]) -> str:
    """How a model was given the text, in a phrase."""
    tokens = model["tokens"]
    lengths = tokens["lengths"]
    span = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    added = tokens["added_by_tokenizer"]
    start = f"each starting with {listing(added)}" if added else "no special tokens added"
    return f"{grouped(tokens['total'])} tokens in {counted(tokens['windows'], 'window')} of {span}, {start}"
