"""Norm gains folded into the weights that read the norm, so that a sub-layer can read a bare point of the sphere."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from geonorm.errors import UserError
from geonorm.inspection import Move, watched
from geonorm.models import blocks
from geonorm.placements import Site, unit_rms

# A norm's input far above its eps: what comes out of it is the gain.
_FAR_ABOVE_EPS = 1e4
_SAME = 1e-2


@dataclasses.dataclass
class InputNorm:
    """The norm that one sub-layer reads through, as a factor on the unit point: ``N(x) = factor * unit_rms(x)``.

    Attributes:
        norm: the module.
        gain: its gain, ``[d]``.
        shrink: median over tokens of what its eps takes away, ``sqrt(m / (m + eps))`` with m the mean square of x.
        readers: modules that read its output.
    """

    norm: nn.Module
    gain: Tensor
    shrink: float = 1.0
    readers: list[nn.Module] = dataclasses.field(default_factory=list)

    @property
    def factor(self) -> Tensor:
        """What the readers' columns are to be multiplied by, ``[d]``."""
        return self.gain * self.shrink


def input_norms(model: nn.Module, ids: Tensor) -> dict[tuple[int, str], InputNorm]:
    """Find every sub-layer's input norm and what reads it, by running a model that is wired as ``pre``.

    Args:
        model: a rewired model with placement ``pre``.
        ids: ``[batch, tokens]``.

    Returns:
        One entry a sub-layer, by ``(layer, sub-layer)``.

    Raises:
        UserError: a norm that is no RMSNorm, or that is read by something other than linear layers.
    """
    found: dict[tuple[int, str], InputNorm] = {}
    handles = []
    for block in blocks(model):
        for sublayer, slots in block.slots.items():  # type: ignore[union-attr, operator]
            norm = block.get_submodule(slots["input"])
            entry = found[block.site.layer, sublayer] = InputNorm(norm, _gain(norm, _width(model)))  # type: ignore
            handles += _watch_readers(block, entry)
    shrinks: dict[tuple[int, str], float] = {}

    def measure(site: Site, move: Move) -> None:
        entry = found[site.layer, site.sublayer]
        shrinks[site.layer, site.sublayer] = _shrink(entry, move.x)

    try:
        with watched(model, measure), torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    for (layer, sublayer), entry in found.items():
        entry.shrink = shrinks[layer, sublayer]
        if not entry.readers or not all(_is_linear(reader) for reader in entry.readers):
            kinds = sorted({_kind(reader) for reader in entry.readers}) or ["nothing that was found"]
            raise UserError(
                f"cannot convert a {type(model).__name__}: its gains can be folded into plain linear layers alone, "
                f"and the norm before {sublayer} {layer} is read by {', '.join(kinds)}"
            )
    return found


@torch.no_grad()
def fold(norms: dict[tuple[int, str], InputNorm]) -> None:
    """Multiply the columns of every reader by the factor of the norm that it reads, in place."""
    for entry in norms.values():
        for reader in entry.readers:
            weight: Any = reader.weight
            factor = entry.factor if isinstance(reader, nn.Linear) else entry.factor[:, None]
            weight.copy_((weight.float() * factor).to(weight.dtype))


@contextlib.contextmanager
def without_gains(norms: dict[tuple[int, str], InputNorm]) -> Iterator[None]:
    """While open, every norm gives out what it would without its factor: with folded weights, the old function."""

    def divide(factor: Tensor) -> Any:
        inverse = torch.where(factor == 0, 0.0, 1 / factor)
        return lambda module, args, output: (output.float() * inverse).to(output.dtype)

    handles = [entry.norm.register_forward_hook(divide(entry.factor)) for entry in norms.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _width(model: Any) -> int:
    return model.config.hidden_size


@torch.no_grad()
def _gain(norm: nn.Module, width: int) -> Tensor:
    like = next(norm.parameters(), torch.empty(0))
    # Signs in turn: an RMSNorm gives the gain with these signs, a LayerNorm gives 0 for a constant row.
    rows = torch.full((2, width), _FAR_ABOVE_EPS, device=like.device, dtype=torch.float32)
    rows[1, ::2] *= -1
    constant, signed = norm(rows.to(like.dtype)).float()
    if not torch.allclose(constant * rows[1].sign(), signed, rtol=_SAME, atol=1e-6):
        raise UserError(
            f"cannot convert a model with {type(norm).__name__}: it takes the mean away or adds a bias, and a point of "
            "the sphere has neither; only models with RMSNorm can be converted"
        )
    return constant


def _shrink(entry: InputNorm, x: Tensor) -> float:
    wide = x.float()
    given = entry.norm(x).float()
    full = entry.gain * unit_rms(wide)
    ratio = given.square().sum(-1) / full.square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    return math.sqrt(ratio.median().item())


def _watch_readers(block: nn.Module, entry: InputNorm) -> list[Any]:
    # Held, not only its address, so that nothing else can come to lie there.
    given: list[Tensor] = []

    def remember(module: nn.Module, args: tuple, output: Tensor) -> None:
        given[:] = [output]

    def compare(module: nn.Module, args: tuple, kwargs: dict) -> None:
        read = any(_is_same(value, tensor) for value in (*args, *kwargs.values()) for tensor in given)
        if read and module not in entry.readers:
            entry.readers.append(module)

    weighted = [module for module in block.modules() if next(module.parameters(recurse=False), None) is not None]
    return [
        entry.norm.register_forward_hook(remember),
        *(
            module.register_forward_pre_hook(compare, with_kwargs=True)
            for module in weighted
            if module is not entry.norm
        ),
    ]


def _is_same(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.data_ptr() == tensor.data_ptr() and value.numel() == tensor.numel()


def _kind(module: nn.Module) -> str:
    weight = getattr(module, "weight", None)
    return type(module).__name__ + ("" if type(weight) is nn.Parameter else f" with a {type(weight).__name__}")


def _is_linear(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    # Neither a subclass nor a tensor class of another kind: what they hold may be quantised.
    return type(module) in (nn.Linear, Conv1D) and type(module.weight) is nn.Parameter
