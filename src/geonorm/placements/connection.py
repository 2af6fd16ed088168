"""The modules that a placement makes: connections around sub-layers, its exit, and what every connection can have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from geonorm.errors import check_count

Sublayer = Callable[[Tensor], Tensor]
Norms = Mapping[str, Callable[[Tensor], Tensor]]


@dataclasses.dataclass(frozen=True)
class Normal:
    """Start of a parameter that is drawn: a normal distribution of mean 0 with this standard deviation."""

    std: float


class Learned(nn.Module):
    """A module of a placement's own: its parameters are no weights of a role, each has a start of its own."""

    def initial_value(self, name: str) -> float | Normal:
        """Start of the parameter with this name: a constant, or how it is drawn."""
        raise NotImplementedError(f"{type(self).__name__} does not say how {name!r} starts")

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Bring every parameter to its start; those that are drawn take from torch's global generator."""
        for name, parameter in self.named_parameters(recurse=False):
            start = self.initial_value(name)
            parameter.normal_(0.0, start.std) if isinstance(start, Normal) else parameter.fill_(start)


def as_given(like: Tensor) -> torch.autocast:
    """Without autocast, whose bfloat16 products would round the stream: arithmetic in the operands' dtype."""
    return torch.autocast(like.device.type, enabled=False)


class Connection(Learned):
    """One connection of the stream around one sub-layer.

    ``forward(stream, sublayer, norms)`` returns the next stream. ``norms`` maps each slot of the placement to its
    module: the connection does not own them, so a model keeps the names its norms always had. What a connection adds to
    the stream goes through ``self.branch`` just before it is added.
    """

    branch: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Identity()

    def forward(self, stream: Any, sublayer: Sublayer, norms: Norms) -> Any:
        """Return the stream after the sub-layer."""
        raise NotImplementedError("a connection defines forward")


class Exit(Learned):
    """The end of a stream, where a function without norms and parameters does not do."""

    def forward(self, stream: Any, norms: Norms) -> Tensor:
        """Return ``[..., d]``."""
        raise NotImplementedError("an exit defines forward")


class Branch(Learned):
    """What multiplies the addend of one sub-layer: a learnable gain, a warm-up over training steps, or both.

    Args:
        width: number of gains, 1 or one a channel; None for no gain.
        start: their start.
        period: number of training steps in which the factor grows from 0 to 1; None for always 1.

    Attributes:
        training_step: the step that is being taken, counted from 1; 0 before training. Saved with the weights.
    """

    training_step: Tensor

    def __init__(self, width: int | None, start: float, period: int | None) -> None:
        super().__init__()
        self.start, self.period = start, period
        self.gain = None if width is None else nn.Parameter(torch.full((width,), start))
        if period is not None:
            self.register_buffer("training_step", torch.zeros(1, dtype=torch.int64))

    def initial_value(self, name: str) -> float:
        """All gains start alike."""
        return self.start

    def forward(self, addend: Tensor) -> Tensor:
        """Return the addend ``[..., d]``, multiplied."""
        if self.gain is not None:
            addend = self.gain * addend
        if self.period is not None:
            addend = addend * (self.training_step / self.period).clamp(max=1.0).to(addend.dtype)
        return addend


class EntrySkip(Connection):
    """A connection on a stream that has its entry beside it: ``[..., 2, d]``, x and x_0.

    Within a layer the two are a pair, because x may be one itself there.
    """

    def __init__(self, inner: Connection, mixes: bool) -> None:
        super().__init__()
        self.inner = inner
        self.stream_scale = nn.Parameter(torch.ones(1)) if mixes else None
        self.entry_scale = nn.Parameter(torch.zeros(1)) if mixes else None

    def initial_value(self, name: str) -> float:
        """The stream as it is, nothing of the entry."""
        return {"stream_scale": 1.0, "entry_scale": 0.0}[name]

    def forward(self, stream: Any, sublayer: Sublayer, norms: Norms) -> Any:
        """Mix x with x_0 before a layer, then do what the inner connection does."""
        if self.stream_scale is None or self.entry_scale is None:
            x, entry = stream
            return torch.stack((self.inner(x, sublayer, norms), entry), -2)
        x, entry = stream.unbind(-2)
        return self.inner(self.stream_scale * x + self.entry_scale * entry, sublayer, norms), entry


def set_training_step(model: nn.Module, step: int) -> None:
    """Tell every connection with a warm-up (option ``warm_depth``) which training step is being taken, counted from 1.

    geonorm's own loop does; a loop of your own calls it before each step.

    Raises:
        UserError: the step is no whole number of at least 0, which stands for the time before training.
    """
    check_count("step", step, 0)
    for module in model.modules():
        if isinstance(module, Branch) and module.period is not None:
            module.training_step.fill_(step)
