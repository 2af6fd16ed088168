"""The model card that is saved beside the weights of a rewired model."""

from __future__ import annotations

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
    path = folder / "README.md"
    if path.exists() and MARK not in path.read_text(encoding="utf-8"):
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(str(model_card(model)) + "\n", encoding="utf-8")


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
