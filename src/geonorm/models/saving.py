"""A model's folder, whole or absent, and the model card in it."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from torch import nn

from geonorm.errors import UserError, disk_reason, first_line
from geonorm.models.adapter import adapter_for, config_placement

MARK = "<!-- Written by geonorm when the model is saved. Remove this line to keep a text of your own. -->"


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to write a model to; what is in it moves to ``out`` when the block ends well.

    Args:
        out: an empty folder, or none yet.

    Raises:
        UserError: the disk is full, or does not take the files for another reason. ``out`` is as it was then.
    """
    was_there = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Inside, because the folder may be a mount, a link or the current folder, which nothing can be renamed to.
        with tempfile.TemporaryDirectory(prefix="partial-", dir=out) as name:
            partial = Path(name)
            yield partial
            # Without its configuration a folder is no model, so that comes last.
            for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
                path.rename(out / path.name)
    except BaseException as error:
        if not was_there:
            with contextlib.suppress(OSError):
                out.rmdir()
        reason = disk_reason(error)
        if reason is None:
            raise
        raise UserError(
            f"cannot write {out}: {reason}; nothing is left there: make room, or name another folder"
        ) from error


def write_card(folder: Path, make: Callable[[], str]) -> None:
    """Write a text as ``README.md``, unless one is there that geonorm did not write.

    The weights beside it matter more, so whatever goes wrong with the card is a warning of one line.
    """
    path = folder / "README.md"
    try:
        # A link, even one that leads nowhere, is the user's own; so is text in any encoding without our line.
        if path.is_symlink() or (path.is_file() and MARK.encode() not in path.read_bytes()):
            return
        if path.exists() and not path.is_file():
            raise FileExistsError("something else has that name")
        path.write_text(make(), encoding="utf-8")
    except Exception as error:
        warnings.warn(
            f"the model is saved, but its card {path} could not be written ({type(error).__name__}: "
            f"{first_line(error)})",
            stacklevel=3,
        )


def model_card(model: nn.Module) -> ModelCard:
    """Make the card of a rewired model, with the head that the Hub reads: placement, options and how to load it."""
    adapter, config = adapter_for(model), model.config
    placement, with_head = config_placement(config), isinstance(model, adapter.rewired.causal_lm)
    head = ModelCardData(
        library_name="transformers",
        tags=["geonorm", f"placement-{placement.name}", adapter.family],
        pipeline_tag="text-generation" if with_head else None,
    )
    rows = "\n".join(f"| `{key}` | `{value}` |" for key, value in placement.options().items())
    options = f"| option | value |\n|---|---|\n{rows}" if rows else "The placement has no options."
    loader = "AutoModelForCausalLM" if with_head else "AutoModel"
    weights = sum(parameter.numel() for parameter in model.parameters())
    size = f"{config.num_hidden_layers} layers, width {config.hidden_size}, {weights:,} parameters"  # type: ignore
    return ModelCard(f"""---
{head}
---
{MARK}

# {adapter.family} with placement `{placement.name}`

A decoder of the family `{adapter.family}` ({size}) whose normalisation is placed as `{placement.label()}`.

{options}

## Load

```python
import geonorm  # makes the classes known to transformers
from transformers import {loader}

model = {loader}.from_pretrained("this folder or repository")
```

This needs `pip install 'geonorm[hf]'`.
""")
