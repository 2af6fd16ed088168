"""Losses that papers report, to stand beside a run of the same size on the same text.

They are the papers', not measurements of this code, and no result, ranking or interval is computed from them. On which
split, with which tokenizer and, for GeoNorm's paper, for how long they trained is not on record here, so even beside an
equal run a difference says little. ProRes' table (50 billion tokens, a rate tuned for each placement) has perplexities;
their logarithms stand here.
"""

from __future__ import annotations

import dataclasses
import math
import re

from geonorm.report.results import Results

GEONORM, PRORES = "arXiv 2601.22095", "arXiv 2603.05369"
# A run counts as one of a paper's size up to this part of its parameters: the same depth and width differ by as much
# where embeddings are tied or not, or the vocabulary is another.
SIZE_MARGIN = 0.15


@dataclasses.dataclass(frozen=True)
class Published:
    """One value of a paper.

    Attributes:
        placement: as this project names it.
        size: as the paper names it; num_parameters: what that says.
        data: as the paper names it; pattern: matches the names of sources that are this text.
        loss: validation loss, nats a token.
        source: the paper.
    """

    placement: str
    size: str
    num_parameters: float
    data: str
    pattern: str
    loss: float
    source: str = GEONORM


_ARXIV, _BOOKS3, _FINEWEB, _C4 = r"\barxiv\b", r"\bbooks3\b", r"\bfineweb[-_]?edu\b", r"\bc4\b"
_PERPLEXITIES = {
    "pre": (14.67, 12.36, 10.32),
    "sandwich": (14.55, 11.97, 10.16),
    "lns": (14.45, 11.74, 9.93),
    "deepnorm": (14.57, 12.38, 10.32),
    "post": (14.84, 12.74, 11.62),
    "pre, warm_depth=1000": (14.30, 11.74, 9.86),
}
_SIZES = (("130M", 130e6), ("350M", 350e6), ("1.3B", 1.3e9))
PUBLISHED = (
    Published("geonorm", "125M", 125e6, "arXiv", _ARXIV, 1.8792),
    Published("geonorm", "125M", 125e6, "Books3", _BOOKS3, 3.4040),
    Published("geonorm", "1.3B", 1.3e9, "FineWeb-Edu", _FINEWEB, 3.1759),
    Published("pre", "1.3B", 1.3e9, "FineWeb-Edu", _FINEWEB, 3.2067),
    *(
        Published(placement, size, num_parameters, "C4", _C4, math.log(perplexity), PRORES)
        for placement, perplexities in _PERPLEXITIES.items()
        for (size, num_parameters), perplexity in zip(_SIZES, perplexities, strict=True)
    ),
)


def published_beside(results: Results) -> list[Published]:
    """Values of papers for the size and the text of a run; empty unless both match.

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
