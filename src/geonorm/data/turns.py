"""Records of a prompt and its completion, or of a conversation, as texts of which a part is to be learned.

The columns have the names that TRL's trainers read: ``prompt`` and ``completion``, or ``messages``.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from geonorm.data.document import Document
from geonorm.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEXT, PROMPT, COMPLETION, MESSAGES = "text", "prompt", "completion", "messages"
# What transformers looks for.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class LeftOutError(Exception):
    """A record that is left out and counted; its words are the reason."""


def columns_of(names: Collection[str], column: str) -> tuple[str, ...]:
    """Which columns hold the text of a record: ``column``; where it is the default and absent, those of turns."""
    if column == TEXT and TEXT not in names:
        for known in ((PROMPT, COMPLETION), (MESSAGES,)):
            if set(known) <= set(names):
                return known
    return (column,)


def text_of(record: dict[str, Any], column: str, chat: ChatTemplate) -> str | None:
    """The text of a record, None where it is null.

    A prompt is the context of its completion, which has the labels. A list of objects is a conversation.

    Raises:
        ValueError: the record is of another form; says how, without saying where.
        LeftOutError: see `ChatTemplate.write`.
        UserError: likewise.
    """
    columns = columns_of(record, column)
    parts = [record.get(name) for name in columns]
    if None in parts:
        return None
    if len(parts) == 1 and isinstance(parts[0], list) and any(isinstance(part, dict) for part in parts[0]):
        return chat.write(parts[0], columns[0])
    for name, part in zip(columns, parts, strict=True):
        if not isinstance(part, str):
            what = f"`{name}` is of type {type(part).__name__}, not a string"
            raise ValueError(f"{what}; name the column that holds the text" if len(parts) == 1 else what)
    text = "".join(map(str, parts))
    return text if len(parts) == 1 else Document(text, labelled=[(len(str(parts[0])), len(text))])


class ChatTemplate:
    """Writes conversations as the chat template of a tokenizer says; what the assistant wrote has the labels."""

    def __init__(self, tokenizer: str | os.PathLike[str] | None = None, eos: str | None = None) -> None:
        """Start; nothing is opened before the first conversation.

        Args:
            tokenizer: see `geonorm.data.pretrained.open_tokenizer`; None for none.
            eos: spelling of the token that ends a document.
        """
        self.name, self.eos = tokenizer, eos

    def write(self, messages: list[Any], column: str = MESSAGES) -> Document:
        """A conversation as one text, in which the special tokens of the template are spelled.

        Args:
            messages: an object each, with ``role``, ``content`` and whatever else the template reads.
            column: where they stand, for messages of errors.

        Raises:
            ValueError: not messages, or the template refuses them.
            LeftOutError: a message spells a special token, which the text could not be told from.
            UserError: there is no template, it does not say what the assistant wrote, or it ends documents by itself.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        if not all(isinstance(message, dict) and "role" in message for message in messages):
            raise ValueError(f"`{column}` is a list in which not all are objects with `role` and `content`")
        template, special, names = self._opened
        if any(special.search(text) for text in _strings(messages)):
            raise LeftOutError("conversation that spells a special token")
        # A table has every field in every message, null where a message has none.
        messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            rendered: Any = render_jinja_template(
                [messages], chat_template=template, return_assistant_tokens_mask=True, **names
            )
        except Exception as error:  # templates refuse with whatever they like
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"the chat template refuses these `{column}` ({reason})") from error
        (text,), (spans,) = rendered
        if self.eos is not None and self.eos in text:
            unused = [token for token in self._special_tokens if token not in text]
            raise UserError(
                f"the chat template of {self.name} writes {self.eos} inside a conversation, so it cannot end a"
                f" document; name another token as `eos` (special ones not written: {', '.join(unused[:8]) or 'none'})"
            )
        return Document(text, labelled=spans, special=True)

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        from geonorm.data.pretrained import open_with_template

        if self.name is None:
            raise UserError(
                "conversations need the chat template of a tokenizer; prepare them with"
                " `geonorm prepare --tokenizer NAME`"
            )
        return open_with_template(self.name)

    @functools.cached_property
    def _special_tokens(self) -> list[str]:
        return [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]

    @functools.cached_property
    def _opened(self) -> tuple[str, re.Pattern[str], dict[str, Any]]:
        """The template, what finds spellings of special tokens, and the template's names for some of them."""
        instead = f"records of `{PROMPT}` and `{COMPLETION}` need none"
        tokenizer = self._tokenizer
        try:
            template = tokenizer.get_chat_template()
        except ValueError:
            raise UserError(
                f"the tokenizer {self.name} has no chat template, which conversations need; take one that has"
                f" ({instead})"
            ) from None
        if not _GENERATION.search(template):
            raise UserError(
                f"the chat template of {self.name} has no {{% generation %}} tags, which say what the assistant wrote;"
                f" put them into it ({instead})"
            )
        # Longest first, because one may begin another; without any, what matches nothing.
        spelled = sorted(map(re.escape, self._special_tokens), key=len, reverse=True)
        return template, re.compile("|".join(spelled) or r"(?!)"), tokenizer.special_tokens_map


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
