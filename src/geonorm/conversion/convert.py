"""From Pre-Norm to GeoNorm with the weights of a trained model."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from geonorm.conversion.calibrate import METHODS, Calibration, calibrate, measured_moves
from geonorm.conversion.fold import fold, input_norms, without_gains
from geonorm.errors import UserError, unknown
from geonorm.models import current_placement, rewire
from geonorm.models.adapter import is_rewired
from geonorm.models.rewiring import as_rewired, shared_copy

# Folding multiplies before the sum instead of in it: a few roundings a sub-layer, which the depth adds up.
_FOLDED = {torch.float64: 1e-9, torch.float32: 1e-3}
_FOLDED_HALF = 0.1


@dataclasses.dataclass(frozen=True)
class Conversion:
    """How a model was converted.

    Attributes:
        method: of calibration.
        sublayers: one entry a sub-layer, attention of layer 1 first.
        fold_error: largest change of a logit by folding alone, over the largest logit.
    """

    method: str
    sublayers: tuple[Calibration, ...]
    fold_error: float

    @property
    def alphas(self) -> list[float]:
        """Step sizes, attention of layer 1 first."""
        return [entry.alpha for entry in self.sublayers]


def convert_model(
    model: nn.Module,
    ids: Tensor,
    *,
    method: str = "sequential",
    retraction: str | float = "projection",
    max_angle: float | None = None,
    learnable: bool = False,
) -> Conversion:
    """Turn a stock Pre-Norm decoder with RMSNorm into a GeoNorm model, in place.

    A Pre-Norm sub-layer reads ``g N(x)``, a point of the sphere times a gain. On the sphere the point is there already,
    so the gain is folded into the weights that read it, and with it the median of what the norm's eps takes away. The
    update is then the same function of the direction; what is given up is the radius. Pre-Norm turns the direction by
    ``atan2(|v|, |x| + <u, x>/|x|)``, where |x| differs from token to token and along the depth; GeoNorm turns it by
    ``phi(alpha |v|)`` with one alpha a sub-layer, so that the median angle over tokens stays what it was, and drops the
    part of u along x. With the projection retraction, ``phi = atan``, that is Pre-Norm's own law with one length of the
    stream for all tokens of a sub-layer, which is why it is the default here. The result is a start to train on from,
    not the same model. The final norm and the head stay.

    Args:
        model: a stock decoder of a supported family, with or without a head; weights are changed in place, so that
            after an error it has to be loaded again.
        ids: calibration text, ``[batch, tokens]``, run through the model at once.
        method: see :func:`geonorm.conversion.calibrate.calibrate`.
        retraction, max_angle, learnable: options of the placement. A trained model's first layers move far (50 and 86
            degrees in SmolLM2-135M), and a limit of pi/4 would cut them, so there is none by default; the projection
            retraction stays below 90 degrees by itself.

    Raises:
        UserError: a model that is rewired already, is not Pre-Norm, has no RMSNorm, or reads its norms with something
            other than linear layers; too little text.
    """
    if method not in METHODS:
        raise unknown("calibration method", method, METHODS)
    if ids.dim() != 2 or ids.shape[1] < 2 or not ids.shape[0]:
        raise UserError(f"calibration takes windows of at least 2 tokens, got a shape of {tuple(ids.shape)}")
    view = check_convertible(model)
    options: dict[str, Any] = {"retraction": retraction, "max_angle": max_angle}
    moves = measured_moves(view, ids)
    norms = input_norms(view, ids[:1])
    fold_error = _fold(view, norms, ids[:1])
    trial = shared_copy(model)
    rewire(trial, "geonorm", alphas=[1.0] * len(moves), **options)
    sublayers = tuple(calibrate(trial.eval(), ids, moves, method))
    rewire(model, "geonorm", alphas=[entry.alpha for entry in sublayers], learnable=learnable, **options)
    return Conversion(method, sublayers, fold_error)


def check_convertible(model: nn.Module) -> nn.Module:
    """Return a Pre-Norm view of a stock model that shares its weights.

    Raises:
        UserError: the model is rewired already, or its family is not Pre-Norm.
    """
    found = current_placement(model).name
    if is_rewired(model):
        raise UserError(f"this model is rewired to {found!r} already; convert the stock model")
    if found != "pre":
        raise UserError(
            f"cannot convert a {type(model).__name__}: it is wired as {found!r}; convert one wired as 'pre'"
        )
    return as_rewired(model)


def _fold(view: nn.Module, norms: Any, ids: Tensor) -> float:
    with torch.no_grad():
        before = _output(view, ids)
        fold(norms)
        with without_gains(norms):
            after = _output(view, ids)
    error = ((after - before).abs().max() / before.abs().max()).item()
    if not error <= _FOLDED.get(next(view.parameters()).dtype, _FOLDED_HALF):
        raise UserError(
            f"cannot convert a {type(view).__name__}: folding its gains changes its output by {error:.2g}, so "
            "something reads a norm that was not found"
        )
    return error


def _output(model: Any, ids: Tensor) -> Tensor:
    output = model(input_ids=ids, use_cache=False)
    return (output.logits if "logits" in output else output.last_hidden_state).float()
