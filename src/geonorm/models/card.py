"""The model card that is saved beside the weights of a rewired model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import nn

from geonorm.models.adapter import Adapter
from geonorm.models.registry import adapter_for, config_placement
from geonorm.placements import Placement

MARK = "<!-- Written by geonorm when the model is saved. Remove this line to keep a text of your own. -->"


def write_card(model: nn.Module, folder: Path) -> None:
    """Write ``README.md`` with placement, options and how to load the model, unless somebody wrote one of their own."""
    save_card(folder, lambda: f"{model_card(model)}\n")


def save_card(folder: Path, make: Callable[[], str]) -> None:
    """Write a text as ``README.md``, unless one is there that geonorm did not write.

    A card is never worth the weights that it lies beside, so whatever goes wrong with it is a warning of one line.
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
        text = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"the model is saved, but its card {path} could not be written ({type(error).__name__}: {text})",
            stacklevel=4,
        )


def model_card(model: nn.Module) -> ModelCard:
    """Make the card of a rewired model, with the head that the Hub reads."""
    adapter, config = adapter_for(model), model.config
    placement = config_placement(config)
    head = ModelCardData(
        library_name="transformers",
        tags=["geonorm", f"placement-{placement.name}", adapter.family],
        pipeline_tag="text-generation" if isinstance(model, adapter.rewired.causal_lm) else None,
    )
    return ModelCard(f"---\n{head}\n---\n{MARK}\n\n{_text(adapter, placement, model, config)}")


def _text(adapter: Adapter, placement: Placement, model: nn.Module, config: Any) -> str:
    options = "\n".join(f"| `{key}` | `{value}` |" for key, value in placement.options().items())
    table = f"| option | value |\n|---|---|\n{options}\n\n" if options else "The placement has no options.\n\n"
    loader = "AutoModelForCausalLM" if isinstance(model, adapter.rewired.causal_lm) else "AutoModel"
    weights = sum(parameter.numel() for parameter in model.parameters())
    size = f"{config.num_hidden_layers} layers, width {config.hidden_size}, {weights:,} parameters"
    return f"""# {adapter.family} with placement `{placement.name}`

A decoder of the family `{adapter.family}` ({size}) whose normalisation is placed as `{placement.label()}`.

{table}## Load

```python
import geonorm  # makes the classes known to transformers
from transformers import {loader}

model = {loader}.from_pretrained("this folder or repository")
```

This needs `pip install 'geonorm[hf]'`.
"""
