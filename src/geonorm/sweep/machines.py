"""What has to be equal on the machines of a comparison, and what may differ."""

from __future__ import annotations

from typing import Any

from geonorm.provenance import environment


def describe_machine() -> dict[str, Any]:
    """What has to be equal on every machine of a comparison (``versions``), and what may differ."""
    import torch

    facts = environment()
    return {
        "versions": {name: facts[name] for name in ("geonorm", "torch", "transformers")},
        "processor": facts["processor"],
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
    }


def difference(theirs: dict[str, str] | None, mine: dict[str, str]) -> str:
    """What is wrong with a machine's versions, in words; empty if nothing is.

    Builds of one version, such as torch for CPU and for CUDA, count as the same.
    """
    if theirs is None:
        return "has no geonorm, or one without `--executor ray`"
    for name, version in mine.items():
        other = theirs.get(name)
        exact = name == "geonorm"
        if other != version and (exact or str(other).partition("+")[0] != version.partition("+")[0]):
            return f"runs {name} {other}, this one {version}"
    return ""
