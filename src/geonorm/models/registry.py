"""The table of families, filled by the files in ``families/``."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from torch import nn

from geonorm.errors import UserError
from geonorm.models.adapter import Adapter
from geonorm.models.peft_tables import register_with_peft
from geonorm.placements import Placement, create

ADAPTERS: list[Adapter] = []


def register_families() -> None:
    """Read every file in ``families/`` and make its classes known to transformers, and its type to peft."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from geonorm.models import families

    for info in pkgutil.iter_modules(families.__path__):
        adapter = importlib.import_module(f"{families.__name__}.{info.name}").ADAPTER
        config = adapter.rewired.config
        adapter.rewired.block.adapter = adapter
        AutoConfig.register(config.model_type, config)
        AutoModel.register(config, adapter.rewired.model)
        AutoModelForCausalLM.register(config, adapter.rewired.causal_lm)
        ADAPTERS.append(adapter)
    register_with_peft(supported_families())


def supported_families() -> list[str]:
    """Names of the supported families: the ``model_type`` of their stock configurations."""
    return [adapter.family for adapter in ADAPTERS]


def adapter_for(model: nn.Module) -> Adapter:
    """Return the adapter of a model, stock or rewired.

    Raises:
        UserError: the model's class is not one that a family names; says what to do and lists the supported families.
    """
    for adapter in ADAPTERS:
        if any(_own_class(model) in (classes.model, classes.causal_lm) for classes in (adapter.stock, adapter.rewired)):
            return adapter
    raise UserError(_refusal(model))


def is_rewired(model: nn.Module) -> bool:
    """Whether a model of a supported family has one of our classes, whatever its configuration says.

    Raises:
        UserError: like :func:`adapter_for`.
    """
    rewired = adapter_for(model).rewired
    return _own_class(model) in (rewired.model, rewired.causal_lm)


def _own_class(model: nn.Module) -> type[nn.Module]:
    """Class of a model; ``fully_shard`` puts a class of its own before it."""
    kind = type(model)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def adapter_for_config(config: Any) -> Adapter:
    """Return the adapter of a configuration, stock or rewired.

    Raises:
        UserError: like :func:`adapter_for`.
    """
    for adapter in ADAPTERS:
        if type(config) in (adapter.stock.config, adapter.rewired.config):
            return adapter
    raise UserError(_unsupported(f"a model of type {config.model_type!r}", config))


def _refusal(model: nn.Module) -> str:
    config: Any = getattr(model, "config", None)
    name = f"a {type(model).__name__}"
    for adapter in ADAPTERS:
        if type(config) in (adapter.stock.config, adapter.rewired.config):
            wanted = (adapter.stock.causal_lm, adapter.stock.model)
            return f"cannot rewire {name}; load it as {' or '.join(kind.__name__ for kind in wanted)} and rewire that"
    return _unsupported(name, config)


def _unsupported(name: str, config: Any) -> str:
    known = ", ".join(supported_families())
    if getattr(config, "is_encoder_decoder", False):
        return f"cannot rewire {name}: it has an encoder; take a decoder of a supported family: {known}"
    return (
        f"cannot rewire {name}; take a decoder of a supported family ({known}), or use geonorm.placements.Wiring in a "
        "model of your own"
    )


def config_placement(config: Any) -> Placement:
    """Return the placement that a configuration of ours names."""
    return create(config.placement, **(config.placement_options or {}))
