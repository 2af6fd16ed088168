"""What each layer does: the angle it moves the stream by, and the gradient it gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from geonorm import geometry
from geonorm.models import blocks
from geonorm.models.blocks import connection_name
from geonorm.placements.base import SUBLAYERS
from geonorm.training.parallel import whole


def gradient_norms(model: nn.Module) -> list[float]:
    """Gradient norm of each block's parameters, first to last, after a backward pass and before clipping."""
    totals = [
        sum((p.grad.detach().float().square().sum() for p in block.parameters() if p.grad is not None), torch.zeros(()))
        for block in blocks(model)
    ]
    return torch.stack([whole(torch.as_tensor(total)) for total in totals]).sqrt().tolist()


@contextlib.contextmanager
def recorded_angles(model: nn.Module) -> Iterator[dict[str, list[float]]]:
    """While open, each forward pass writes the median angle over tokens, in radians, of every sub-layer.

    Yields:
        ``{"attention": [...], "mlp": [...]}``, one number a layer, filled by the latest forward pass.
    """
    layers: list[Any] = blocks(model)
    angles = {sublayer: [float("nan")] * len(layers) for sublayer in SUBLAYERS}
    handles = []
    for index, block in enumerate(layers):
        for sublayer in SUBLAYERS:

            def record(
                module: nn.Module, args: tuple, output: Any, sublayer: str = sublayer, index: int = index
            ) -> None:
                point = layers[index].placement.point
                angles[sublayer][index] = _median_angle(point(args[0]), point(output))

            handles.append(block.get_submodule(connection_name(sublayer)).register_forward_hook(record))
    try:
        yield angles
    finally:
        for handle in handles:
            handle.remove()


def _median_angle(x: Tensor, y: Tensor) -> float:
    return geometry.angle(x.detach().float(), y.detach().float()).median().item()
