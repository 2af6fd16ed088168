"""Perplexity by a strided window, against a loop that scores one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from geonorm import UserError
from geonorm.evaluation import perplexity
from geonorm.evaluation.score_text import windows_of
from geonorm.models import rewire
from tiny_models import TEXT, tiny_llama, tiny_tokenizer
from tolerances import EPS

DOCUMENTS = [TEXT[:120], "a", "  \n", "One more.", TEXT[:40][::-1]]
SAME = 64 * EPS[torch.float32]


def one_by_one(model, tokenizer, documents, length, stride) -> tuple[float, int, int]:
    """Score each token with the context that the docstring promises; nothing is batched and nothing is shared."""
    total, tokens, size = 0.0, 0, 0
    for text in documents:
        if not text.strip():
            continue
        ids = [tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        for place in range(1, len(ids)):
            # The first window that reaches this token begins at a multiple of the stride.
            begin = stride * max(0, math.ceil((place - length) / stride))
            context = torch.tensor([ids[begin:place]])
            assert min(place, length - stride + 1) <= context.shape[1] <= length
            with torch.no_grad():
                logits = model(input_ids=context).logits[0, -1]
            total -= logits.double().log_softmax(-1)[ids[place]].item()
        tokens += len(ids) - 1
        size += len(text.encode())
    return total, tokens, size


@pytest.mark.parametrize(("length", "stride"), [(16, 8), (16, 16), (7, 3), (5, 1), (60, 30)])
def test_strided_window_equals_one_token_at_a_time(length, stride):
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    if stride == length:
        rewire(model, "geonorm").eval()
    total, tokens, size = one_by_one(model, tokenizer, DOCUMENTS, length, stride)
    for batch in (1, 4):
        found = perplexity(model, tokenizer, DOCUMENTS, length=length, stride=stride, batch=batch)
        assert (found.num_documents, found.num_tokens, found.num_bytes, found.num_unknown) == (4, tokens, size, 0)
        assert found.loss == pytest.approx(total / tokens, rel=SAME)
        assert found.perplexity == pytest.approx(math.exp(total / tokens), rel=16 * SAME)
        assert found.bits_per_byte == pytest.approx(total / math.log(2) / size, rel=SAME)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 17, 24, 39])
@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (1, 1)])
def test_every_token_is_scored_once(size, length, stride):
    ids = list(range(100, 100 + size))
    scored = []
    for window in windows_of(ids, 7, length, stride):
        assert 0 < window.scored <= len(window.targets) == len(window.inputs) <= length
        sequence = [7, *ids]
        at = sequence.index(window.inputs[0])
        assert window.inputs == sequence[at : at + len(window.inputs)]
        assert window.targets == sequence[at + 1 : at + 1 + len(window.inputs)]
        scored += window.targets[-window.scored :]
    assert scored == ids


def test_the_mode_of_the_model_is_kept_and_defaults_fit_the_model():
    model, tokenizer = tiny_llama(max_position_embeddings=64).train(), tiny_tokenizer()
    found = perplexity(model, tokenizer, [TEXT])
    assert model.training
    assert (found.length, found.stride) == (64, 32)


def test_what_cannot_be_scored():
    model, tokenizer = tiny_llama(), tiny_tokenizer()
    for settings, pattern in (
        ({"length": 257}, "`length` 257 is more than the 256 positions of the model"),
        ({"length": 8, "stride": 9}, "`stride` 9 would leave tokens between windows of `length` 8 unscored"),
        ({"length": 0}, "`length` must be a whole number of at least 1"),
        ({"batch": 0}, "`batch` must be"),
    ):
        with pytest.raises(UserError, match=pattern):
            perplexity(model, tokenizer, [TEXT], **settings)
    with pytest.raises(UserError, match="no document with text"):
        perplexity(model, tokenizer, ["", " "])
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="neither a BOS nor an EOS token"):
        perplexity(model, tokenizer, [TEXT])


def test_a_loss_that_is_no_number_is_not_called_infinite():
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    found = perplexity(model, tiny_tokenizer(), [TEXT], length=16)
    assert math.isnan(found.loss)
    assert math.isnan(found.perplexity)
