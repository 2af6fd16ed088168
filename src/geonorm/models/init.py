"""One init policy for all placements, and the audit of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from geonorm.errors import UserError
from geonorm.models.adapter import Adapter, adapter_for, config_placement
from geonorm.placements import base_std
from geonorm.placements.base import WEIGHT_ROLES, Placement, Role

Model = TypeVar("Model", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class InitRow:
    """One parameter in the audit: ``expected_std`` is 0 for constants (norm gains, biases, alpha)."""

    name: str
    role: str
    shape: tuple[int, ...]
    std: float
    expected_std: float
    mean: float


def init_weights(model: Model) -> Model:
    """Draw every weight of a rewired model anew, in place, from torch's global generator.

    Base standard deviation ``initializer_range * sqrt(768 / width)``, times the gain that the placement gives to the
    weight's role; norm gains 1, biases 0, learnable step sizes at their start. Draws follow the order of
    ``named_parameters()``, which differs between placements only by constants, so with one seed every placement starts
    from the same draws up to their scale.

    Raises:
        UserError: the model is not a rewired one, or a parameter has no known role.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_parameter(model, name, parameter, nn.init)
    return model


def init_parameter(model: nn.Module, name: str, parameter: Tensor, initializers: Any) -> None:
    """Draw one parameter of a rewired model, given its name there.

    ``initializers`` offers ``normal_``, ``ones_``, ``zeros_`` and ``constant_``: ``torch.nn.init``, or transformers'
    own, which leave a parameter alone that came from a checkpoint.
    """
    adapter, placement = _rewired(model)
    role = _role(model, adapter, name)
    if role == "norm":
        initializers.ones_(parameter)
    elif role == "bias":
        initializers.zeros_(parameter)
    elif role == "alpha":
        connection: Any = model.get_submodule(name.rpartition(".")[0])
        initializers.constant_(parameter, connection.initial_raw_alpha)
    else:
        rule = placement.init_rule(role, _num_layers(model))
        initializers.normal_(parameter, 0.0, rule.std(parameter.shape, _base(model)))


def init_report(model: nn.Module) -> list[InitRow]:
    """Audit a rewired model's weights against the init policy: one row a parameter.

    A freshly drawn weight with n elements has a sample standard deviation within about ``3 / sqrt(2 n)``, relative, of
    ``expected_std``.

    Raises:
        UserError: the model is not a rewired one, or a parameter has no known role.
    """
    adapter, placement = _rewired(model)
    rows = []
    for name, parameter in model.named_parameters():
        role = _role(model, adapter, name)
        expected = 0.0
        if role in WEIGHT_ROLES:
            expected = placement.init_rule(role, _num_layers(model)).std(parameter.shape, _base(model))
        value = parameter.detach().double()
        std = value.std(correction=0).item() if value.numel() else math.nan
        rows.append(InitRow(name, role, tuple(parameter.shape), std, expected, value.mean().item()))
    return rows


def _rewired(model: nn.Module) -> tuple[Adapter, Placement]:
    adapter = adapter_for(model)
    config: Any = model.config
    if type(config) is not adapter.rewired["config"]:
        raise UserError(f"{type(model).__name__} is a stock model; call geonorm.models.rewire(model, placement) first")
    return adapter, config_placement(config)


def _role(model: nn.Module, adapter: Adapter, name: str) -> Role:
    if name.endswith("raw_alpha"):
        return "alpha"
    if name.endswith("bias"):
        return "bias"
    if name.endswith("norm.weight"):
        return "norm"
    role = adapter.role(name)
    if role is None:
        raise UserError(f"parameter {name!r} of {type(model).__name__} has no known role in family {adapter.family}")
    return role


def _num_layers(model: nn.Module) -> int:
    return model.config.num_hidden_layers  # type: ignore[union-attr, return-value]


def _base(model: nn.Module) -> float:
    config: Any = model.config
    return base_std(config.hidden_size, config.initializer_range)
