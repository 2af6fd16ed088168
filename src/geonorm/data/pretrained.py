"""Tokenizers made elsewhere: a tokenizer.json, a folder with one, or a name on the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geonorm.data.outputs import read_object
from geonorm.data.tokenizer import EOS, load_tokenizer
from geonorm.errors import UserError, check_unicode

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_FILE = "tokenizer.json"
# Where models say which token ends a text, in the order in which transformers heeds them.
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
_TEMPLATE = "chat_template.jinja"


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
    return tokenizer, _eos(tokenizer, str(name), eos or named)


def _eos(tokenizer: Tokenizer, name: str, wanted: str | None) -> str:
    found = wanted or EOS
    if tokenizer.token_to_id(found) is not None:
        return found
    special = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
    shown = ", ".join(special[:8]) + (", ..." if len(special) > 8 else "") or "none"
    what = f"no token {wanted!r}" if wanted else "no end-of-text token that is named"
    raise UserError(f"the tokenizer {name} has {what}; name its own with `eos` (its special tokens: {shown})")


def _named_eos(folder: Path) -> str | None:
    for name in _CONFIGS:
        token: Any = (read_object(folder / name) or {}).get("eos_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content:
            return content
    return None


def template_digest(name: str | os.PathLike[str]) -> str | None:
    """SHA-256 of the files that decide how `open_with_template` writes conversations; None if there is no template."""
    files = [folder / name for folder in [_folder(name)] for name in (_TEMPLATE, *_CONFIGS)]
    found = [(path.name, path.read_bytes()) for path in files if path.is_file()]
    if not any(name == _TEMPLATE or b'"chat_template"' in data for name, data in found):
        return None
    return hashlib.sha256(b"\0".join(name.encode() + b"\0" + data for name, data in found)).hexdigest()


def open_with_template(name: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """Open a tokenizer with the chat template and the configuration that lie beside it.

    Args:
        name: see `open_tokenizer`.

    Raises:
        UserError: it cannot be read so.
    """
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(_folder(name), local_files_only=True)
    except Exception as error:  # every failure of formats and of what the files say
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"cannot read a chat template beside the tokenizer {name} ({type(error).__name__}: {reason}); name a folder"
            " with a tokenizer.json and a tokenizer_config.json"
        ) from error


def _folder(name: str | os.PathLike[str]) -> Path:
    """Where the files of a tokenizer lie."""
    check_unicode("tokenizer", name)
    path = Path(name).expanduser()
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise UserError(f"the tokenizer {path} is no regular file; give a tokenizer.json or a folder")
    if path.is_file():
        return path.parent
    return path if path.is_dir() else _fetch(str(name))


def _fetch(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=[_FILE, *_CONFIGS, _TEMPLATE]))
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
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"cannot read a tokenizer from {name} ({type(error).__name__}: {reason}); give a tokenizer.json"
        ) from error
    tokenizer.encode_special_tokens = True
    return tokenizer, eos
