"""What a user's model source is, and whether it can be loaded: looked at before any library touches it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any, Literal

from geonorm.errors import UserError, check_unicode

Kind = Literal["folder", "gguf", "hub"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def source_kind(source: str) -> Kind:
    """Tell what a source is: a folder on this machine, a GGUF file, or the name of a model on the Hub.

    Raises:
        UserError: nothing on this machine has that name and no Hub model can, or a file that is not GGUF.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return "folder"
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(4)
        if start == b"GGUF":
            return "gguf"
        if path.suffix == ".gguf":
            raise UserError(f"{path} is not a GGUF file, whatever its name says; fetch the file again")
        raise UserError(f"{path} is a file, but not GGUF; give the folder that holds config.json and the weights")
    if path.suffix != ".gguf" and _HUB_NAME.fullmatch(source):
        return "hub"
    raise UserError(f"no such model: {source} is no file or folder here and no Hub name; check the path")


def check_source(source: str) -> Kind:
    """Check as much of a source as can be told without loading it, and return its kind.

    Raises:
        UserError: what :func:`source_kind`, :func:`check_gguf`, :func:`check_folder` and :func:`check_tokenizer` raise.
    """
    check_unicode("model", source)
    kind, path = source_kind(source), Path(source).expanduser()
    if kind == "gguf":
        check_gguf(path)
    elif kind == "folder":
        check_folder(path)
        check_tokenizer(path)
    return kind


def check_gguf(path: Path) -> None:
    """Check that a GGUF file can be read: the package is there, the header and the last tensor are whole.

    Raises:
        UserError: a package that transformers needs for it is missing, or the file is broken or cut off.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"reading {path} needs the package {package}; run pip install 'geonorm[gguf]'")
    import gguf

    try:
        gguf.GGUFReader(path)
    except Exception as error:
        # The reader trusts the file, so a broken one fails wherever its numbers lead it.
        raise UserError(f"{path} is a broken or truncated GGUF file ({one_line(error)}); fetch it again") from error


def check_folder(folder: Path) -> dict[str, Any]:
    """Check that a folder holds a model that can be loaded without running anything in it.

    Returns:
        The content of ``config.json``.

    Raises:
        UserError: no or broken ``config.json``, no weights, pickled weights, truncated or missing safetensors.
    """
    config = check_config(folder)
    _check_weights(folder)
    return config


def check_tokenizer(folder: Path) -> None:
    """Check that a folder holds a tokenizer: without one, transformers may make up an empty one.

    Raises:
        UserError: it does not.
    """
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise UserError(
            f"{folder} has no tokenizer; copy tokenizer.json and tokenizer_config.json there from the model that it "
            "was made from"
        )


def one_line(error: BaseException) -> str:
    """First line of an exception's message, or its class where that says nothing alone."""
    text = str(error).strip()
    if not text or isinstance(error, KeyError):
        return f"{type(error).__name__} {text}".strip()
    return text.splitlines()[0].rstrip(" :;")


def check_config(folder: Path) -> dict[str, Any]:
    """Check that a folder holds a ``config.json`` that describes a model, and return its content.

    Raises:
        UserError: it does not.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json{_other_content(folder)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({one_line(error)}); repair it or fetch it again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{path} names no `model_type`, so it describes no model; fetch it again")
    return config


def _other_content(folder: Path) -> str:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"; for the GGUF file in it, give the file: {ggufs[0]}"
    if (folder / "adapter_config.json").is_file():
        return "; it holds an adapter, so merge that into its base model and save the whole model first"
    nested = sorted(path.parent for path in folder.glob("*/config.json"))
    if nested:
        return f"; did you mean {nested[-1]}?"
    return "; give a folder that save_pretrained wrote"


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    elif index.is_file():
        files = _indexed_files(index)
    else:
        raise _no_weights(folder)
    from safetensors import SafetensorError, safe_open

    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing, though {index.name} names it; fetch it again")
        try:
            # Opening compares the header with the size of the file; no tensor is read.
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise UserError(f"{file} is broken or truncated ({one_line(error)}); fetch or save it again") from None


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [index.parent / Path(name).name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index} is not an index of weight files; fetch it again") from None
    if not files:
        raise UserError(f"{index} names no weight files; fetch it again")
    return files


def _no_weights(folder: Path) -> UserError:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles:
        return UserError(f"{folder} has a config.json but no model.safetensors; save or fetch the weights again")
    return UserError(
        f"{folder} holds its weights as a pickle ({pickles[0]}), which can run code when opened; where you trust it, "
        "convert it with AutoModelForCausalLM.from_pretrained(FOLDER, use_safetensors=False).save_pretrained(NEW)"
    )
