"""What geonorm has to know about a family of models: where its parts are, and nothing else."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from geonorm.errors import UserError
from geonorm.placements import Placement, create
from geonorm.placements.base import Role


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Names of one family.

    Attributes:
        family: the ``model_type`` of the stock configuration.
        stock: stock classes by part: ``"block"``, ``"model"``, ``"causal_lm"``.
        rewired: our classes by the same parts, and ``"config"``.
        blocks, final_norm: attributes of the base model (the one without a head).
        attention, mlp: attributes of a block.
        norms: attribute of a block that holds the stock norm of ``(sub-layer, slot)``.
        roles: pattern, matched at the end of a parameter name, to the weight's role.
    """

    family: str
    stock: Mapping[str, type[Any]]
    rewired: Mapping[str, type[Any]]
    blocks: str
    final_norm: str
    attention: str
    mlp: str
    norms: Mapping[tuple[str, str], str]
    roles: Mapping[str, Role]

    def role(self, name: str) -> Role | None:
        """Role of a parameter by its name, or None if no pattern matches."""
        for pattern, role in self.roles.items():
            if re.search(rf"(^|\.)({pattern})$", name):
                return role
        return None

    def norm_name(self, sublayer: str, slot: str) -> str:
        """Attribute of a block for the norm in a slot: the stock name where the stock block has one there."""
        return self.norms.get((sublayer, slot), f"{sublayer}_{slot}_norm")

    def make_norm(self, block: nn.Module, config: Any) -> nn.Module:
        """Make a fresh norm of the kind that the family uses."""
        kind = type(getattr(block, next(iter(self.norms.values()))))
        return kind(config.hidden_size, eps=config.rms_norm_eps)


ADAPTERS: list[Adapter] = []


def register(adapter: Adapter) -> None:
    """Add a family to the table and its classes to transformers' automatic ones."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    config = adapter.rewired["config"]
    AutoConfig.register(config.model_type, config)
    AutoModel.register(config, adapter.rewired["model"])
    AutoModelForCausalLM.register(config, adapter.rewired["causal_lm"])
    ADAPTERS.append(adapter)


def supported_families() -> list[str]:
    """Names of the supported families."""
    return [adapter.family for adapter in ADAPTERS]


def adapter_for(model: nn.Module) -> Adapter:
    """Return the adapter of a model, stock or rewired.

    Raises:
        UserError: the model's class is not one that a family names; lists the supported families.
    """
    for adapter in ADAPTERS:
        classes = [table[part] for table in (adapter.stock, adapter.rewired) for part in ("model", "causal_lm")]
        if _own_class(model) in classes:
            return adapter
    raise UserError(
        f"cannot rewire a {type(model).__name__}; supported families: {', '.join(supported_families())} "
        "(decoder with or without a language-model head)"
    )


def _own_class(model: nn.Module) -> type[nn.Module]:
    """Class of a model; ``fully_shard`` puts a class of its own before it."""
    kind = type(model)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def config_placement(config: Any) -> Placement:
    """Return the placement that a configuration of ours names."""
    return create(config.placement, **(config.placement_options or {}))
