"""Rewired models under torch.compile, in a pipeline and beside a tokenizer."""

from __future__ import annotations

import pytest
import torch

from family_models import VOCABULARY, prompts, rewired_model
from tolerances import SAME_LOGITS

PAIRS = [("llama", "geonorm"), ("gpt2", "post"), ("gemma3_text", "deepnorm"), ("gpt_neox", "parallel")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "placement"), PAIRS)
def test_compiled_models_give_the_same_logits_and_gradients(family, placement):
    model, ids = rewired_model(family, placement, dropout=0.0), prompts(2, 9)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    results = []
    for call in (model, compiled):
        model.zero_grad()
        logits = call(ids, use_cache=False).logits
        logits.square().mean().backward()
        results.append((logits, [parameter.grad.clone() for parameter in model.parameters()]))
    torch.testing.assert_close(results[1][0], results[0][0], atol=SAME_LOGITS, rtol=SAME_LOGITS)
    for one, two in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(two, one, atol=SAME_LOGITS, rtol=SAME_LOGITS)


def test_a_pipeline_and_a_tokenizer_beside_a_rewired_model(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, pipeline

    words = {f"w{index}": index for index in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", pad_token="w1").save_pretrained(tmp_path)
    rewired_model("qwen2", "geonorm").save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("w3 w5")["input_ids"] == [3, 5]
    generate = pipeline("text-generation", model=str(tmp_path), device="cpu")
    (answer,) = generate("w3 w5 w7", max_new_tokens=4, do_sample=False, return_full_text=False)
    assert len(answer["generated_text"].split()) == 4
