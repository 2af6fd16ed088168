"""The tensors of a run: weights, moments, random streams, by flat names, and back.

Everything else that a run has to remember is plain data (:class:`geonorm.training.counters.Counters`), so that a
checkpoint needs no pickle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from geonorm.errors import UserError
from geonorm.training.distributed import Ranks
from geonorm.training.optimizer import Optimizers

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."
# AdamW counts its steps in a tensor without an axis; every other state has the shape of its parameter.
_STEP = "step"


def collect(model: nn.Module, optimizer: Optimizers, ranks: Ranks) -> dict[str, Tensor]:
    """Return every tensor of a run; those of model and optimiser are the run's own, not copies."""
    tensors = {f"{MODEL}{name}": tensor for name, tensor in _model_tensors(model).items()}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for key, value in optimizer.owner(parameter).state.get(parameter, {}).items():
                # The format keeps no tensor without an axis.
                tensors[f"{OPTIMIZER}{key}.{name}"] = value if value.dim() else value.reshape(1)
    return {**tensors, **_random_streams(ranks)}


def targets(model: nn.Module, optimizer: Optimizers, ranks: Ranks, saved: Shapes) -> dict[str, Tensor]:
    """Tensors to read a checkpoint into: the model's own, and fresh ones for the rest.

    Args:
        model, optimizer, ranks: as in :func:`collect`.
        saved: shape and dtype of every tensor in the checkpoint.

    Raises:
        UserError: the checkpoint is of another model.
    """
    wanted = {f"{MODEL}{name}": tensor for name, tensor in _model_tensors(model).items()}
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name in saved:
        if name.startswith(OPTIMIZER):
            parameter = parameters.get(name.removeprefix(OPTIMIZER).partition(".")[2])
            if parameter is None:
                raise UserError(f"the checkpoint has {name}, which this model has not; give the model that was trained")
            is_step = name.startswith(f"{OPTIMIZER}{_STEP}.")
            dtype = saved[name][1]
            wanted[name] = (
                _counter(parameter, optimizer, dtype) if is_step else torch.zeros_like(parameter, dtype=dtype)
            )
    wanted |= {name: tensor for name, tensor in _random_streams(ranks).items() if name in saved}
    for name, tensor in wanted.items():
        if name not in saved or saved[name][0] != tuple(tensor.shape):
            found = saved[name][0] if name in saved else "nothing"
            raise UserError(
                f"the checkpoint holds {found} for {name} of shape {tuple(tensor.shape)}; give the model that "
                "was trained"
            )
    return wanted


def restore(model: nn.Module, optimizer: Optimizers, ranks: Ranks, read: dict[str, Tensor], reseed: int) -> None:
    """Put what was read into :func:`targets` to use; the model's tensors are in place already.

    Args:
        model, optimizer, ranks: as in :func:`collect`.
        read: the filled targets.
        reseed: seed of the random stream where the checkpoint has none for this rank.
    """
    parameters = dict(model.named_parameters())
    for name, value in read.items():
        if name.startswith(OPTIMIZER):
            key, _, owner = name.removeprefix(OPTIMIZER).partition(".")
            parameter = parameters[owner]
            state: dict[str, Any] = optimizer.owner(parameter).state[parameter]
            state[key] = value.reshape(()) if key == _STEP else value
    cpu, device = (f"{RANDOM}{ranks.rank}.{kind}" for kind in ("cpu", "device"))
    if cpu not in read:
        torch.manual_seed(reseed + ranks.rank)
        return
    torch.set_rng_state(read[cpu])
    if device in read:
        torch.cuda.set_rng_state(read[device], ranks.device)


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    # A tied head is the embedding under a second name; named_parameters has it once.
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    persistent = model.state_dict().keys()
    return tensors | {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _counter(parameter: Tensor, optimizer: Optimizers, dtype: torch.dtype) -> Tensor:
    defaults = optimizer.owner(parameter).defaults
    on_device = defaults.get("fused") or defaults.get("capturable")
    return torch.zeros(1, dtype=dtype, device=parameter.device if on_device else "cpu")


def _random_streams(ranks: Ranks) -> dict[str, Tensor]:
    streams = {f"{RANDOM}{ranks.rank}.cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        streams[f"{RANDOM}{ranks.rank}.device"] = torch.cuda.get_rng_state(ranks.device)
    return streams
