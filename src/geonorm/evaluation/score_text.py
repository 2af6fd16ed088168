"""Perplexity and bits per byte on text, by a strided window over each document."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from geonorm.errors import UserError, check_count
from geonorm.models.tokens import check_ids, check_length, cut, encode_plain, start_id

DEFAULT_LENGTH = 1024


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Result over all documents.

    Attributes:
        loss: mean nats a token.
        perplexity: ``exp(loss)``.
        bits_per_byte: bits for each UTF-8 byte of the documents.
        num_documents, num_tokens, num_bytes: what was scored; the start tokens are in none of them.
        num_unknown: tokens that stand for text the tokenizer cannot spell; with any, bits per byte is too low.
        length, stride: of the window.
    """

    loss: float
    perplexity: float
    bits_per_byte: float
    num_documents: int
    num_tokens: int
    num_bytes: int
    num_unknown: int
    length: int
    stride: int


@dataclasses.dataclass(frozen=True)
class Window:
    """Token ids ``inputs`` and, one place further, ``targets``, both as long; the last ``scored`` of them count."""

    inputs: Sequence[int]
    targets: Sequence[int]
    scored: int


def windows_of(ids: list[int], start: int, length: int, stride: int) -> Iterator[Window]:
    """Cut one document into windows that score each of its tokens once.

    With s = (start, ids...), window k reads ``s[k stride : k stride + length]``. The first scores every token that it
    predicts, each later one those that the one before did not reach: the last ``stride``, or fewer at the end of the
    document. So a token is scored with all of the document before it where that is less than ``length``, and otherwise
    with at least ``length - stride + 1`` tokens before it and at most ``length``.

    Args:
        ids: tokens of the document.
        start: id of the token that stands before the first.
        length: most tokens that a window reads.
        stride: how far the window moves, at most ``length``.
    """
    inputs = cut([start, *ids[:-1]], length, stride)
    for number, (read, targets) in enumerate(zip(inputs, cut(ids, length, stride), strict=True)):
        yield Window(read, targets, len(targets) - (length - stride if number else 0))


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    documents: Iterable[str],
    *,
    length: int | None = None,
    stride: int | None = None,
    batch: int = 4,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Perplexity:
    """Score every token of every document once.

    Each document stands alone: it is encoded as plain text, in which the spelling of a special token is text, and
    begins after the tokenizer's BOS token, or its EOS token where it has no BOS, so that its first token is scored too
    and no document sees another. Windows are cut as :func:`windows_of` says. Blank documents are left out. The loss is
    the sum of ``-log p(token)`` over the number of tokens, bits per byte the same sum over ``ln 2`` and the UTF-8 bytes
    of the documents, which makes models with different tokenizers comparable. Logits are taken to float32; sums are in
    float64. Short windows of a batch are filled up on the right, where causal attention cannot see it, so ``batch``
    changes nothing but speed, memory (``batch * length * vocabulary`` logits) and rounding.

    Args:
        model: a decoder with a language-model head; its mode is kept.
        tokenizer: its tokenizer.
        documents: texts.
        length: most tokens that a window reads; None for 1,024, or the model's own limit if that is lower.
        stride: how far the window moves: smaller gives every token more context and takes longer; None for half of
            ``length``.
        batch: windows at a time.
        advance: called after each document with its number of bytes.

    Raises:
        UserError: sizes that do not fit, a tokenizer without BOS and EOS, no document with text, a token that the model
            has no embedding for.
    """
    length, stride = check_window(model, length, stride)
    check_count("batch", batch)
    start = start_id(tokenizer)
    if start is None:
        raise UserError("the tokenizer has neither a BOS nor an EOS token to begin a document with; set one of them")
    counts = {"documents": 0, "tokens": 0, "bytes": 0, "unknown": 0}

    def cut() -> Iterator[Window]:
        for text in documents:
            if not text.strip():
                continue
            ids = encode_plain(tokenizer, text)
            check_ids(model, [start, *ids], f"document {counts['documents'] + 1}")
            counts["documents"] += 1
            counts["tokens"] += len(ids)
            num_bytes = len(text.encode("utf-8"))
            counts["bytes"] += num_bytes
            if tokenizer.unk_token_id is not None:
                counts["unknown"] += ids.count(tokenizer.unk_token_id)
            yield from windows_of(ids, start, length, stride)
            advance(num_bytes)

    total = 0.0
    was_training = model.training
    model.eval()
    try:
        rest = cut()
        while group := list(itertools.islice(rest, batch)):
            total += _score(model, group, start)
    finally:
        model.train(was_training)
    if not counts["tokens"]:
        raise UserError("no document with text to score; give files that have text in them")
    loss = total / counts["tokens"]
    return Perplexity(
        loss=loss,
        perplexity=math.inf if loss >= 700 else math.exp(loss),
        bits_per_byte=total / math.log(2) / counts["bytes"],
        **{f"num_{name}": count for name, count in counts.items()},
        length=length,
        stride=stride,
    )


def check_window(model: Any, length: int | None, stride: int | None) -> tuple[int, int]:
    """Return length and stride of the window, defaults filled in.

    Raises:
        UserError: a length beyond the model's positions, or a stride beyond the length.
    """
    length = check_length(model, length, DEFAULT_LENGTH)
    stride = max(1, length // 2) if stride is None else check_count("stride", stride)
    if stride > length:
        raise UserError(f"`stride` {stride} would leave tokens between windows of `length` {length} unscored")
    return length, stride


@torch.no_grad()
def _score(model: Any, group: list[Window], fill: int) -> float:
    device = next(model.parameters()).device
    longest = max(len(window.inputs) for window in group)

    def stacked(rows: list[Sequence[int]]) -> Tensor:
        return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows], device=device)

    logits = model(input_ids=stacked([window.inputs for window in group]), use_cache=False).logits
    total = 0.0
    for row, window in zip(logits, group, strict=True):
        here = slice(len(window.targets) - window.scored, len(window.targets))
        targets = torch.tensor(window.targets[here], device=device)
        total += functional.cross_entropy(row[here].float(), targets, reduction="none").double().sum().item()
    return total
