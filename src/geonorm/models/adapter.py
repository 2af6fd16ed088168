"""What geonorm has to know about a family of models: where its parts are, and nothing else."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from geonorm.models.weights import Part, whole
from geonorm.placements import Placement, create
from geonorm.placements.base import Role

PRE_NORMS = {("attention", "input"): "input_layernorm", ("mlp", "input"): "post_attention_layernorm"}
SANDWICH_NORMS = {
    ("attention", "input"): "input_layernorm",
    ("attention", "output"): "post_attention_layernorm",
    ("mlp", "input"): "pre_feedforward_layernorm",
    ("mlp", "output"): "post_feedforward_layernorm",
}
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


def pre_norm(config: Any) -> Placement:
    """The stock placement of most families."""
    return create("pre")


def accept(config: Any) -> None:
    """Every configuration of most families can be rewired."""


def as_returned(block: Any, sublayer: str, output: Tensor) -> Tensor:
    """Most stock blocks add what the sub-layer returns."""
    return output


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
        parts: pattern to a function that splits a fused weight, or turns a weight that is stored as ``[in, out]``;
            see :mod:`geonorm.models.weights`.
        update: what the stock block does to a sub-layer's output before it adds it, such as dropout. It counts as part
            of the sub-layer in every placement.
        without: arguments of the stock block that must be None and are not handed to the attention.
        check: raises a UserError for a configuration that cannot be rewired.
    """

    stock: Classes
    rewired: Classes
    note: str = ""
    stock_placement: Callable[[Any], Placement] = pre_norm
    blocks: str = "layers"
    final_norm: str = "norm"
    attention: str = "self_attn"
    mlp: str = "mlp"
    norms: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=lambda: PRE_NORMS)
    unit_gain: float = 1.0
    roles: Mapping[str, Role] = dataclasses.field(default_factory=lambda: LLAMA_ROLES)
    parts: Mapping[str, Callable[[Tensor, Any], list[Part]]] = dataclasses.field(default_factory=dict)
    update: Callable[[Any, str, Tensor], Tensor] = as_returned
    without: tuple[str, ...] = ()
    check: Callable[[Any], None] = accept

    @property
    def family(self) -> str:
        """The ``model_type`` of the stock configuration."""
        return self.stock.config.model_type

    def parts_of(self, name: str, parameter: Tensor, config: Any) -> list[Part] | None:
        """Parts of a parameter by role, most often one; None if no pattern matches its name."""
        for pattern, split in self.parts.items():
            if re.search(rf"(^|\.)({pattern})$", name):
                return split(parameter, config)
        for pattern, role in self.roles.items():
            if re.search(rf"({pattern})$", name):
                return whole(parameter, role)
        return None

    def norm_name(self, sublayer: str, slot: str) -> str:
        """Attribute of a block for the norm in a slot: the stock name where the stock block has one there."""
        return self.norms.get((sublayer, slot), f"{sublayer}_{slot}_norm")

    @torch.no_grad()
    def make_norm(self, block: nn.Module) -> nn.Module:
        """Make a fresh norm with gain 1, like the stock block's in class, eps, dtype and device."""
        norm = copy.deepcopy(getattr(block, next(iter(self.norms.values()))))
        norm.weight.fill_(self.unit_gain)
        if getattr(norm, "bias", None) is not None:
            norm.bias.zero_()
        # The mark that transformers sets on what it has initialised.
        vars(norm).pop("_is_hf_initialized", None)
        return norm
