"""Text from a model, printed as it comes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import Any, TextIO

import torch

from geonorm.data.raw import one_line
from geonorm.data.tokenizer import encode_plain
from geonorm.errors import MAX_SEED, UserError, check_count, check_positive, check_unicode
from geonorm.models.ids import check_ids, padding_id


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """How text is drawn.

    Attributes:
        max_new_tokens: most tokens after each prompt.
        temperature: divides the logits; 0 takes the likeliest token each time.
        top_p: draw from the likeliest tokens whose probabilities reach this sum.
        num_beams: beams to search with; more than 1 gives text only when it is whole.
        seed: of the draws, set anew for each prompt, so that a prompt gives the same text in any company.
        chat: put each prompt into the tokenizer's chat template as a user's message.
        parse_special: read spellings of special tokens in the prompts, such as ``<|im_end|>``, as those tokens; else a
            prompt is plain text, in a chat too, where only what the template writes itself is a token.
    """

    max_new_tokens: int = 100
    temperature: float = 0.8
    top_p: float = 0.95
    num_beams: int = 1
    seed: int = 0
    chat: bool = False
    parse_special: bool = False

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        check_count("num_beams", self.num_beams)
        check_count("seed", self.seed, 0, MAX_SEED)
        if self.temperature != 0:
            check_positive("temperature", self.temperature)
        if not 0 < self.top_p <= 1:
            raise UserError(f"`top_p` must lie above 0 and be at most 1, got {self.top_p}")


def generate(
    model: Any, tokenizer: Any, prompts: Iterable[str], settings: GenerationSettings, out: TextIO | None = None
) -> list[str]:
    """Write on after each prompt, and print prompt and text as the tokens come.

    Prompts run one after the other, apart by an empty line.

    Args:
        model: a decoder with a language-model head, stock or rewired.
        tokenizer: its tokenizer.
        prompts: texts; an empty one begins at the tokenizer's BOS (or EOS) token.
        settings: how to draw.
        out: where to print; standard output by default.

    Returns:
        What was written after each prompt.

    Raises:
        UserError: a prompt that is not Unicode, is longer than the model's positions or has a token that the model
            has no embedding for, no chat template where one is asked for, or an empty prompt and no token to begin
            with. All prompts are looked at before the first is written on.
    """
    where = out or sys.stdout
    texts = []
    encoded = [(prompt, _encode(model, tokenizer, prompt, settings)) for prompt in prompts]
    for number, (prompt, ids) in enumerate(encoded):
        if number:
            print(file=where)
        texts.append(_write_on(model, tokenizer, prompt, ids, settings, where))
    return texts


def _write_on(
    model: Any, tokenizer: Any, prompt: str, ids: torch.Tensor, settings: GenerationSettings, out: TextIO
) -> str:
    from transformers import GenerationConfig, TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(text, end="\n" if stream_end else "", file=out, flush=True)

    end = model.generation_config.eos_token_id
    if end is None:
        end = tokenizer.eos_token_id
    pad = padding_id(model, tokenizer)
    pad = end if pad is None else pad
    config = GenerationConfig(
        max_new_tokens=settings.max_new_tokens,
        num_beams=settings.num_beams,
        eos_token_id=end,
        pad_token_id=pad[0] if isinstance(pad, list) else pad,
        do_sample=settings.temperature > 0,
        **({"temperature": settings.temperature, "top_p": settings.top_p} if settings.temperature > 0 else {}),
        # Left at its default it would cut to the 50 likeliest tokens, which nobody asked for.
        top_k=0 if settings.temperature > 0 else None,
    )
    print(prompt, end="\n" if settings.chat else "", file=out, flush=True)
    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if settings.num_beams == 1 else None
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer)
    text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    if streamer is None:
        print(text, file=out, flush=True)
    return text


def _encode(model: Any, tokenizer: Any, prompt: str, settings: GenerationSettings) -> torch.Tensor:
    check_unicode("prompt", prompt)
    if settings.chat:
        found = _encode_chat(tokenizer, prompt, settings.parse_special)
    elif settings.parse_special:
        found = tokenizer(prompt, split_special_tokens=False)["input_ids"]
    else:
        found = encode_plain(tokenizer, prompt, add_special_tokens=True)
    if not found:
        start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        if start is None:
            raise UserError("an empty prompt needs a BOS or EOS token to begin with, and the tokenizer has neither")
        found = [start]
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and len(found) + settings.max_new_tokens > limit:
        raise UserError(
            f"a prompt of {len(found)} tokens and `max_new_tokens` {settings.max_new_tokens} are more than the {limit} "
            "positions of the model; shorten one of them"
        )
    check_ids(model, found, "the prompt")
    return torch.tensor([found], device=model.device)


def _encode_chat(tokenizer: Any, prompt: str, parse_special: bool) -> list[int]:
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template; leave --chat out, or take a model tuned for chat")
    try:
        return tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_dict=False,
            sanitize_control_tokens=not parse_special,
        )
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"the prompt cannot be put into the chat template as plain text ({one_line(error)}); add --parse-special if"
            " it spells special tokens on purpose"
        ) from error
