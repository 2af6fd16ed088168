"""The page of an inspection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geonorm.report.format import scaled
from geonorm.report.inspection_figures import inspection_figures
from geonorm.report.inspection_finding import describe_inspection, text_words, token_words
from geonorm.report.inspection_tables import laws_table, sublayers_table
from geonorm.report.page import Page, Section, write_page

LAWS = (
    "Each law is fitted to the logarithms of the medians by least squares; k is the layer, alpha the step size that "
    "geonorm would need. The numbers are typical relative errors on a layer that was left out of the fit, and the "
    "least one is bold. \u201cInner\u201d blocks are all but the first and the last. \u201cBoth\u201d fits attention "
    "and MLP of a layer with one step size, as geonorm has by default. The power law is k to the power of minus the "
    "exponent, which stands with its standard error; below zero, values grow."
)
SUBLAYERS = (
    "Medians over tokens. Lengths are RMS (length over the square root of the hidden size), angles are degrees. Alpha "
    "is the step size that geonorm needs for the same angle; with a unit update, the one that it needs under "
    "normalize_update. \u201cFirst\u201d is the first token of each window, which is not in the other columns unless "
    "it was counted."
)


def write_inspection(out: Path, results: dict[str, Any]) -> Path:
    """Write ``inspection.html`` and ``figures/*.svg`` and ``*.pdf`` into a folder.

    Args:
        out: the folder.
        results: what ``inspection.json`` holds, see ``docs/unification.md``.

    Returns:
        the path of the page.

    Raises:
        UserError: the folder cannot be written to.
    """
    return write_page(out / "inspection.html", lambda: _page(results))


def _page(results: dict[str, Any]) -> Page:
    finding, models = describe_inspection(results), results["models"]
    sublayers = [sublayers_table(model, wide=True) for model in models]
    columns = {key.title(): results[key] for key in ("settings", "text")}
    return Page(
        eyebrow="What does each layer do to the residual stream?",
        subject=", ".join(model["name"] for model in models),
        date=results["environment"]["date"],
        headline=finding.headline,
        lead=" ".join(finding.sentences),
        facts=_facts(results),
        sections=[
            *inspection_figures(models),
            Section("Which law of decay", tables=[laws_table(model) for model in models], note=LAWS),
            Section("What to hold against it", bullets=finding.doubts),
            Section("All sub-layers", tables=sublayers, note=SUBLAYERS),
            Section(
                "To repeat it",
                code=results["command"],
                columns={**columns, "Versions and machine": results["environment"]},
            ),
        ],
    )


def _facts(results: dict[str, Any]) -> list[tuple[str, str]]:
    models = results["models"]
    facts = []
    for model in models:
        term = "Model" if len(models) == 1 else model["name"]
        shape = (
            f"{model['class']}, {scaled(model['num_parameters'])} parameters, {model['num_layers']} layers, hidden "
            f"size {model['width']}, {model['dtype']}, placement {model['placement_label']}"
        )
        facts.append((term, shape))
    facts.append(("Text", text_words(results)))
    facts += [("Tokens", words) for words in dict.fromkeys(map(token_words, models))]
    losses = [f"{model['loss']:.3f}" for model in models if model["loss"] is not None]
    if losses:
        facts.append(("Loss on it", f"{', '.join(losses)} nats per token"))
    return facts
