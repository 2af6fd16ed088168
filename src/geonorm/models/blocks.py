"""A stock block with the placement's connections around its own attention and MLP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from geonorm.models.adapter import Adapter
from geonorm.placements import Placement, Site
from geonorm.placements.base import SUBLAYERS, Norms


class RewiredBlock(nn.Module):
    """Mix-in over a stock block class: replaces its forward and keeps its attention and MLP.

    Being a subclass of the stock block keeps what transformers attaches by class: recorded hidden states, gradient
    checkpointing, sharding by block.
    """

    placement: Placement
    adapter: Adapter
    site: Site
    slots: Mapping[str, Mapping[str, str]]

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Carry the stream through both sub-layers; the first block makes it, the last one closes it."""
        stream = hidden_states
        if self.site.layer == 1:
            stream = self.placement.enter(stream)
        for sublayer in SUBLAYERS:
            call = self._sublayer(sublayer, args, kwargs)
            stream = self.get_submodule(connection_name(sublayer))(stream, call, self._norms(sublayer))
        if self.site.layer == self.site.num_layers:
            return self.placement.exit(stream)
        return stream

    def _sublayer(self, sublayer: str, args: tuple, kwargs: dict) -> Callable[[Tensor], Tensor]:
        if sublayer == "mlp":
            return getattr(self, self.adapter.mlp)
        return functools.partial(_first_output, getattr(self, self.adapter.attention), args, kwargs)

    def _norms(self, sublayer: str) -> Norms:
        return {slot: getattr(self, name) for slot, name in self.slots[sublayer].items()}


def _first_output(attention: nn.Module, args: tuple, kwargs: dict, hidden_states: Tensor) -> Tensor:
    output = attention(hidden_states, *args, **kwargs)
    return output[0] if isinstance(output, tuple) else output


def connection_name(sublayer: str) -> str:
    """Attribute of a block that holds the connection around a sub-layer."""
    return f"{sublayer}_connection"


def rewire_block(block: nn.Module, adapter: Adapter, placement: Placement, site: Site, config: Any) -> None:
    """Turn a stock block into a rewired one in place: class, connections, norms. Other weights stay as they are."""
    fresh = {
        adapter.norm_name(sublayer, slot): adapter.make_norm(block, config)
        for sublayer in SUBLAYERS
        for slot in placement.norms
        if (sublayer, slot) not in adapter.norms
    }
    like = next(block.parameters())
    for name, norm in fresh.items():
        block.add_module(name, norm.to(device=like.device, dtype=like.dtype))
    for (_, slot), name in adapter.norms.items():
        if slot not in placement.norms:
            delattr(block, name)
    block.__class__ = adapter.rewired["block"]
    block.adapter = adapter  # type: ignore[assignment]
    block.placement = placement  # type: ignore[assignment]
    block.site = site  # type: ignore[assignment]
    block.slots = {  # type: ignore[assignment]
        sublayer: {slot: adapter.norm_name(sublayer, slot) for slot in placement.norms} for sublayer in SUBLAYERS
    }
    for sublayer in SUBLAYERS:
        connection = placement.connection(Site(site.layer, sublayer, site.num_layers))
        block.add_module(connection_name(sublayer), connection.to(device=like.device, dtype=like.dtype))
