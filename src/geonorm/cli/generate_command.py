"""``geonorm generate``."""

import dataclasses
import sys
from typing import Annotated

import tyro

from geonorm import signals
from geonorm.cli.option_types import Dtype, Model, arg
from geonorm.console import results_are_printed
from geonorm.errors import UserError, check_unicode
from geonorm.ranges import SEED, Count, Number


@dataclasses.dataclass(frozen=True)
class Generate:
    """Write on after prompts, printed as it comes."""

    model: Model
    """A folder, a GGUF file or a Hub name"""
    prompt: Annotated[tuple[str, ...], arg("TEXT [TEXT ...]")] = ()
    """Texts to write on from; `-`, or none at all, reads standard input as one prompt"""
    max_new_tokens: Annotated[int, Count()] = 100
    """Most tokens after each prompt"""
    temperature: Annotated[float, Number(0, 1e6)] = 0.8
    """Divides the logits; 0 takes the likeliest token each time"""
    top_p: Annotated[float, Number(0, 1, above=True)] = 0.95
    """Draw from the likeliest tokens whose probabilities reach this sum"""
    num_beams: Annotated[int, Count(), tyro.conf.arg(name="beams")] = 1
    """Beams to search with; more than 1 prints when all is written"""
    seed: Annotated[int, SEED] = 0
    """Seed of the draws"""
    chat: bool = False
    """Put each prompt into the model's chat template"""
    parse_special: bool = False
    """Read spellings of special tokens in the prompts, such as <|im_end|>, as those tokens and not as text"""
    dtype: Dtype = None
    """float32, bfloat16 or float16"""
    device: str = "cpu"
    """Where the model runs, such as cuda"""

    def run(self) -> int:
        """See :class:`Command`.

        Raises:
            UserError: no prompt, one that is not UTF-8, or what loading and generating raise.
        """
        from geonorm.evaluation.generation import GenerationSettings, generate
        from geonorm.models.loading import load_model

        signals.begin()
        results_are_printed()
        settings = GenerationSettings(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(GenerationSettings)}
        )
        if not self.prompt and sys.stdin.isatty():
            raise UserError("no prompt given; use --prompt TEXT, or send text to standard input")
        for prompt in self.prompt:
            check_unicode("prompt", prompt)
        prompts = [_standard_input() if prompt == "-" else prompt for prompt in self.prompt or ("-",)]
        model, tokenizer = load_model(self.model, dtype=self.dtype, device=self.device)
        generate(model, tokenizer, prompts, settings)
        return 0


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(
            f"standard input is not UTF-8: byte 0x{error.object[error.start]:02x}; convert it to UTF-8"
        ) from None
