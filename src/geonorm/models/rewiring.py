"""Rewire a Hugging Face decoder: its own modules, our connections."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

from geonorm.errors import UserError
from geonorm.models.adapter import Adapter
from geonorm.models.blocks import rewire_block
from geonorm.models.init import init_weights
from geonorm.models.registry import adapter_for, config_placement
from geonorm.placements import Placement, Site, create

Model = TypeVar("Model", bound=nn.Module)


def rewire(model: Model, placement: str | Placement, *, init: bool = False, **options: Any) -> Model:
    """Give a model another placement, in place.

    The model's attention, MLP, embeddings and head are kept, weights included; norms that the placement does not use
    are removed and norms that it needs are added with gain 1. The model's class becomes one that ``save_pretrained``
    and ``AutoModelForCausalLM.from_pretrained`` know, with the placement in its configuration. Rewiring to the
    placement that the stock model has (:func:`stock_placement`) changes no bit of its logits.

    Args:
        model: a decoder of a supported family, with or without a language-model head.
        placement: a name from :func:`geonorm.placements.available`, or a placement.
        init: draw all weights anew by the placement's init rules (see :func:`geonorm.models.init_weights`); the
            configuration's ``initializer_range`` then counts as the standard deviation at width 768.
        options: the placement's options.

    Returns:
        The same model object.

    Raises:
        UserError: unsupported class, unknown placement or option, or a model that was already rewired otherwise.
    """
    chosen = create(placement, **options)
    adapter = adapter_for(model)
    config: Any = model.config
    if type(config) is adapter.rewired.config:
        current = config_placement(config)
        if current != chosen:
            raise UserError(
                f"this model is already rewired to {current.label()}; load the stock model again to make it "
                f"{chosen.label()}"
            )
        return init_weights(model) if init else model
    # Before anything is touched: options that do not fit the depth.
    chosen.connection(Site(config.num_hidden_layers, "mlp", config.num_hidden_layers))
    adapter.check(config)
    new = copy.deepcopy(config)
    new.__class__ = adapter.rewired.config
    new.placement, new.placement_options = chosen.name, chosen.options()
    # Another model may share the configuration object, so this one gets a copy everywhere it is held.
    for module in model.modules():
        if getattr(module, "config", None) is config:
            module.config = new
    install(model, adapter, chosen)
    return init_weights(model) if init else model


def stock_placement(model: nn.Module) -> Placement:
    """Return the placement that the stock class of a model's family wires, for a stock or a rewired model.

    Rewiring a stock model to it changes no bit of the logits.

    Raises:
        UserError: unsupported class.
    """
    return adapter_for(model).stock_placement(model.config)


def current_placement(model: nn.Module) -> Placement:
    """Return the placement that a model has now: the one it was rewired to, or that of its stock class.

    Raises:
        UserError: unsupported class.
    """
    adapter, config = adapter_for(model), model.config
    return config_placement(config) if type(config) is adapter.rewired.config else adapter.stock_placement(config)


def base_model(model: nn.Module) -> nn.Module:
    """Return the decoder without its head (the model itself where it has none)."""
    return getattr(model, model.base_model_prefix, model)  # type: ignore[arg-type]


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a supported model, first to last.

    Raises:
        UserError: unsupported class.
    """
    return list(getattr(base_model(model), adapter_for(model).blocks))


def install(model: nn.Module, adapter: Adapter, placement: Placement) -> None:
    """Rewire the parts of a model whose configuration already is one of ours."""
    inner = base_model(model)
    layers = getattr(inner, adapter.blocks)
    for index, block in enumerate(layers):
        rewire_block(block, adapter, placement, Site(index + 1, "attention", len(layers)))
    if not placement.final_norm:
        setattr(inner, adapter.final_norm, nn.Identity())
    if inner is not model:
        _set_class(model, adapter.rewired.causal_lm)
    _set_class(inner, adapter.rewired.model)


def _set_class(model: nn.Module, kind: type) -> None:
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    model.__class__ = kind
    # transformers looks up what it may record by the class that a model was constructed with.
    _CAN_RECORD_REGISTRY[model] = kind._can_record_outputs  # type: ignore[index, attr-defined]
    # What must stay on one device is collected by name when a model is constructed.
    model._no_split_modules = set(kind._no_split_modules)  # type: ignore[assignment, attr-defined]
