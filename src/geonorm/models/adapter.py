"""What geonorm has to know about a family of models: where its parts are, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geonorm.errors import UserError
from geonorm.models.compat import forget_initialized
from geonorm.models.weights import WeightView, unsplit
from geonorm.placements import Placement, create
from geonorm.placements.base import Role
from geonorm.placements.norm_kinds import NORM_KINDS

PRE_NORMS = {("attention", "input"): "input_layernorm", ("mlp", "input"): "post_attention_layernorm"}
LLAMA_ROLES: dict[str, Role] = {
    r"embed_tokens\.weight": "embedding",
    r"self_attn\.q_proj\.weight": "query",
    r"self_attn\.k_proj\.weight": "key",
    r"self_attn\.v_proj\.weight": "value",
    r"self_attn\.o_proj\.weight": "attention_output",
    r"mlp\.gate_proj\.weight": "mlp_input",
    r"mlp\.up_proj\.weight": "mlp_up",
    r"mlp\.down_proj\.weight": "mlp_output",
    r"lm_head\.weight": "head",
    r"norm\.weight": "norm",
}


class Classes(NamedTuple):
    """The four classes of a family: configuration, block, model without a head, model with a language-model head."""

    config: type[Any]
    block: type[Any]
    model: type[Any]
    causal_lm: type[Any]


@dataclasses.dataclass(frozen=True)
class Adapter:
    """One family. The defaults are Llama's layout, which most families have.

    Attributes:
        stock: the family's own classes.
        rewired: ours, made from them.
        note: what is special, in a few words, for the table in the docs.
        stock_placement: placement that the stock block wires, from the configuration.
        blocks, final_norm: attributes of the base model (the one without a head).
        attention, mlp: attributes of a block.
        norms: attribute of a block that holds the stock norm of ``(sub-layer, slot)``.
        unit_gain: weight at which a norm's gain is 1.
        roles: pattern, matched at the end of a parameter name, to the weight's role.
        fused: pattern to a function of weight and configuration that splits a fused weight, or turns one that is stored
            as ``[in, out]``; see :mod:`geonorm.models.weights`.
        update: what the stock block does to a sub-layer's output before it adds it, such as dropout, as a function of
            block, sub-layer and output. It counts as part of the sub-layer in every placement.
        without: arguments of the stock block that must be None and are not handed to the attention.
        check: raises a UserError for a configuration that cannot be rewired.
    """

    stock: Classes
    rewired: Classes
    note: str = ""
    stock_placement: Callable[[Any], Placement] = lambda config: create("pre")
    blocks: str = "layers"
    final_norm: str = "norm"
    attention: str = "self_attn"
    mlp: str = "mlp"
    norms: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=lambda: PRE_NORMS)
    unit_gain: float = 1.0
    roles: Mapping[str, Role] = dataclasses.field(default_factory=lambda: LLAMA_ROLES)
    fused: Mapping[str, Callable[[Tensor, Any], list[WeightView]]] = dataclasses.field(default_factory=dict)
    update: Callable[[Any, str, Tensor], Tensor] = lambda block, sublayer, output: output
    without: tuple[str, ...] = ()
    check: Callable[[Any], None] = lambda config: None

    @property
    def family(self) -> str:
        """The ``model_type`` of the stock configuration."""
        return self.stock.config.model_type

    def views(self, name: str, parameter: Tensor, config: Any) -> list[WeightView] | None:
        """A parameter by role, most often one view; None if no pattern matches its name."""
        for pattern, view in self.fused.items():
            if re.search(rf"(^|\.)({pattern})$", name):
                return view(parameter, config)
        for pattern, role in self.roles.items():
            if re.search(rf"({pattern})$", name):
                return unsplit(parameter, role)
        return None

    def norm_name(self, sublayer: str, slot: str) -> str:
        """Attribute of a block for the norm in a slot: the stock name where the stock block has one there."""
        return self.norms.get((sublayer, slot), f"{sublayer}_{slot}_norm")

    @torch.no_grad()
    def make_norm(self, stock: nn.Module, kind: str | None = None) -> nn.Module:
        """Make a fresh norm with gain 1, like a stock one in class, eps, dtype and device, or of another kind."""
        if kind is not None:
            gain: Any = next(stock.parameters())
            return NORM_KINDS[kind](gain.shape[0]).to(device=gain.device, dtype=gain.dtype)
        norm: Any = copy.deepcopy(stock)
        norm.weight.fill_(self.unit_gain)
        if getattr(norm, "bias", None) is not None:
            norm.bias.zero_()
        forget_initialized(norm)
        return norm


# Filled by geonorm.models.families.
ADAPTERS: list[Adapter] = []


def supported_families() -> list[str]:
    """Names of the supported families: the ``model_type`` of their stock configurations."""
    return [adapter.family for adapter in ADAPTERS]


def adapter_for(model: nn.Module) -> Adapter:
    """Return the adapter of a model, stock or rewired.

    Raises:
        UserError: the model's class is not one that a family names; says what to do and lists the supported families.
    """
    kind, config = own_class(model), getattr(model, "config", None)
    for adapter in ADAPTERS:
        if any(kind in (classes.model, classes.causal_lm) for classes in (adapter.stock, adapter.rewired)):
            return adapter
    name = f"a {type(model).__name__}"
    for adapter in ADAPTERS:
        if type(config) in (adapter.stock.config, adapter.rewired.config):
            wanted = f"{adapter.stock.causal_lm.__name__} or {adapter.stock.model.__name__}"
            raise UserError(f"cannot rewire {name}; load it as {wanted} and rewire that")
    raise _unsupported(name, config)


def adapter_for_config(config: Any) -> Adapter:
    """Return the adapter of a configuration, stock or rewired.

    Raises:
        UserError: like :func:`adapter_for`.
    """
    for adapter in ADAPTERS:
        if type(config) in (adapter.stock.config, adapter.rewired.config):
            return adapter
    raise _unsupported(f"a model of type {config.model_type!r}", config)


def is_rewired(model: nn.Module) -> bool:
    """Whether a model of a supported family has one of our classes, whatever its configuration says.

    Raises:
        UserError: like :func:`adapter_for`.
    """
    rewired = adapter_for(model).rewired
    return own_class(model) in (rewired.model, rewired.causal_lm)


def own_class(model: nn.Module) -> type[nn.Module]:
    """Class of a model; ``fully_shard`` puts a class of its own before it."""
    kind = type(model)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def config_placement(config: Any) -> Placement:
    """Return the placement that a configuration of ours names."""
    return create(config.placement, **(config.placement_options or {}))


def _unsupported(name: str, config: Any) -> UserError:
    known = ", ".join(supported_families())
    if getattr(config, "is_encoder_decoder", False):
        return UserError(f"cannot rewire {name}: it has an encoder; take a decoder of a supported family: {known}")
    return UserError(
        f"cannot rewire {name}; take a decoder of a supported family ({known}), or use geonorm.placements.Wiring in a "
        "model of your own"
    )
