"""Our classes, made from the stock ones: ``MistralModel`` becomes ``GeonormMistralModel``, which has a placement."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import initialization

from geonorm.errors import UserError
from geonorm.import_hook import PREFIX
from geonorm.models.adapter import Classes, adapter_for, config_placement
from geonorm.models.blocks import RewiredBlock
from geonorm.models.init import init_parameter, init_weights
from geonorm.models.inside import has_inside
from geonorm.models.rewiring import install
from geonorm.models.saving import model_card, write_card
from geonorm.placements import create
from geonorm.placements.connection import Branch


class RewiredConfigMixin:
    """Adds ``placement`` and ``placement_options`` to a stock configuration.

    The options are stored in full, so that a saved model keeps its meaning when a default changes. In these
    configurations ``initializer_range`` is the standard deviation at width 768; a model of width d starts from
    ``initializer_range * sqrt(768 / d)``.
    """

    placement: str
    placement_options: dict[str, Any] | None

    def __post_init__(self, **kwargs: Any) -> None:
        chosen = create(self.placement, **(self.placement_options or {}))
        self.placement_options = chosen.options()
        super().__post_init__(**kwargs)  # type: ignore[misc]


class RewiredModelMixin:
    """Rewires a stock model at the end of its construction and draws its weights by the init policy."""

    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        assert isinstance(self, nn.Module)
        adapter = adapter_for(self)
        adapter.check(config)
        install(self, adapter, config_placement(config))
        if not any(parameter.is_meta for parameter in self.parameters()):
            init_weights(self)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the parameters of one module that a checkpoint did not have; transformers calls this."""
        assert isinstance(self, nn.Module)
        prefix = next((name for name, child in self.named_modules() if child is module), None)
        if not isinstance(prefix, str):
            return
        if any(True for _ in module.buffers(recurse=False)):
            # Buffers that are not saved, such as rotary frequencies, are the stock class's business.
            super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, Branch) and module.period is not None:
            initialization.zeros_(module.training_step)
        for name, parameter in module.named_parameters(recurse=False):
            init_parameter(self, f"{prefix}.{name}" if prefix else name, parameter, initialization)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize as transformers does; refused where the placement has a scale for each token."""
        if has_inside(self.get_output_embeddings()):  # type: ignore[attr-defined]
            name = self.config.placement
            raise UserError(f"placement {name!r} has a scale for each token; choose the vocabulary before rewiring")
        return super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Save as transformers does, and write a model card beside the weights; a card of the user's own is kept."""
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)  # type: ignore[misc]
        # transformers only logs a mistake such as a file in the folder's place.
        if is_main_process and os.path.isdir(save_directory):
            write_card(Path(save_directory), lambda: f"{model_card(self)}\n")  # type: ignore[arg-type]


def rewired_classes(module: str, stock: Classes) -> Classes:
    """Make the classes that add a placement to a family's stock classes.

    Args:
        module: name of the module that has the result as attributes of the same names, ``Geonorm`` before the stock
            name, so that the classes can be imported and pickled.
        stock: the family's own classes.
    """

    def subclass(mixin: type, parent: type[Any], **fields: Any) -> type[Any]:
        fields |= {"__module__": module, "__doc__": f"``{parent.__name__}`` with a placement."}
        name = f"Geonorm{parent.__name__}"
        return types.new_class(name, (mixin, parent), exec_body=lambda namespace: namespace.update(fields))

    config = subclass(
        RewiredConfigMixin,
        stock.config,
        model_type=f"{PREFIX}{stock.config.model_type}",
        placement="geonorm",
        placement_options=None,
        # transformers makes a dataclass of every configuration class.
        __annotations__={"placement": str, "placement_options": dict[str, Any] | None},
    )
    block = subclass(RewiredBlock, stock.block)
    own = {"config_class": config, "_no_split_modules": [block.__name__]}
    models = (subclass(RewiredModelMixin, kind, **own) for kind in (stock.model, stock.causal_lm))
    return Classes(config, block, *models)
