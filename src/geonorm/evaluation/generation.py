"""Text from a model, printed as it comes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import Annotated, Any, TextIO

import torch

from geonorm.errors import UserError, check_unicode, first_line
from geonorm.models.continuation import continue_ids
from geonorm.models.tokens import check_ids, encode_plain, max_length, padding_id, start_id
from geonorm.ranges import SEED, Count, Number, check_ranges


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

    max_new_tokens: Annotated[int, Count()] = 100
    temperature: Annotated[float, Number(0, 1e6)] = 0.8
    top_p: Annotated[float, Number(0, 1, above=True)] = 0.95
    num_beams: Annotated[int, Count()] = 1
    seed: Annotated[int, SEED] = 0
    chat: bool = False
    parse_special: bool = False

    def __post_init__(self) -> None:
        check_ranges(self)


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
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(text, end="\n" if stream_end else "", file=out, flush=True)

    end = model.generation_config.eos_token_id
    end = tokenizer.eos_token_id if end is None else end
    pad = padding_id(model, tokenizer)
    pad = end if pad is None else pad
    print(prompt, end="\n" if settings.chat else "", file=out, flush=True)
    streamer = Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if settings.num_beams == 1 else None
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(settings.seed)
        output = continue_ids(
            model,
            ids,
            settings.max_new_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            num_beams=settings.num_beams,
            eos=end,
            pad=pad[0] if isinstance(pad, list) else pad,
            streamer=streamer,
        )
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
        start = start_id(tokenizer)
        if start is None:
            raise UserError("an empty prompt needs a BOS or EOS token to begin with, and the tokenizer has neither")
        found = [start]
    limit = max_length(model)
    if len(found) + settings.max_new_tokens > limit:
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
            f"the prompt cannot be put into the chat template as plain text ({first_line(error)}); add --parse-special "
            "if it spells special tokens on purpose"
        ) from error
