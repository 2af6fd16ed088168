"""Where a user has a model, and what can be told of it before any library touches it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from pathlib import Path
from typing import Any, Literal

from geonorm.errors import UserError, check_unicode, first_line

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_AGAIN = "fetch or save it again"


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A folder on this machine, a GGUF file, or the name of a model on the Hub.

    Attributes:
        name: what the user gave.
        kind: which of the three.
        path: of the folder or file; of no use for a name on the Hub.
    """

    name: str
    kind: Literal["folder", "gguf", "hub"]
    path: Path

    @property
    def arguments(self) -> dict[str, Any]:
        """What ``from_pretrained`` has to be given to find it."""
        if self.kind == "gguf":
            return {"pretrained_model_name_or_path": str(self.path.absolute().parent), "gguf_file": self.path.name}
        return {"pretrained_model_name_or_path": self.name if self.kind == "hub" else str(self.path)}


def find_source(source: str | Path) -> ModelSource:
    """Tell what a source is.

    Raises:
        UserError: nothing on this machine has that name and no Hub model can, or a file that is not GGUF.
    """
    name, path = str(source), Path(source).expanduser()
    check_unicode("model", name)
    if path.is_dir():
        return ModelSource(name, "folder", path)
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return ModelSource(name, "gguf", path)
        if path.suffix == ".gguf":
            raise UserError(f"{path} is not a GGUF file, whatever its name says; {_AGAIN}")
        raise UserError(f"{path} is a file, but not GGUF; give the folder that holds config.json and the weights")
    if path.suffix != ".gguf" and _HUB_NAME.fullmatch(name):
        return ModelSource(name, "hub", path)
    raise UserError(f"no such model: {name} is no file or folder here and no Hub name; check the path")


def check_source(source: str | Path) -> ModelSource:
    """Find a model with its tokenizer and check as much of them as can be told without loading them.

    Raises:
        UserError: what :func:`find_source`, :func:`check_config` and :func:`check_weights` raise; no tokenizer, instead
            of which transformers may make up an empty one; a GGUF file that is broken or cut off, or a package that
            transformers needs for it is missing.
    """
    found = find_source(source)
    if found.kind == "gguf":
        _check_gguf(found.path)
    elif found.kind == "folder":
        check_config(found.path)
        check_weights(found.path)
        if not any((found.path / name).is_file() for name in _TOKENIZER_FILES):
            raise UserError(
                f"{found.path} has no tokenizer; copy tokenizer.json and tokenizer_config.json there from the model "
                "that it was made from"
            )
    return found


def check_config(folder: Path) -> None:
    """Check that a folder holds a ``config.json`` that describes a model.

    Raises:
        UserError: it does not.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json{_other_content(folder)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({first_line(error)}); {_AGAIN}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(f"{path} names no `model_type`, so it describes no model; {_AGAIN}")


def check_weights(folder: Path) -> None:
    """Check that all weights of a folder are there and can be read without running anything in it.

    Raises:
        UserError: no weights, pickled weights, truncated or missing safetensors.
    """
    from safetensors import SafetensorError, safe_open

    index, files = folder / "model.safetensors.index.json", [folder / "model.safetensors"]
    if not files[0].is_file() and index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = sorted(folder / Path(name).name for name in names)
        except (ValueError, KeyError, TypeError, AttributeError):
            files = []
        if not files:
            raise UserError(f"{index} is not an index of weight files; {_AGAIN}")
    elif not files[0].is_file():
        raise _no_weights(folder)
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} is missing, though {index.name} names it; {_AGAIN}")
        try:
            # Opening compares the header with the size of the file; no tensor is read.
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise UserError(f"{file} is broken or truncated ({first_line(error)}); {_AGAIN}") from None


def _no_weights(folder: Path) -> UserError:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles:
        return UserError(f"{folder} has a config.json but no model.safetensors; {_AGAIN}")
    return UserError(
        f"{folder} holds its weights as a pickle ({pickles[0]}), which can run code when opened; where you trust it, "
        "convert it with AutoModelForCausalLM.from_pretrained(FOLDER, use_safetensors=False).save_pretrained(NEW)"
    )


def _check_gguf(path: Path) -> None:
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UserError(f"reading {path} needs the package {package}; run pip install 'geonorm[gguf]'")
    import gguf

    try:
        gguf.GGUFReader(path)
    except Exception as error:
        # The reader trusts the file, so a broken one fails wherever its numbers lead it.
        raise UserError(f"{path} is a broken or truncated GGUF file ({first_line(error)}); fetch it again") from error


def _other_content(folder: Path) -> str:
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"; for the GGUF file in it, give the file: {ggufs[0]}"
    if (folder / "adapter_config.json").is_file():
        return "; it holds an adapter, so merge that into its base model and save the whole model first"
    nested = sorted(path.parent for path in folder.glob("*/config.json"))
    return f"; did you mean {nested[-1]}?" if nested else "; give a folder that save_pretrained wrote"
