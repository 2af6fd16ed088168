"""What a placement changes inside a sub-layer: modules on what projections return and on rotated queries and keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from geonorm.errors import UserError
from geonorm.models.adapter import Adapter
from geonorm.models.compat import with_heads
from geonorm.placements import Learned, Placement


class _Inside:
    """A projection whose output goes through the module ``inside``; its weight keeps its name."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inside(super().forward(*args, **kwargs))  # type: ignore[misc, attr-defined]


class InsideLinear(_Inside, nn.Linear):
    """A linear map with a module after it."""


class InsideConv1D(_Inside, Conv1D):
    """GPT-2's linear map with a module after it."""


_KINDS: dict[type, type[nn.Module]] = {nn.Linear: InsideLinear, Conv1D: InsideConv1D}


def install_inside(block: nn.Module, adapter: Adapter, placement: Placement, config: Any) -> None:
    """Put the placement's modules into the sub-layers of a stock block, in place.

    Raises:
        UserError: a module is for a part of a fused weight, or for a projection that is no plain linear map.
    """
    if type(placement).inside is Placement.inside:
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, module in list(block.named_modules()):
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and not weight.is_floating_point():
            raise UserError(f"placement {placement.name!r} works on what {name} returns, whose weight is quantised")
        views = adapter.views(f"{name}.weight", weight, config) if isinstance(weight, Tensor) else None
        for view in views or []:
            made = placement.inside(view.role, view.shape[0], config.hidden_size, head_dim)
            if made is None:
                continue
            if len(views or []) > 1:
                raise UserError(
                    f"placement {placement.name!r} works on the {view.role} projection, and {adapter.family} keeps "
                    f"{', '.join(view.role for view in views or [])} in one weight ({name}); take a family with a "
                    "weight for each"
                )
            attach(module, made, name)
    attention = block.get_submodule(adapter.attention)
    heads = placement.inside("heads", config.num_attention_heads * head_dim, config.hidden_size, head_dim)
    if heads is not None:
        with_heads(attention, _like(heads, next(attention.parameters())))


def install_inside_head(model: Any, placement: Placement) -> None:
    """Put the placement's module on the logits of a model with a language-model head, in place."""
    head = model.get_output_embeddings()
    if head is not None:
        made = placement.inside("head", head.weight.shape[0], head.weight.shape[1], 0)
        if made is not None:
            attach(head, made, "the head")


def attach(module: nn.Module, inside: Learned, name: str) -> None:
    """Let what a projection returns go through ``inside``.

    Raises:
        UserError: the projection is no plain linear map, such as a quantised one.
    """
    if type(module) not in _KINDS:
        raise UserError(f"cannot work on what {name} returns: it is a {type(module).__name__}, no plain linear map")
    module.add_module("inside", _like(inside, module.weight))  # type: ignore[arg-type]
    module.__class__ = _KINDS[type(module)]


def has_inside(module: Any) -> bool:
    """Whether a projection has a module after it."""
    return isinstance(module, _Inside)


def _like(module: Learned, tensor: Tensor) -> Learned:
    return module.to(device=tensor.device, dtype=tensor.dtype)
