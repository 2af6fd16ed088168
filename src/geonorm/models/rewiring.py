"""Rewire a Hugging Face decoder: its own modules, our connections."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, TypeVar

from torch import nn

from geonorm.errors import UserError
from geonorm.models.adapter import Adapter, adapter_for, config_placement, is_rewired
from geonorm.models.blocks import RewiredBlock, rewire_block
from geonorm.models.compat import set_model_class
from geonorm.models.init import init_weights
from geonorm.models.inside import install_inside_head
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

    Whatever goes wrong, the model stays as it was: class, configuration, modules, hooks and weights. Quantised weights
    are kept as they are, so ``init`` is refused for them.

    Raises:
        UserError: unsupported class, unknown placement or option, a model that was already rewired otherwise or in
            part, blocks that are wrapped or carry a forward of their own, or ``init`` of weights that cannot be drawn.
    """
    chosen = create(placement, **options)
    adapter = adapter_for(model)
    if is_rewired(model):
        _check_blocks(model, adapter.rewired.block)
        current = config_placement(model.config)
        if current != chosen:
            raise UserError(
                f"this model is already rewired to {current.label()}; load the stock model again to make it "
                f"{chosen.label()}"
            )
        return init_weights(model) if init else model
    _check_blocks(model, adapter.stock.block)
    _check_forwards(model, adapter)
    config: Any = model.config
    adapter.check(config)
    with _unchanged_on_failure(model):
        new = copy.deepcopy(config)
        new.__class__ = adapter.rewired.config
        # What was read from a file holds its type once more.
        vars(new).pop("model_type", None)
        new.placement, new.placement_options = chosen.name, chosen.options()
        # Another model may share the configuration object, so this one gets a copy everywhere it is held.
        for module in model.modules():
            if getattr(module, "config", None) is config:
                module.config = new
        install(model, adapter, chosen)
        if init:
            init_weights(model)
    return model


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
    return config_placement(config) if is_rewired(model) else adapter.stock_placement(config)


def shared_copy(model: Model) -> Model:
    """Return a copy of a model, modules of its own around the very same weights and buffers."""
    return copy.deepcopy(model, {id(weight): weight for weight in (*model.parameters(), *model.buffers())})


def as_rewired(model: nn.Module) -> nn.Module:
    """Return a rewired model with the same placement that shares the weights of ``model`` and leaves it as it is.

    Raises:
        UserError: unsupported class.
    """
    placement, view = current_placement(model), shared_copy(model)
    if not is_rewired(view):
        rewire(view, placement)
    return view.eval()


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
    inner: Any = base_model(model)
    layers = getattr(inner, adapter.blocks)
    for index, block in enumerate(layers):
        site = Site(index + 1, "attention", len(layers), inner.config.hidden_size)
        rewire_block(block, adapter, placement, site, inner.config)
    if not placement.final_norm:
        setattr(inner, adapter.final_norm, nn.Identity())
    elif placement.norm is not None:
        setattr(inner, adapter.final_norm, adapter.make_norm(getattr(inner, adapter.final_norm), placement.norm))
    if inner is not model:
        install_inside_head(model, placement)
        set_model_class(model, adapter.rewired.causal_lm)
    set_model_class(inner, adapter.rewired.model)


def _check_blocks(model: nn.Module, kind: type[nn.Module]) -> None:
    layers, expected = blocks(model), model.config.num_hidden_layers  # type: ignore[union-attr]
    name = type(model).__name__
    for index, block in enumerate(layers):
        if type(block) is kind:
            continue
        if issubclass(kind, RewiredBlock) != isinstance(block, RewiredBlock):
            raise UserError(f"this {name} is rewired in part (layer {index + 1} differs); load the stock model again")
        raise UserError(
            f"cannot rewire this {name}: layer {index + 1} is a {type(block).__name__}, not a {kind.__name__}; rewire "
            "it before it is sharded or its layers are replaced"
        )
    if len(layers) != expected or len(set(map(id, layers))) != expected:
        raise UserError(
            f"cannot rewire this {name}: it has {len(set(map(id, layers)))} different layers where its configuration "
            f"has num_hidden_layers={expected}; make the two agree"
        )


def _check_forwards(model: nn.Module, adapter: Adapter) -> None:
    """Refuse a forward that is set on a module itself, because it would go on instead of that of the new class."""
    for block in blocks(model):
        for module in (block, *(block.get_submodule(name) for name in adapter.norms.values())):
            held = vars(module).get("forward")
            if held is not None and getattr(held, "__func__", None) is not type(module).forward:
                raise UserError(
                    f"cannot rewire this {type(model).__name__}: the forward of a {type(module).__name__} was replaced,"
                    " as accelerate's hooks do; rewire the model before it is spread over devices, or take them off"
                    " (accelerate.hooks.remove_hook_from_module(model, recurse=True))"
                )


@contextlib.contextmanager
def _unchanged_on_failure(model: nn.Module) -> Iterator[None]:
    """Give every module its class, attributes, children and hooks back if the block fails; no weight is copied."""
    saved = [
        (module, type(module), dict(vars(module)), {k: dict(v) for k, v in vars(module).items() if isinstance(v, dict)})
        for module in model.modules()
    ]
    try:
        yield
    except BaseException:
        for module, kind, attributes, contents in saved:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in contents.items():
                # The same dictionary, because the handles of hooks know it.
                attributes[name].clear()
                attributes[name].update(content)
        raise
