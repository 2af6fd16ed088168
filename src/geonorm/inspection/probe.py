"""Watching the sub-layers of a rewired model: what each is given, what it returns, where the stream goes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from geonorm import geometry
from geonorm.models import blocks
from geonorm.models.blocks import connection_name
from geonorm.models.weights import full_tensor
from geonorm.placements import Site
from geonorm.placements.base import SUBLAYERS


@dataclasses.dataclass(frozen=True)
class Move:
    """What one sub-layer did to the stream in one forward pass; all ``[batch, tokens, d]``, without gradient.

    Attributes:
        x: the point before.
        update: what the placement combines with it: the sub-layer's output, after a norm on the output if there is one.
        y: the point after.
    """

    x: Tensor
    update: Tensor
    y: Tensor


@contextlib.contextmanager
def watched(model: nn.Module, observe: Callable[[Site, Move], None]) -> Iterator[None]:
    """While open, each forward pass of a rewired model reports every sub-layer, in the order they run.

    Args:
        model: a rewired model.
        observe: is given the site and the move; sites are ``block.site`` with the sub-layer's name.
    """
    handles = []
    for block in blocks(model):
        for sublayer in SUBLAYERS:
            site = dataclasses.replace(block.site, sublayer=sublayer)  # type: ignore[type-var]
            handles += _watch(block, site, observe)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(block: Any, site: Site, observe: Callable[[Site, Move], None]) -> list[Any]:
    connection = block.get_submodule(connection_name(site.sublayer))
    updates: list[Tensor] = []

    def listen(module: nn.Module, args: tuple) -> tuple:
        stream, call, norms = args
        updates.clear()
        if "output" in norms:
            norms = {**norms, "output": _listened(norms["output"], updates)}
        else:
            call = _listened(call, updates)
        return stream, call, norms

    def report(module: nn.Module, args: tuple, output: Any) -> None:
        point = block.placement.point_of
        observe(site, Move(point(args[0]).detach(), updates.pop(), point(output).detach()))

    return [connection.register_forward_pre_hook(listen), connection.register_forward_hook(report)]


def _listened(function: Callable[[Tensor], Tensor], heard: list[Tensor]) -> Callable[[Tensor], Tensor]:
    def call(h: Tensor) -> Tensor:
        output = function(h)
        heard.append(output.detach())
        return output

    return call


@contextlib.contextmanager
def recorded_angles(model: nn.Module) -> Iterator[dict[str, list[float]]]:
    """While open, each forward pass writes the median angle over tokens, in radians, of every sub-layer.

    Yields:
        ``{"attention": [...], "mlp": [...]}``, one number a layer, filled by the latest forward pass.
    """
    angles = {sublayer: [float("nan")] * len(blocks(model)) for sublayer in SUBLAYERS}

    def record(site: Site, move: Move) -> None:
        theta = geometry.angle(move.x.float(), move.y.float())
        angles[site.sublayer][site.layer - 1] = theta.median().item()

    with watched(model, record):
        yield angles


def gradient_norms(model: nn.Module) -> list[float]:
    """Gradient norm of each block's parameters, first to last, after a backward pass and before clipping."""
    return block_norms(model, {id(p): p.grad for p in model.parameters()})


def block_norms(model: nn.Module, gradients: dict[int, Tensor | None]) -> list[float]:
    """Norm over each block's parameters, first to last, of gradients given by the ``id`` of their parameter."""
    totals = []
    for block in blocks(model):
        found = [gradient for p in block.parameters() if (gradient := gradients.get(id(p))) is not None]
        totals.append(sum((g.detach().float().square().sum() for g in found), torch.zeros(())))
    # Gradients of a model cut over ranks are DTensors, and so are their sums.
    return torch.stack([full_tensor(total) for total in totals]).sqrt().tolist()
