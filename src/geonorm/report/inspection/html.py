"""The page of an inspection: one HTML file that needs nothing beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from geonorm.errors import UserError
from geonorm.report import format as fmt
from geonorm.report import style
from geonorm.report.html import page_blocks, templates
from geonorm.report.inspection.figures import make_figures
from geonorm.report.inspection.table import law_rows
from geonorm.report.inspection.words import (
    SERIES_NAMES,
    degrees,
    describe_inspection,
    size,
    text_words,
    token_words,
)
from geonorm.storage import write_json, write_text

PAGE = "inspection.html"
# Beside the figures, which of them are ours.
FIGURES = "figures.json"
HEADINGS = {
    "angle": "How far each sub-layer turns the stream",
    "lengths": "How long the stream and its updates are",
    "along": "Along and across",
    "alpha": "The decay that is built in",
    "gradient": "Gradient norm by layer",
}


def write_inspection(out: Path, results: dict[str, Any]) -> Path:
    """Write ``inspection.html`` and ``figures/*.svg`` and ``*.pdf`` into a folder.

    The page is one file without scripts and without references to anything outside it. The same results give the same
    bytes.

    Args:
        out: the folder.
        results: what :func:`geonorm.inspection.inspect_command.inspect_models` returns.

    Returns:
        the path of the page.

    Raises:
        UserError: the folder cannot be written to.
    """
    try:
        with style.context():
            drawn = make_figures(results)
            blocks = page_blocks(drawn, out / "figures", HEADINGS)
        _remove_others(out / "figures", [panel.name for block in drawn for panel in block.panels])
        write_text(out / PAGE, _render(results, blocks))
    except OSError as error:
        raise UserError(f"cannot write the report into {out}: {error}") from None
    return out / PAGE


def _remove_others(folder: Path, names: list[str]) -> None:
    """Remove figures of an inspection that was here before, which has a list of them: other models have others."""
    record = folder / FIGURES
    try:
        before = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = []
    for name in before if isinstance(before, list) else []:
        # A name, and no way out of the folder.
        if name not in names and Path(str(name)).name == name:
            for suffix in (".svg", ".pdf"):
                (folder / f"{name}{suffix}").unlink(missing_ok=True)
    write_json(record, names)


def _render(results: dict[str, Any], blocks: list[dict[str, Any]]) -> str:
    names = ", ".join(model["name"] for model in results["models"])
    return (
        templates()
        .get_template("inspection/page.html.j2")
        .render(
            finding=describe_inspection(results),
            facts=_facts(results),
            blocks=blocks,
            models=[_model(model) for model in results["models"]],
            several=len(results["models"]) > 1,
            gradients=any(model["gradient_norms"] for model in results["models"]),
            settings={key: fmt.setting(value) for key, value in results["settings"].items()},
            environment={key: fmt.setting(value) for key, value in results["environment"].items()},
            text={key: fmt.setting(value) for key, value in results["text"].items()},
            command=results["command"],
            eyebrow="What does each layer do to the residual stream?",
            subject=names,
            date=results["environment"]["date"],
            colours=style.CSS_COLOURS,
        )
    )


def _facts(results: dict[str, Any]) -> list[tuple[str, str]]:
    models = results["models"]
    facts = []
    for model in models:
        term = "Model" if len(models) == 1 else model["name"]
        shape = (
            f"{model['class']}, {fmt.scaled(model['num_parameters'])} parameters, {model['num_layers']} layers, "
            f"width {model['width']}, {model['dtype']}, placement {model['placement_label']}"
        )
        facts.append((term, shape))
    facts.append(("Text", text_words(results)))
    facts += [("Tokens", words) for words in dict.fromkeys(map(token_words, models))]
    losses = [f"{model['loss']:.3f}" for model in models if model["loss"] is not None]
    if losses:
        facts.append(("Loss on it", f"{', '.join(losses)} nats per token"))
    return facts


def _model(model: dict[str, Any]) -> dict[str, Any]:
    gradients = model["gradient_norms"] or []
    return {
        "name": model["name"],
        "laws": law_rows(model),
        "rows": [
            {
                "layer": str(row["layer"]) if row["sublayer"] == "attention" else "",
                "sublayer": SERIES_NAMES[row["sublayer"]],
                "lengths": [size(row[name]["median"]) for name in ("radius", "update", "along", "across")],
                "angle": degrees(row["angle"]["median"]),
                "span": f"{degrees(row['angle']['q25'])} to {degrees(row['angle']['q75'])}",
                "steps": [size(row[name]["median"]) for name in ("alpha", "alpha_normalized")],
                "first": [size(row["first_radius"]), degrees(row["first_angle"])],
                "gradient": size(gradients[row["layer"] - 1]) if gradients and row["sublayer"] == "attention" else "",
            }
            for row in model["sublayers"]
        ],
    }
