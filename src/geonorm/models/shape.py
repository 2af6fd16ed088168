"""A fresh model of a family from its shape."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from geonorm.errors import UserError, check_count, unknown
from geonorm.models.adapter import ADAPTERS, Adapter, supported_families
from geonorm.models.init import init_weights


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """Shape of the decoder: rotary positions, gated MLP and untied head unless its family has them otherwise.

    Attributes:
        hidden_size: width of the stream.
        num_layers: number of layers.
        num_heads: attention heads; ``hidden_size`` is a multiple of it.
        intermediate_size: inner width of the MLP; None for 8/3 of ``hidden_size`` rounded up to a multiple of 8.
    """

    hidden_size: int = 128
    num_layers: int = 8
    num_heads: int = 4
    intermediate_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads"):
            check_count(name, getattr(self, name))
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"`hidden_size` {self.hidden_size} is not divisible by `num_heads` {self.num_heads}; take a hidden size"
                f" such as {-(-self.hidden_size // self.num_heads) * self.num_heads}"
            )
        if self.hidden_size // self.num_heads % 2:
            raise UserError(
                f"`hidden_size` / `num_heads` is {self.hidden_size // self.num_heads}, and rotary positions need an"
                " even head size"
            )
        if self.intermediate_size is not None:
            check_count("intermediate_size", self.intermediate_size)

    @property
    def inner(self) -> int:
        """Inner width of the MLP."""
        return self.intermediate_size or -(-8 * self.hidden_size // 24) * 8


def build_model(
    shape: ModelShape,
    placement: str,
    options: dict[str, Any],
    *,
    vocab_size: int,
    length: int,
    seed: int,
    eos_id: int | None = None,
    family: str = "llama",
    **config: Any,
) -> Any:
    """Make a model with a language-model head; its weights depend on seed, family, shape and placement alone.

    Args:
        shape: see :class:`ModelShape`.
        placement: name; options: of the placement.
        vocab_size: number of ids; length: longest input, in tokens.
        seed: torch's global generator starts from it and is left where drawing ended.
        eos_id: id of the end-of-text token, which also begins a text.
        family: one of :func:`geonorm.models.supported_families`.
        config: further fields of the family's configuration.

    Raises:
        UserError: unknown family, placement or option, or a shape that the family does not have.
    """
    adapter = family_adapter(family)
    shaped = {**_fields(adapter.rewired.config(), shape, length), "vocab_size": vocab_size}
    ends = {"bos_token_id": eos_id, "eos_token_id": eos_id, "pad_token_id": None}
    made = adapter.rewired.config(placement=placement, placement_options=options, **{**shaped, **ends, **config})
    model = adapter.rewired.causal_lm(made)
    torch.manual_seed(seed)
    return init_weights(model)


def _fields(default: Any, shape: ModelShape, length: int) -> dict[str, Any]:
    """Fields of a family's configuration for a shape; ``default`` tells which of them the family has."""
    head = shape.hidden_size // shape.num_heads
    fields: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "max_position_embeddings": length,
        "n_inner" if hasattr(default, "n_inner") else "intermediate_size": shape.inner,
    }
    # Their defaults belong to the size that the family was published in.
    further = {
        "num_key_value_heads": shape.num_heads,
        "head_dim": head,
        "query_pre_attn_scalar": head,
        "original_max_position_embeddings": length,
    }
    return fields | {name: value for name, value in further.items() if hasattr(default, name)}


def family_adapter(family: str) -> Adapter:
    """Return the adapter of a family by its name.

    Raises:
        UserError: unknown name.
    """
    for adapter in ADAPTERS:
        if adapter.family == family:
            return adapter
    raise unknown("family", family, supported_families())
