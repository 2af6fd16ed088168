"""A stock block with the placement's connections around its own attention and MLP."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from geonorm.errors import UserError
from geonorm.models.inside import install_inside
from geonorm.placements import Placement, Site
from geonorm.placements.base import SUBLAYERS, Norms

if TYPE_CHECKING:
    from geonorm.models.adapter import Adapter


class RewiredBlock(nn.Module):
    """Mix-in over a stock block class: replaces its forward and keeps its attention and MLP.

    Being a subclass of the stock block keeps what transformers attaches by class: recorded hidden states, gradient
    checkpointing, sharding by block. The stream between two blocks is the output of a placement's second connection;
    the first block makes it and the last one closes it.
    """

    # Of the class, so that a copied or pickled block names its family instead of carrying it along.
    adapter: ClassVar[Adapter]
    placement: Placement
    site: Site
    slots: Mapping[str, Mapping[str, str]]
    parameters_of_stock: tuple[str, ...]

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Carry the stream through both sub-layers."""
        # Attention takes the same arguments in another order, so all but the first go by their names.
        arguments = {**dict(zip(self.parameters_of_stock, args, strict=False)), **kwargs}
        for name in self.adapter.without:
            if arguments.pop(name, None) is not None:
                raise UserError(f"{type(self).__name__} cannot take {name!r}: cross-attention has no place in it")
        stream = hidden_states
        if self.site.layer == 1:
            stream = self.placement.open(stream)
        for sublayer in SUBLAYERS:
            call = functools.partial(self._sublayer, sublayer, arguments if sublayer == "attention" else {})
            stream = getattr(self, connection_name(sublayer))(stream, call, self._norms(sublayer))
        if self.site.layer == self.site.num_layers:
            norms = {slot: getattr(self, exit_norm_name(slot)) for slot in self.placement.exit_norms}
            closed = self.placement.close(stream, getattr(self, "exit_module", None), norms)
            # FSDP2 hangs the start of the backward pass on what a block returns; a view can lose it, and it warns.
            return closed if self.placement.single_stream and not self.placement.entry_skip else closed.clone()
        return stream

    def _sublayer(self, sublayer: str, arguments: dict[str, Any], hidden_states: Tensor) -> Tensor:
        module = getattr(self, self.adapter.attention if sublayer == "attention" else self.adapter.mlp)
        output = module(hidden_states, **arguments)
        return self.adapter.update(self, sublayer, output[0] if isinstance(output, tuple) else output)

    def _norms(self, sublayer: str) -> Norms:
        return {slot: getattr(self, name) for slot, name in self.slots[sublayer].items()}


def connection_name(sublayer: str) -> str:
    """Attribute of a block that holds the connection around a sub-layer."""
    return f"{sublayer}_connection"


def exit_norm_name(slot: str) -> str:
    """Attribute of the last block that holds a norm of the placement's exit."""
    return f"exit_{slot}_norm"


def rewire_block(block: nn.Module, adapter: Adapter, placement: Placement, site: Site, config: Any) -> None:
    """Turn a stock block into a rewired one in place: class, connections, norms. Other weights stay as they are."""
    stock_norm = block.get_submodule(next(iter(adapter.norms.values())))
    # A norm's: the weights of the sub-layers may be quantised.
    like = next(stock_norm.parameters())
    slots = {sublayer: placement.slots(dataclasses.replace(site, sublayer=sublayer)) for sublayer in SUBLAYERS}
    fresh = {
        adapter.norm_name(sublayer, slot): adapter.make_norm(stock_norm, placement.norm)
        for sublayer in SUBLAYERS
        for slot in slots[sublayer]
        if (sublayer, slot) not in adapter.norms or placement.norm is not None
    }
    last = site.layer == site.num_layers
    if last:
        fresh |= {exit_norm_name(slot): adapter.make_norm(stock_norm, placement.norm) for slot in placement.exit_norms}
    install_inside(block, adapter, placement, config)
    for (sublayer, slot), name in adapter.norms.items():
        if slot not in slots[sublayer]:
            delattr(block, name)
    for name, norm in fresh.items():
        # In the place of a norm of the same name, which keeps the order of the parameters.
        block.add_module(name, norm)
    exit_module = placement.exit_module(config.hidden_size) if last else None
    # What is left of a hook that was taken off is the stock forward, which would go before that of the new class.
    vars(block).pop("forward", None)
    block.__class__ = adapter.rewired.block
    block.placement = placement  # type: ignore[assignment]
    block.site = site  # type: ignore[assignment]
    block.slots = {  # type: ignore[assignment]
        sublayer: {slot: adapter.norm_name(sublayer, slot) for slot in slots[sublayer]} for sublayer in SUBLAYERS
    }
    # Without `self` and `hidden_states`.
    names = tuple(inspect.signature(adapter.stock.block.forward).parameters)[2:]
    block.parameters_of_stock = names  # type: ignore[assignment]
    for sublayer in SUBLAYERS:
        connection = placement.connect(dataclasses.replace(site, sublayer=sublayer))
        block.add_module(connection_name(sublayer), connection.to(device=like.device, dtype=like.dtype))
    if exit_module is not None:
        block.add_module("exit_module", exit_module.to(device=like.device, dtype=like.dtype))
