"""Load the weights of a stock model into another placement, and say what had no place there."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from geonorm.errors import UserError
from geonorm.models.adapter import adapter_for_config, is_rewired
from geonorm.models.compat import quiet_transformers
from geonorm.models.loading import read_config, read_model
from geonorm.models.rewiring import current_placement, rewire
from geonorm.models.source import check_config, check_weights, find_source
from geonorm.placements import Placement, create

# Arguments that say where a configuration is, and those with which weights lie elsewhere than check_weights looks.
_LOCATED = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
_ELSEWHERE = {"subfolder", "variant", "gguf_file", "state_dict", "use_safetensors"}


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What became of a stock model's weights.

    Attributes:
        placement: the placement that they were loaded into.
        kept: number of parameters that stand under their stock names with their stock values.
        unused: names of stock parameters without a place: norms that the placement does not use.
        added: names of new parameters at their start values: norms with gain 1, learnable step sizes.
    """

    placement: Placement
    kept: int
    unused: tuple[str, ...]
    added: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.placement.label()}: {self.kept} parameters kept"
        for title, names in (("unused", self.unused), ("new", self.added)):
            if names:
                text += f"; {len(names)} {title} ({names[0]}{', ...' if len(names) > 1 else ''})"
        return text


def load_stock(
    source: str | os.PathLike | nn.Module,
    placement: str | Placement,
    *,
    loading: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, LoadReport]:
    """Give a stock checkpoint another placement, keeping every weight that has a place there.

    Args:
        source: folder or Hub name of a stock model, or a stock model in memory, which is rewired in place.
        placement: a name from :func:`geonorm.placements.available`, or a placement.
        loading: arguments for ``AutoModelForCausalLM.from_pretrained``, such as ``dtype``.
        options: the placement's options.

    Returns:
        The rewired model and the report.

    Raises:
        UserError: unsupported class, unknown placement or option, a model that is rewired already, or a source that is
            missing, broken, pickled, or lacks weights that its configuration calls for.
    """
    chosen = create(placement, **options)
    model = source if isinstance(source, nn.Module) else _read(source, dict(loading or {}))
    if is_rewired(model):
        raise UserError(
            f"this model is already rewired to {current_placement(model).label()}; load_stock takes a stock model, and "
            "AutoModelForCausalLM.from_pretrained loads a rewired one"
        )
    before = [name for name, _ in model.named_parameters()]
    rewire(model, chosen)
    after = [name for name, _ in model.named_parameters()]
    unused = tuple(name for name in before if name not in set(after))
    added = tuple(name for name in after if name not in set(before))
    return model, LoadReport(chosen, len(before) - len(unused), unused, added)


def _read(source: str | os.PathLike, loading: dict[str, Any]) -> Any:
    found = find_source(os.fspath(source))
    if found.kind == "gguf":
        raise UserError(
            f"load_stock takes a folder or a Hub name, and {found.name} is a GGUF file; read it with load_model and "
            "give the model"
        )
    usual = found.kind == "folder" and not loading.keys() & _ELSEWHERE
    if usual:
        check_config(found.path)
    with quiet_transformers():
        if "config" not in loading:
            loading["config"] = read_config(found, **{key: loading[key] for key in _LOCATED if key in loading})
        # Before the weights are read, which may take long.
        adapter_for_config(loading["config"])
        if usual:
            check_weights(found.path)
        return read_model(found, **loading)
