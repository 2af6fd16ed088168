"""What a model does along its depth: lengths, angles, gradients, and the laws that the angles follow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from geonorm import geometry
from geonorm.errors import UserError, check_count
from geonorm.inspection.laws import LawFits, fit_laws
from geonorm.inspection.probe import Move, block_norms, watched
from geonorm.models import current_placement
from geonorm.models.adapter import adapter_for
from geonorm.models.rewiring import as_rewired
from geonorm.placements import Placement, Site
from geonorm.placements.base import SUBLAYERS

QUANTITIES = ("radius", "update", "along", "across", "angle", "alpha", "alpha_normalized")
SERIES = (*SUBLAYERS, "both")


@dataclasses.dataclass(frozen=True)
class Quartiles:
    """Median and quartiles over tokens."""

    q25: float
    median: float
    q75: float


@dataclasses.dataclass(frozen=True)
class SublayerRow:
    """One sub-layer over all counted tokens. Lengths are RMS: the length of a row over sqrt(d).

    Attributes:
        layer, sublayer: where, layers counted from 1.
        radius: of the stream before the sub-layer.
        update: length of what the sub-layer gives to the stream.
        along, across: its part along the stream (signed) and its length across; ``along^2 + across^2 = update^2``.
        angle: between the stream before and after, radians.
        alpha: step size with which geonorm, on its sphere of RMS 1, makes the same angle with the same update.
        alpha_normalized: the same with ``normalize_update``.
        first_radius, first_angle: median over windows at their first token.
        angle_with_first: median angle when no token is left out.
    """

    layer: int
    sublayer: str
    radius: Quartiles
    update: Quartiles
    along: Quartiles
    across: Quartiles
    angle: Quartiles
    alpha: Quartiles
    alpha_normalized: Quartiles
    first_radius: float
    first_angle: float
    angle_with_first: float


@dataclasses.dataclass(frozen=True)
class Inspection:
    """All measurements of one model on one text.

    Attributes:
        family: ``model_type`` of the stock family.
        placement: the placement that the model has, or for a stock model the one that it is wired in.
        num_layers, width, num_parameters: size of the model.
        num_tokens: tokens run through it; ``num_counted`` of them entered the statistics.
        skip_first: tokens left out at the start of each window.
        loss: mean nats a token on the text, None for a model without a head.
        sublayers: two rows a layer, first to last.
        radius_end: RMS of the stream after the last sub-layer.
        gradient_norms: of each block's parameters for the mean loss, if asked for.
        laws: fitted to the median angles, by ``"attention"``, ``"mlp"`` and ``"both"``, each ``(all blocks, without the
            first and last block)``.
        alpha_laws: the same for the step sizes ``alpha``.
    """

    family: str
    placement: Placement
    num_layers: int
    width: int
    num_parameters: int
    num_tokens: int
    num_counted: int
    skip_first: int
    loss: float | None
    sublayers: tuple[SublayerRow, ...]
    radius_end: Quartiles
    gradient_norms: tuple[float, ...] | None
    laws: dict[str, tuple[LawFits, LawFits]]
    alpha_laws: dict[str, tuple[LawFits, LawFits]]

    def angles(self, sublayer: str) -> list[float]:
        """Median angle of one kind of sub-layer, radians, first to last layer."""
        return [row.angle.median for row in self.sublayers if row.sublayer == sublayer]

    @property
    def first_token_influence(self) -> float:
        """Largest relative change of a median angle when the tokens left out are counted as well."""
        changes = [abs(row.angle_with_first / row.angle.median - 1) for row in self.sublayers if row.angle.median > 0]
        return max(changes, default=0.0)


def inspect_model(
    model: nn.Module,
    windows: Sequence[Sequence[int]] | Tensor,
    *,
    skip_first: int = 1,
    gradients: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> Inspection:
    """Run text through a model and measure what every sub-layer does to the stream.

    The model itself is not changed, its gradients included. Measurements are in float32 (float64 for a float64 model);
    windows run one at a time.

    Args:
        model: a stock or rewired decoder of a supported family.
        windows: token ids, each window at least ``skip_first + 2`` long; or an integer tensor ``[windows, tokens]``.
        skip_first: tokens left out of the statistics at the start of each window. Many trained models park attention on
            the first token and give it a stream many times longer than any other.
        gradients: also run backward, for the gradient norm of each block.
        advance: called after each window.

    Raises:
        UserError: unsupported model, no windows, a window too short, an id outside the vocabulary, a stream that is not
            finite, or ``gradients`` of a model without a language-model head or of one whose weights are all frozen.
    """
    skip_first = check_count("skip_first", skip_first, 0)
    windows = windows.tolist() if isinstance(windows, Tensor) else windows
    view = as_rewired(model)
    config: Any = view.config
    _check_windows(windows, skip_first, config.vocab_size)
    has_head = type(view) is adapter_for(view).rewired.causal_lm
    weights = [parameter for parameter in view.parameters() if parameter.requires_grad]
    if gradients and not has_head:
        raise UserError(f"`gradients` needs a loss, and a {type(model).__name__} has no language-model head")
    if gradients and not weights:
        raise UserError("`gradients` needs weights to derive by, and every weight of this model is frozen")
    tally = _Tally(skip_first)
    total, sums = 0.0, [torch.zeros_like(weight) for weight in weights] if gradients else []
    num_tokens, num_targets = sum(map(len, windows)), sum(len(window) - 1 for window in windows)
    device = next(view.parameters()).device
    with watched(view, tally.add), torch.set_grad_enabled(gradients):
        for window in windows:
            ids = torch.tensor([list(window)], device=device)
            output = view(input_ids=ids, use_cache=False)
            if has_head:
                logits = output.logits[0, :-1].float()
                loss = functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / num_targets
                total += loss.item()
                found = torch.autograd.grad(loss, weights, allow_unused=True) if gradients else ()
                for so_far, new in zip(sums, found, strict=True):
                    if new is not None:
                        so_far += new
            advance()
    norms = block_norms(view, dict(zip(map(id, weights), sums, strict=True))) if gradients else None
    rows = tally.rows()
    return Inspection(
        family=adapter_for(view).family,
        placement=current_placement(view),
        num_layers=config.num_hidden_layers,
        width=config.hidden_size,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_tokens=num_tokens,
        num_counted=num_tokens - skip_first * len(windows),
        skip_first=skip_first,
        loss=total if has_head else None,
        sublayers=rows,
        radius_end=tally.radius_end(),
        gradient_norms=tuple(norms) if norms else None,
        laws=_laws(rows, config.num_hidden_layers, "angle"),
        alpha_laws=_laws(rows, config.num_hidden_layers, "alpha"),
    )


def _check_windows(windows: Sequence[Sequence[int]], skip_first: int, vocab_size: int) -> None:
    if not windows:
        raise UserError("no window of tokens to inspect the model with; give more text")
    shortest = min(map(len, windows))
    if shortest < skip_first + 2:
        raise UserError(
            f"a window of {shortest} tokens is too short: with `skip_first` {skip_first} it takes {skip_first + 2}"
        )
    highest, lowest = max(map(max, windows)), min(map(min, windows))
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise UserError(f"token id {wrong} is outside the model's vocabulary of {vocab_size}; is it its own tokenizer?")


class _Tally:
    """Per-token numbers of every sub-layer, one tensor a window."""

    def __init__(self, skip_first: int) -> None:
        self.skip_first = skip_first
        self.values: dict[tuple[int, str], dict[str, list[Tensor]]] = {}
        self.ends: list[Tensor] = []

    def add(self, site: Site, move: Move) -> None:
        parts = self.values.setdefault((site.layer, site.sublayer), {name: [] for name in QUANTITIES})
        values = _quantities(move)
        # Quartiles leave NaN out, which is meant for a step size that is not there and would hide a broken model.
        if not all(values[name].isfinite().all() for name in ("radius", "update", "angle")):
            raise UserError(
                f"the stream at {site.sublayer} {site.layer} is not finite, so there is nothing to measure: weights "
                "that are no numbers, or values too large for the dtype; try float32"
            )
        for name, value in values.items():
            parts[name].append(value)
        if site.layer == site.num_layers:
            # The last sub-layer of the last layer runs last, so its point is the one that stays.
            end = _rms(_wide(move.y))[0]
            self.ends = [*self.ends[: len(parts["angle"]) - 1], end.cpu()]

    def rows(self) -> tuple[SublayerRow, ...]:
        return tuple(self._row(layer, sublayer) for layer, sublayer in sorted(self.values))

    def radius_end(self) -> Quartiles:
        return _quartiles(torch.cat([end[self.skip_first :] for end in self.ends]))

    def _row(self, layer: int, sublayer: str) -> SublayerRow:
        parts = self.values[layer, sublayer]
        kept = {
            name: _quartiles(torch.cat([window[self.skip_first :] for window in parts[name]])) for name in QUANTITIES
        }
        first = {name: _median(torch.stack([window[0] for window in parts[name]])) for name in ("radius", "angle")}
        everything = _median(torch.cat(parts["angle"]))
        return SublayerRow(
            layer, sublayer, **kept, first_radius=first["radius"], first_angle=first["angle"],
            angle_with_first=everything,
        )  # fmt: skip


def _quantities(move: Move) -> dict[str, Tensor]:
    x, u, y = _wide(move.x)[0], _wide(move.update)[0], _wide(move.y)[0]
    v = geometry.tangent(x, u)
    length = geometry.norm(x)
    unit = x / torch.where(length == 0, 1.0, length)
    theta, across, update = geometry.angle(x, y), _rms(v), _rms(u)
    values = {
        "radius": _rms(x),
        "update": update,
        "along": (u * unit).sum(-1) / math.sqrt(x.shape[-1]),
        "across": across,
        "angle": theta,
        # Where nothing points across, no step size turns the stream; such tokens are left out of the quartiles.
        "alpha": torch.where(across > 0, theta / across, math.nan),
        "alpha_normalized": torch.where(across > 0, theta * update / across, math.nan),
    }
    return {name: value.cpu() for name, value in values.items()}


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _rms(rows: Tensor) -> Tensor:
    return geometry.norm(rows).squeeze(-1) / math.sqrt(rows.shape[-1])


def _median(values: Tensor) -> float:
    return torch.nanquantile(values, 0.5).item()


def _quartiles(values: Tensor) -> Quartiles:
    low, middle, high = torch.nanquantile(values, values.new_tensor([0.25, 0.5, 0.75])).tolist()
    return Quartiles(low, middle, high)


def _laws(rows: Sequence[SublayerRow], num_layers: int, quantity: str) -> dict[str, tuple[LawFits, LawFits]]:
    laws = {}
    for series in SERIES:
        chosen = [row for row in rows if series in (row.sublayer, "both")]
        inner = [row for row in chosen if 1 < row.layer < num_layers]
        laws[series] = tuple(
            fit_laws([row.layer for row in part], [getattr(row, quantity).median for row in part], num_layers)
            for part in (chosen, inner)
        )
    return laws
