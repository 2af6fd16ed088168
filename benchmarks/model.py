"""The Llama that the benchmarks train, stock and with each placement, and its matrix products alone."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common import Settings
from geonorm.errors import UserError
from geonorm.models import rewire
from geonorm.training.validation import autocast

HEAD = 64
LR = 1e-5
STOCK = "stock"
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}
ATTENTION = "scaled_dot_product"


@dataclasses.dataclass(frozen=True)
class ModelSettings(Settings):
    """A benchmark of whole models: heads of 64, gated MLP, no biases."""

    width: int | None = None
    """Width of the stream, a multiple of 64."""
    mlp: int | None = None
    """Width inside the MLP."""
    layers: int | None = None
    """Number of layers."""
    vocab: int | None = None
    """Tokens that the head tells apart; a large one hides what the placements cost."""
    batch: int | None = None
    """Sequences in a batch."""
    tokens: int | None = None
    """Tokens in a sequence."""
    precision: Literal["fp32", "bf16"] | None = None
    """float32, or bfloat16 autocast over float32 weights."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model and its batch."""

    width: int
    mlp: int
    layers: int
    vocab: int
    batch: int
    tokens: int
    precision: str

    def __str__(self) -> str:
        size = f"width {self.width}, {self.layers} layers, MLP {self.mlp}, vocabulary {self.vocab}"
        return f"{size}, {self.batch} x {self.tokens} tokens, {self.precision}"


SIZES: dict[str, dict[str, Any]] = {
    "cpu": dataclasses.asdict(Shape(512, 1376, 12, 4096, 4, 256, "fp32")),
    "cuda": dataclasses.asdict(Shape(1024, 2752, 12, 32000, 16, 1024, "bf16")),
    "quick": dataclasses.asdict(Shape(64, 128, 2, 64, 2, 8, "fp32")),
}


def shape_of(settings: ModelSettings) -> Shape:
    """Sizes named by filled settings.

    Raises:
        UserError: the width does not split into heads of 64.
    """
    shape = Shape(*(getattr(settings, field.name) for field in dataclasses.fields(Shape)))
    if shape.width % HEAD:
        raise UserError(f"`width` must be a multiple of {HEAD}, the width of a head, got {shape.width}")
    return shape


def build(name: str, shape: Shape, device: str) -> LlamaForCausalLM:
    """A Llama from seed 0: ``"stock"``, or rewired to a placement with the same weights."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.width // HEAD,
        vocab_size=shape.vocab,
        max_position_embeddings=max(shape.tokens, 32),
    )
    model = LlamaForCausalLM(config).to(device)
    return model if name == STOCK else rewire(model, name)


def make_batch(shape: Shape, device: str) -> Tensor:
    """Token ids ``[batch, tokens]``."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, shape.vocab, (shape.batch, shape.tokens), generator=generator).to(device)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The optimiser, with PyTorch's own choice of loops; the rate is small because the figures are times."""
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)


def loss_of(model: Callable[..., Any], ids: Tensor, precision: str) -> Tensor:
    """Mean cross entropy of the next token."""
    with autocast(ids.device, precision):
        return model(input_ids=ids, labels=ids, use_cache=False).loss


class _Record(TorchDispatchMode):
    """Keeps every matrix product that passes, and the fused attention, with its operands."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[Any, tuple, dict]] = []
        self.attention: list[tuple[Any, tuple, dict]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name in PRODUCTS:
            self.products.append((func, args, kwargs))
        elif ATTENTION in name:
            self.attention.append((func, args, kwargs))
        return func(*args, **kwargs)


def record_products(
    model: nn.Module, ids: Tensor, precision: str
) -> tuple[Callable[[], None], Callable[[], None], int]:
    """Functions that repeat the matrix products, and the attention, of one forward and backward; number of products.

    They work on the very operands, layouts included, which stay in memory. Attention is a fused operation with its own
    products inside, so it stands apart.
    """
    with _Record() as record:
        loss_of(model, ids, precision).backward()
    model.zero_grad(set_to_none=True)

    def repeat(calls: list[tuple[Any, tuple, dict]]) -> Callable[[], None]:
        @torch.no_grad()
        def again() -> None:
            for func, args, kwargs in calls:
                func(*args, **kwargs)

        return again

    return repeat(record.products), repeat(record.attention), len(record.products)
