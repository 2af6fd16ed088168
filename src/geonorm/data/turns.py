"""Records of a prompt and its completion, or of a conversation, as texts of which a part is to be learned.

The columns have the names that TRL's trainers read: ``prompt`` and ``completion``, or ``messages``.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from geonorm.data.document import Document
from geonorm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT, PROMPT, COMPLETION, MESSAGES = "text", "prompt", "completion", "messages"
SPELLED = "conversation that spells a special token"
# What transformers looks for.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def columns_of(names: Collection[str], column: str) -> tuple[str, ...]:
    """Which of a record's columns hold its text: ``column``; where it is the default and absent, those of turns."""
    if column == TEXT and TEXT not in names:
        for known in ((PROMPT, COMPLETION), (MESSAGES,)):
            if set(known) <= set(names):
                return known
    return (column,)


def completed(prompt: Any, completion: Any) -> Document | None:
    """A prompt, which has no label, and the text that follows it; None if one of them is null.

    Raises:
        ValueError: one of them is not a string.
    """
    for name, part in ((PROMPT, prompt), (COMPLETION, completion)):
        if not isinstance(part, str | None):
            kind = type(part).__name__
            raise ValueError(f"`{name}` is of type {kind}, not a string; put conversations into a column `{MESSAGES}`")
    if prompt is None or completion is None:
        return None
    return Document(prompt + completion, labelled=[(len(prompt), len(prompt) + len(completion))])


class ChatTemplate:
    """Writes conversations as the chat template of a tokenizer says; what the assistant wrote has a label."""

    def __init__(self, tokenizer: str | os.PathLike[str] | None = None, eos: str | None = None) -> None:
        """Start; nothing is opened before the first conversation.

        Args:
            tokenizer: see `geonorm.data.pretrained.open_tokenizer`; None for one that has no template.
            eos: spelling of the token that ends a document.
        """
        self.name, self.eos = tokenizer, eos

    def write(self, messages: Any) -> Document | None:
        """A conversation as one text in which special tokens are spelled; None if a message spells one by itself.

        Args:
            messages: one dict a message, with ``role`` and ``content`` and whatever else the template reads.

        Raises:
            ValueError: not messages, or the template refuses them.
            UserError: there is no template, it does not say what the assistant wrote, or it ends documents by itself.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        if not isinstance(messages, Sequence) or not messages or not all(isinstance(m, dict) for m in messages):
            raise ValueError(f"`{MESSAGES}` is not a list of objects with `role` and `content`")
        template, specials, names = self._opened
        if any(specials.search(text) for text in _strings(messages)):
            return None
        # A table has every field in every message, null where a message has none.
        messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            texts, spans = render_jinja_template([messages], chat_template=template, return_assistant_tokens_mask=True, **names)  # type: ignore[misc]
        except Exception as error:  # templates refuse with whatever they like
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"the chat template refuses these `{MESSAGES}` ({reason})") from error
        if self.eos is not None and self.eos in texts[0]:
            known = ", ".join(sorted(token for token in self._specials if token not in texts[0])[:8]) or "none"
            raise UserError(
                f"the chat template of {self.name} writes {self.eos} inside a conversation, so it cannot end a document;"
                f" name another special token as `eos` (it does not write: {known})"
            )
        return Document(texts[0], labelled=spans[0], special=True)

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        from geonorm.data.pretrained import open_folder

        if self.name is None:
            raise UserError(
                f"`{MESSAGES}` need the chat template of a tokenizer; prepare them with one: geonorm prepare --tokenizer"
            )
        return open_folder(self.name)

    @property
    def _specials(self) -> list[str]:
        return [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]

    @functools.cached_property
    def _opened(self) -> tuple[str, re.Pattern[str], dict[str, Any]]:
        """The template, what finds special tokens, and the names that the template has for some of them."""
        try:
            template = self._tokenizer.get_chat_template()
        except ValueError:
            raise UserError(
                f"the tokenizer {self.name} has no chat template for `{MESSAGES}`; take one that has, or give records of"
                f" `{PROMPT}` and `{COMPLETION}`"
            ) from None
        if not _GENERATION.search(template):
            raise UserError(
                f"the chat template of {self.name} has no {{% generation %}} tags, which say what the assistant wrote;"
                f" put them into it, or give records of `{PROMPT}` and `{COMPLETION}`"
            )
        return template, re.compile("|".join(map(re.escape, self._specials))), self._tokenizer.special_tokens_map


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)
