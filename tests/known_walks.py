"""A stock model whose every sub-layer turns every token by an angle that is set beforehand."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH = 8
SPECIAL_TOKEN = 1


class Constant(nn.Module):
    """Gives every token the same update, whatever it reads; as an attention it also returns weights."""

    def __init__(self, update: torch.Tensor, attention: bool) -> None:
        super().__init__()
        self.update = nn.Parameter(update)
        self.attention = attention

    def forward(self, hidden_states, **kwargs):
        output = self.update.expand_as(hidden_states)
        return (output, None) if self.attention else output


def known_walk(turns, radii) -> LlamaForCausalLM:
    """A stock Llama that turns the stream by ``turns[k]`` radians and brings its RMS from ``radii[k]`` to the next.

    Args:
        turns: angle of every sub-layer, attention before MLP, two a layer.
        radii: RMS of the stream before each sub-layer and after the last: one more than ``turns``.
    """
    num_layers = len(turns) // 2
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=WIDTH,
            intermediate_size=8,
            num_hidden_layers=num_layers,
            num_attention_heads=2,
            vocab_size=32,
            max_position_embeddings=64,
        )
    ).double()
    headings = [0.0]
    for turn in turns:
        headings.append(headings[-1] + turn)
    points = []
    for heading, radius in zip(headings, radii, strict=True):
        point = torch.zeros(WIDTH, dtype=torch.float64)
        point[0], point[1] = math.cos(heading), math.sin(heading)
        points.append(radius * math.sqrt(WIDTH) * point)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(points[0].expand(32, -1))
        model.model.embed_tokens.weight[SPECIAL_TOKEN] *= 100
    for index, block in enumerate(model.model.layers):
        block.self_attn = Constant(points[2 * index + 1] - points[2 * index], attention=True)
        block.mlp = Constant(points[2 * index + 2] - points[2 * index + 1], attention=False)
    return model.eval()
