"""Tokenizers made elsewhere: a tokenizer.json, a folder with one, or a name on the Hub; and their chat templates."""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geonorm.data.raw import read_object
from geonorm.data.tokenizer import EOS, load_tokenizer
from geonorm.errors import UserError, check_unicode, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_FILE = "tokenizer.json"
# Where models say which token ends a text, in the order in which transformers heeds them.
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_TEMPLATE = "chat_template.jinja"
# What transformers looks for.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def open_tokenizer(name: str | os.PathLike[str], eos: str | None = None) -> tuple[Tokenizer, str]:
    """Open a tokenizer and find the spelling of its end-of-text token.

    Args:
        name: a ``tokenizer.json``, a folder that holds one or another format that transformers reads, or the name
            of a model on the Hub such as ``openai-community/gpt2``. A path that exists comes before the Hub.
        eos: spelling of the end-of-text token. If None, the ``eos_token`` in the tokenizer_config.json or
            special_tokens_map.json beside the tokenizer, else ``<|endoftext|>`` where the vocabulary has it.

    Raises:
        UserError: the tokenizer cannot be read or fetched, or it has no such token.
    """
    check_unicode("eos", eos)
    path, folder = Path(name).expanduser(), _folder(name)
    if path.is_file():
        tokenizer, named = load_tokenizer(path), _named_eos(path.parent)
    elif (folder / _FILE).is_file():
        tokenizer, named = load_tokenizer(folder / _FILE), _named_eos(folder)
    else:
        tokenizer, named = _converted(folder if path.is_dir() else Path(name))
    found = eos or named or EOS
    if tokenizer.token_to_id(found) is None:
        special = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
        shown = ", ".join(special[:8]) + (", ..." if len(special) > 8 else "") or "none"
        what = f"no token {found!r}" if eos or named else "no end-of-text token that is named"
        raise UserError(f"the tokenizer {name} has {what}; name its own with `eos` (its special tokens: {shown})")
    return tokenizer, found


def template_digest(name: str | os.PathLike[str]) -> str | None:
    """SHA-256 of the files that decide how `ChatTemplate` writes conversations; None if there is no template."""
    files = [folder / name for folder in [_folder(name)] for name in (_TEMPLATE, *_CONFIGS)]
    found = [(path.name, path.read_bytes()) for path in files if path.is_file()]
    if not any(name == _TEMPLATE or b'"chat_template"' in data for name, data in found):
        return None
    return hashlib.sha256(b"\0".join(name.encode() + b"\0" + data for name, data in found)).hexdigest()


class LeftOutError(Exception):
    """A record that is left out and counted; its words are the reason."""


class ChatTemplate:
    """Writes conversations as the chat template of a tokenizer says; what the assistant wrote has the labels."""

    def __init__(self, tokenizer: str | os.PathLike[str] | None = None, eos: str | None = None) -> None:
        """Start; nothing is opened before the first conversation.

        Args:
            tokenizer: see `open_tokenizer`; None for none.
            eos: spelling of the token that ends a document.
        """
        self.name, self.eos = tokenizer, eos

    def write(self, messages: list[Any], column: str) -> tuple[str, list[tuple[int, int]]]:
        """A conversation as one text, in which the special tokens of the template are spelled.

        Args:
            messages: an object each, with ``role``, ``content`` and whatever else the template reads.
            column: where they stand, for messages of errors.

        Returns:
            The text, and begin and end of each stretch of characters that the assistant wrote.

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
            raise ValueError(f"the chat template refuses these `{column}` ({first_line(error)})") from error
        (text,), (spans,) = rendered
        if self.eos is not None and self.eos in text:
            unused = [token for token in self._special_tokens if token not in text]
            raise UserError(
                f"the chat template of {self.name} writes {self.eos} inside a conversation, so it cannot end a"
                f" document; name another token as `eos` (special ones not written: {', '.join(unused[:8]) or 'none'})"
            )
        return text, spans

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        from transformers import PreTrainedTokenizerFast

        if self.name is None:
            raise UserError(
                "conversations need the chat template of a tokenizer; prepare them with"
                " `geonorm prepare --tokenizer NAME`"
            )
        try:
            return PreTrainedTokenizerFast.from_pretrained(_folder(self.name), local_files_only=True)
        except UserError:
            raise
        except Exception as error:  # every failure of formats and of what the files say
            reason = first_line(error, with_class=True)
            raise UserError(
                f"cannot read a chat template beside the tokenizer {self.name} ({reason}); name a folder"
                " with a tokenizer.json and a tokenizer_config.json"
            ) from error

    @functools.cached_property
    def _special_tokens(self) -> list[str]:
        return [token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special]

    @functools.cached_property
    def _opened(self) -> tuple[str, re.Pattern[str], dict[str, Any]]:
        """The template, what finds spellings of special tokens, and the template's names for some of them."""
        instead = "records of `prompt` and `completion` need none"
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


def _named_eos(folder: Path) -> str | None:
    for name in _CONFIGS:
        token: Any = (read_object(folder / name) or {}).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content:
            return content
    return None


def _folder(name: str | os.PathLike[str]) -> Path:
    """Where the files of a tokenizer lie."""
    check_unicode("tokenizer", name)
    path = Path(name).expanduser()
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"the tokenizer {path} is no regular file; give a tokenizer.json or a folder")
    if path.exists():
        return path.parent if path.is_file() else path
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(str(name), allow_patterns=[_FILE, *_CONFIGS, _TEMPLATE]))
    except Exception as error:  # every failure of names, rights, caches and networks
        raise UserError(
            f"no tokenizer at {name}: it is no file or folder here, and fetching it from the Hub failed"
            f" ({type(error).__name__}); check the name and the network"
        ) from error


def _converted(name: Path) -> tuple[Tokenizer, str | None]:
    import transformers

    try:
        made: Any = transformers.AutoTokenizer.from_pretrained(name.as_posix(), local_files_only=name.is_dir())
        tokenizer, eos = made.backend_tokenizer, made.eos_token
    except Exception as error:
        reason = first_line(error, with_class=True)
        raise UserError(f"cannot read a tokenizer from {name} ({reason}); give a tokenizer.json") from error
    tokenizer.encode_special_tokens = True
    return tokenizer, eos


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
