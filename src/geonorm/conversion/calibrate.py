"""Step sizes with which a GeoNorm model moves by the angles that a Pre-Norm model moves by."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from geonorm import geometry
from geonorm.errors import UserError, unknown
from geonorm.inspection import Move, watched
from geonorm.models import base_model, blocks
from geonorm.models.blocks import connection_name
from geonorm.placements import Site

METHODS = ("sequential", "stock")
Key = tuple[int, str]


@dataclasses.dataclass(frozen=True)
class Calibration:
    """One sub-layer.

    Attributes:
        layer, sublayer: where, layers counted from 1.
        angle: median over tokens, in the Pre-Norm model, radians.
        across: median RMS of the sub-layer's output across the stream, in the model that was calibrated on.
        alpha: the step size.
    """

    layer: int
    sublayer: str
    angle: float
    across: float
    alpha: float


def measured_moves(model: nn.Module, ids: Tensor) -> dict[Key, tuple[float, float]]:
    """Median angle and median RMS across the stream of every sub-layer of a rewired model, first tokens left out.

    A model parks attention on the first token of a window and gives it a stream many times longer than any other, so
    it says nothing about the rest.

    Args:
        model: a rewired model.
        ids: ``[batch, tokens]``, at least 2 tokens.
    """
    found: dict[Key, tuple[float, float]] = {}

    def measure(site: Site, move: Move) -> None:
        x, y, update = (part[:, 1:].float() for part in (move.x, move.y, move.update))
        found[site.layer, site.sublayer] = geometry.angle(x, y).median().item(), _across(x, update)

    with watched(model, measure), torch.no_grad():
        base_model(model)(input_ids=ids, use_cache=False)
    return found


def calibrate(model: Any, ids: Tensor, moves: dict[Key, tuple[float, float]], method: str) -> list[Calibration]:
    """Choose the step sizes of a GeoNorm model so that its sub-layers move by given angles; the model has them after.

    With w the RMS of the sub-layer's output across the stream, geonorm's angle is ``phi(alpha w)``, which grows with
    w, so its median over tokens is ``phi(alpha median(w))`` and ``alpha = phi^-1(angle) / median(w)`` is exact.

    Args:
        model: rewired to ``geonorm``, gains folded, without ``learnable`` and ``normalize_update``.
        ids: ``[batch, tokens]``.
        moves: what :func:`measured_moves` found in the Pre-Norm model.
        method: where w is taken from: ``"stock"``, the Pre-Norm model; ``"sequential"``, this model, sub-layer after
            sub-layer, each with the steps before it already chosen.

    Raises:
        UserError: an unknown method, an angle that the retraction does not reach, or a sub-layer that does nothing.
    """
    if method not in METHODS:
        raise unknown("calibration method", method, METHODS)
    found: list[Calibration] = []
    retraction = _connection(model, Site(1, "attention", len(blocks(model)))).retraction

    def choose(site: Site, across: float) -> float:
        angle = moves[site.layer, site.sublayer][0]
        alpha = _inverse(retraction, angle, site) / across if across else 0.0
        if not 0 < alpha < math.inf:
            raise UserError(
                f"{site.sublayer} {site.layer} moves nothing on the calibration text (angle {angle:.3g}), so it has no "
                "step size; give other text"
            )
        found.append(Calibration(site.layer, site.sublayer, angle, across, alpha))
        return alpha

    if method == "stock":
        for (layer, sublayer), (_, across) in sorted(moves.items()):
            site = Site(layer, sublayer, len(blocks(model)))
            _connection(model, site).initial_alpha = choose(site, across)
        return found
    handles = []
    for block in blocks(model):
        for sublayer in ("attention", "mlp"):
            site = dataclasses.replace(block.site, sublayer=sublayer)  # type: ignore[type-var]
            handles.append(_connection(model, site).register_forward_pre_hook(_choosing(site, choose)))
    try:
        with torch.no_grad():
            base_model(model)(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _choosing(site: Site, choose: Callable[[Site, float], float]) -> Callable[[Any, tuple], tuple]:
    def listen(connection: Any, args: tuple) -> tuple:
        stream, call, norms = args

        def step(h: Tensor) -> Tensor:
            update = call(h)
            connection.initial_alpha = choose(site, _across(stream[:, 1:].float(), update[:, 1:].float()))
            return update

        return stream, step, norms

    return listen


def _connection(model: nn.Module, site: Site) -> Any:
    return blocks(model)[site.layer - 1].get_submodule(connection_name(site.sublayer))


def _across(x: Tensor, update: Tensor) -> float:
    return (geometry.norm(geometry.tangent(x, update)) / math.sqrt(x.shape[-1])).median().item()


def _inverse(retraction: Any, angle: float, site: Site) -> float:
    p = geometry.retraction_exponent(retraction)
    if p == math.inf:
        return angle
    if angle / p >= math.pi / 2:
        raise UserError(
            f"{site.sublayer} {site.layer} moves by {math.degrees(angle):.0f} degrees, more than the retraction "
            f"{retraction!r} reaches; use 'exponential'"
        )
    return p * math.tan(angle / p)
