"""The folder that ``geonorm convert`` writes: model, tokenizer, a record of the conversion and a README."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from geonorm.models.compat import quiet_transformers
from geonorm.models.saving import model_card, whole_folder, write_card
from geonorm.storage import write_json

RECORD = "conversion.json"


def save_converted(model: Any, tokenizer: Any, out: Path, record: dict[str, Any]) -> None:
    """Write a converted model whole or not at all.

    Args:
        model: the model; tokenizer: its tokenizer.
        out: folder that does not exist, or is empty.
        record: what ``conversion.json`` shall hold.
    """
    with whole_folder(out) as partial:
        with quiet_transformers():
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        write_json(partial / RECORD, record)
        write_card(partial, lambda: f"---\n{model_card(model).data}\n---\n\n{_readme(record, out)}")


def _readme(record: dict[str, Any], out: Path) -> str:
    made = ""
    if "loss_after" in record:
        settings = record["settings"]
        losses = f"{record['loss_before']:.4f} before, {record['loss_after']:.4f} after"
        made = f"""
Loss on held-out text, nats a token: {losses} ({record["held_out_tokens"]:,} tokens; guessing gives \
{record["chance"]:.4f}).

This is a start to train on from, not a finished model. The gains of the norms before the sub-layers are folded into \
the weights that read them; each sub-layer has one step size, chosen so that its median angle over \
{record["calibration_tokens"]:,} tokens is what it was (method `{settings["method"]}`, retraction \
`{settings["retraction"]}`, limit of the angle: {
            settings["max_angle"]
        }). What Pre-Norm does differently for tokens whose \
stream is longer or shorter than the median is lost. Step sizes, angles and the command's settings are in `{RECORD}`.
"""
    return f"""# {out.name}

{Path(record["model"]).name}, rewired from Pre-Norm to `{record["to"]}` by geonorm.
{made}
```python
import geonorm  # makes the class known to transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{out}")
tokenizer = AutoTokenizer.from_pretrained("{out}")
```

Any trainer trains it like the model that it came from. Gains, biases and step sizes should have no weight decay \
(`geonorm.training.parameter_groups` sorts them). Begin with a warm-up: the loss falls most in the first steps. \
`geonorm inspect`, `eval` and `generate` take the folder as it is.
"""
