"""Tiny language models on disk, with a tokenizer: stock, rewired, and as GGUF."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from geonorm.data.tokenizer import EOS, train_tokenizer

TEXT = (
    "The stream walks on a sphere, and each layer gives a direction. In 1984 a man's caf\u00e9 cost five pounds.\n"
    "It was the best of times, it was the worst of times; nobody knew which of the two.\n"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=train_tokenizer([TEXT], 300), eos_token=EOS, pad_token=EOS)


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    """A stock Llama whose gains are off 1; its vocabulary is that of the tiny tokenizer."""
    torch.manual_seed(seed)
    tokenizer = tiny_tokenizer()
    settings = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.1,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape))
    return model


def save(model, folder: Path) -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_gguf(model: LlamaForCausalLM, path: Path, lost: str = "") -> Path:
    """Write a stock Llama as llama.cpp's converter does, float32; the token spelt ``lost`` gets another name."""
    import gguf

    config, tokenizer = model.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["[lost]" if token == lost else token for token, _ in vocabulary])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_token_types([control if token == EOS else normal for token, _ in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in _merges(tokenizer)])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        number = next((number for part, number in heads.items() if part in name), None)
        if number is not None:
            weight = weight.view(number, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _merges(tokenizer: PreTrainedTokenizerFast) -> list:
    return json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
