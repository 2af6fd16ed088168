"""One init policy for all placements, and the audit of it."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from geonorm.errors import UserError
from geonorm.models.adapter import Adapter, adapter_for, config_placement, is_rewired
from geonorm.models.compat import is_from_checkpoint
from geonorm.models.constraint import normalize_weights
from geonorm.models.weights import WeightView, unsplit
from geonorm.placements import Learned, Normal, Placement, base_std, set_training_step
from geonorm.placements.base import WEIGHT_ROLES

Model = TypeVar("Model", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class InitRow:
    """One parameter in the audit, or one part of a fused one.

    Attributes:
        name: the parameter's name, with the role in brackets where a fused weight has several.
        role: what it does.
        shape: ``(out, in)`` of a linear map, however it is stored; else the parameter's shape.
        std, mean: of the values now.
        expected_std: by the placement's rule; 0 for constants (norm gains, biases, step sizes).
    """

    name: str
    role: str
    shape: tuple[int, ...]
    std: float
    expected_std: float
    mean: float


def init_weights(model: Model) -> Model:
    """Draw every weight of a rewired model anew, in place, from torch's global generator.

    Base standard deviation ``initializer_range * sqrt(768 / width)``, times the gain that the placement gives to the
    weight's role; gains of norms 1, biases 0, parameters of a connection at their start, a warm-up by depth (option
    ``warm_depth``) before its first step. Draws follow the order of ``named_parameters()``, what a placement learns
    last, so with one seed every placement starts from the same draws up to their scale.

    Raises:
        UserError: the model is not a rewired one, a parameter has no known role, or one cannot be drawn because it is
            quantised. No weight is changed then.
    """
    # What a placement learns comes last: its draws must not shift those of the weights.
    named = sorted(model.named_parameters(), key=lambda item: isinstance(owner_of(model, item[0]), Learned))
    for name, parameter in named:
        _check_drawable(model, name, parameter)
    with torch.no_grad():
        for name, parameter in named:
            init_parameter(model, name, parameter, nn.init)
    normalize_weights(model)
    set_training_step(model, 0)
    return model


def _check_drawable(model: nn.Module, name: str, parameter: Tensor) -> None:
    adapter, placement = _rewired(model)
    # A quantised weight either has another dtype or is a tensor class that holds others; so is a sharded one.
    holds_others = hasattr(type(parameter), "__tensor_flatten__") and not isinstance(parameter, DTensor)
    if not parameter.is_floating_point() or holds_others or parameter.is_inference():
        kind = type(parameter.data).__name__ if holds_others else str(parameter.dtype).removeprefix("torch.")
        raise UserError(
            f"the weights of this {type(model).__name__} cannot be drawn anew: {name} is "
            f"{'an inference tensor' if parameter.is_inference() else f'quantised ({kind})'}; load the model "
            "without that, or keep its weights"
        )
    for part in _views(model, adapter, name, parameter):
        if part.role in WEIGHT_ROLES:
            _expected_std(model, placement, name, part)


def init_parameter(model: nn.Module, name: str, parameter: Tensor, initializers: Any) -> None:
    """Draw one parameter of a rewired model, given its name there.

    ``initializers`` offers ``normal_``, ``zeros_`` and ``constant_``: ``torch.nn.init``, or transformers' own, which
    leave a parameter alone that came from a checkpoint.
    """
    adapter, placement = _rewired(model)
    # transformers marks the parameter; a view of it does not carry the mark.
    if initializers is not nn.init and is_from_checkpoint(parameter):
        return
    for part in _views(model, adapter, name, parameter):
        if part.role == "norm":
            initializers.constant_(part.view, adapter.unit_gain)
        elif part.role == "bias":
            initializers.zeros_(part.view)
        elif part.role == "step":
            leaf = name.rpartition(".")[2]
            start = owner_of(model, name).initial_value(leaf)
            if isinstance(start, Normal):
                initializers.normal_(part.view, 0.0, start.std)
            else:
                initializers.constant_(part.view, start)
        else:
            initializers.normal_(part.view, 0.0, _expected_std(model, placement, name, part))


def init_report(model: nn.Module) -> list[InitRow]:
    """Audit a rewired model's weights against the init policy: one row a parameter, one a part of a fused weight.

    A freshly drawn weight with n elements has a sample standard deviation within about ``3 / sqrt(2 n)``, relative, of
    ``expected_std``.

    Raises:
        UserError: the model is not a rewired one, or a parameter has no known role.
    """
    adapter, placement = _rewired(model)
    rows = []
    for name, parameter in model.named_parameters():
        for part in _views(model, adapter, name, parameter):
            expected = _expected_std(model, placement, name, part)
            value = part.view.detach().double()
            std = value.std(correction=0).item() if value.numel() else math.nan
            label = f"{name}[{part.label}]" if part.label else name
            rows.append(InitRow(label, part.role, part.shape, std, expected, value.mean().item()))
    return rows


def _rewired(model: nn.Module) -> tuple[Adapter, Placement]:
    if not is_rewired(model):
        raise UserError(f"{type(model).__name__} is a stock model; call geonorm.models.rewire(model, placement) first")
    return adapter_for(model), config_placement(model.config)


def _views(model: nn.Module, adapter: Adapter, name: str, parameter: Tensor) -> list[WeightView]:
    if isinstance(owner_of(model, name), Learned):
        return unsplit(parameter, "step")
    if name.endswith("bias"):
        return unsplit(parameter, "bias")
    views = adapter.views(name, parameter, model.config)
    if views is None:
        raise UserError(f"parameter {name!r} of {type(model).__name__} has no known role in family {adapter.family}")
    return views


def owner_of(model: nn.Module, name: str) -> Any:
    """The module that holds the parameter with this name."""
    return model.get_submodule(name.rpartition(".")[0])


def _expected_std(model: nn.Module, placement: Placement, name: str, part: WeightView) -> float:
    config: Any = model.config
    if part.role == "step":
        start = owner_of(model, name).initial_value(name.rpartition(".")[2])
        return start.std if isinstance(start, Normal) else 0.0
    if part.role not in WEIGHT_ROLES:
        return 0.0
    if layer := re.search(rf"\b{adapter_for(model).blocks}\.(\d+)\.", name):
        placement = placement.at(int(layer[1]) + 1, config.num_hidden_layers)
    rule = placement.init_rule(part.role, config.num_hidden_layers)
    return rule.std(part.shape, base_std(config.hidden_size, config.initializer_range))
