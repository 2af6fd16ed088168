"""From a run to a folder that Hugging Face's libraries open: ``geonorm export``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from geonorm.errors import UserError, check_count, check_unicode
from geonorm.training import folder as places
from geonorm.training.checkpoint import Checkpoints
from geonorm.training.distributed import solo
from geonorm.training.manifest import Checkpoint, verify
from geonorm.training.state import MODEL


def export(run: Path, out: Path, *, step: int | None = None, say: Callable[[str], None] = lambda text: None) -> Path:
    """Write a run's model with its tokenizer.

    The folder opens with ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` where geonorm
    is installed and imported. The run is only read.

    Args:
        run: folder of the run.
        out: folder to write; it must not exist, or be empty. It appears when it is whole.
        step: the checkpoint to take; None for the newest good one.
        say: is told about checkpoints that cannot be used.

    Returns:
        ``out``.

    Raises:
        UserError: no such run or checkpoint, something is in the way, or the disk is full.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    # This import registers the classes of our models as well.
    from geonorm.models.compat import quiet_transformers
    from geonorm.models.saving import whole_folder

    if not (run / places.RUN).is_file() or not (run / places.MODEL / "config.json").is_file():
        raise UserError(f"{run} is not the folder of a training run; name one that `geonorm train` made")
    check_unicode("out", out.absolute())
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"`out` {out} exists and is not empty; name another folder")
    if step is not None:
        check_count("step", step, 0)
    checkpoints = Checkpoints(run / places.CHECKPOINTS, solo(torch.device("cpu")))
    found = _find(checkpoints, run, step, say)
    config = AutoConfig.from_pretrained(run / places.MODEL, local_files_only=True)
    config.use_cache = True
    model: Any = AutoModelForCausalLM.from_config(config)
    parameters = {f"{MODEL}{name}": tensor for name, tensor in model.named_parameters()}
    missing = [name for name in parameters if name not in found.shapes]
    if missing:
        raise UserError(f"the checkpoint {found.path} has no {missing[0]}; it is of another model")
    checkpoints.load(found, parameters)
    with whole_folder(out) as partial, quiet_transformers():
        model.save_pretrained(partial)
        _tokenizer(run / places.MODEL).save_pretrained(partial)
    say(f"step {found.step} of {run} is in {out}")
    return out


def _find(checkpoints: Checkpoints, run: Path, step: int | None, say: Callable[[str], None]) -> Checkpoint:
    if step is not None:
        known = checkpoints.steps()
        if step not in known:
            raise UserError(f"{run} has no checkpoint of step {step} (it has: {', '.join(map(str, known)) or 'none'})")
        return verify(checkpoints.path(step))
    identity = json.loads((run / places.RUN).read_text(encoding="utf-8"))["id"]
    found = checkpoints.find(identity, say, set_aside=False)
    if found is None:
        raise UserError(f"{run} has no checkpoint yet")
    return found


def _tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), model_max_length=facts["length"], padding_side="left"
    )
    end = tokenizer.convert_ids_to_tokens(facts["eos_id"])
    # Documents are packed one after the other, so the token that ends one also stands before the next.
    tokenizer.add_special_tokens({"eos_token": end, "bos_token": end, "pad_token": end})
    return tokenizer
