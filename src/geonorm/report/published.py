"""Losses that the paper reports (arXiv 2601.22095), to stand beside a run of the same size on the same text.

They are the paper's, not measurements of this code, and no result, ranking or interval is computed from them. How long
the paper trained, on which split and with which tokenizer is not on record here, so even beside an equal run a
difference says little.
"""

from __future__ import annotations

import dataclasses
import re

from geonorm.report.results import Results

SOURCE = "arXiv 2601.22095"
# A run counts as one of the paper's size up to this part of its parameters: the same depth and width differ by as much
# where embeddings are tied or not, or the vocabulary is another.
SIZE_MARGIN = 0.15


@dataclasses.dataclass(frozen=True)
class Published:
    """One value of the paper.

    Attributes:
        placement: as this project names it.
        size: as the paper names it; num_parameters: what that says.
        data: as the paper names it; pattern: matches the names of sources that are this text.
        loss: validation loss, nats a token.
    """

    placement: str
    size: str
    num_parameters: float
    data: str
    pattern: str
    loss: float


_ARXIV, _BOOKS3, _FINEWEB = r"\barxiv\b", r"\bbooks3\b", r"\bfineweb[-_]?edu\b"
PUBLISHED = (
    Published("geonorm", "125M", 125e6, "arXiv", _ARXIV, 1.8792),
    Published("geonorm", "125M", 125e6, "Books3", _BOOKS3, 3.4040),
    Published("geonorm", "1.3B", 1.3e9, "FineWeb-Edu", _FINEWEB, 3.1759),
    Published("pre", "1.3B", 1.3e9, "FineWeb-Edu", _FINEWEB, 3.2067),
)


def published_beside(results: Results) -> list[Published]:
    """Values of the paper for the size and the text of a run; empty unless both match.

    Args:
        results: of a comparison.
    """
    sizes = [trial.num_parameters for trial in results.trials if trial.num_parameters]
    name = str(results.corpus.get("name") or "").replace("_", "-")
    if not sizes:
        return []
    return [
        value
        for value in PUBLISHED
        if all(abs(size / value.num_parameters - 1) <= SIZE_MARGIN for size in sizes)
        and re.search(value.pattern, name, re.IGNORECASE)
    ]
