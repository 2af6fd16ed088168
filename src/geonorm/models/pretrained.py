"""Mix-ins that turn a stock configuration and model class into one that carries a placement."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import initialization

from geonorm.models.adapter import adapter_for, config_placement
from geonorm.models.init import init_parameter, init_weights
from geonorm.models.rewiring import install
from geonorm.placements import create


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
        install(self, adapter_for(self), config_placement(config))
        if not any(parameter.is_meta for parameter in self.parameters()):
            init_weights(self)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the parameters of one module that a checkpoint did not have; transformers calls this."""
        assert isinstance(self, nn.Module)
        prefix = next((name for name, child in self.named_modules() if child is module), None)
        if prefix is None or not isinstance(prefix, str):
            return
        own = list(module.named_parameters(recurse=False))
        for name, parameter in own:
            init_parameter(self, f"{prefix}.{name}" if prefix else name, parameter, initialization)
        if not own:
            # Buffers, such as rotary frequencies, are the stock class's business.
            super()._init_weights(module)  # type: ignore[misc]
