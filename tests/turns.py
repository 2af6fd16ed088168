"""Records of prompts and completions and of conversations, and a tokenizer with a chat template."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from geonorm.data.tokenizer import EOS, train_tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|stop|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|stop|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def answers(count: int = 60, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of noise, each with an answer that is always the same."""
    chooser = random.Random(seed)
    noise = ("".join(chooser.choices("abcdefghijklmnopqrstuvwxyz ", k=24)) for _ in range(count))
    return [{"prompt": f"Q{number} {words}\nAnswer:", "completion": " yes é!"} for number, words in enumerate(noise)]


def conversations(count: int = 60) -> list[dict[str, Any]]:
    """Two turns each; a system message in every third, a field that the template does not read in every second."""
    made = []
    for number in range(count):
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] * (number % 3 == 0)
        for turn in range(2):
            messages.append({"role": "user", "content": f"What is {number} plus {turn}?"})
            messages.append({"role": "assistant", "content": f"It is {number + turn}."})
        messages[-1] |= {"name": "Ada"} if number % 2 else {}
        made.append({"messages": messages})
    return made


def write_lines(path: Path, records: list[dict[str, Any]]) -> Path:
    """Write JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def chat_tokenizer(folder: Path, template: str | None = CHATML, eos: str = EOS) -> Path:
    """Save a byte-level BPE with the special tokens of the template; returns its folder."""
    made = train_tokenizer(["What is 1 plus 2? It is 3. Be brief. user assistant system\n" * 20], 300)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=eos)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|start|>", "<|stop|>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
