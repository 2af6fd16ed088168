"""Data sheets of GPUs: dense peak rates and memory."""

from __future__ import annotations

import dataclasses

from geonorm.errors import unknown


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One model of GPU, by its maker's data sheet.

    Attributes:
        name: as people call it.
        bf16, fp32: peak FLOP/s of dense matrix products in bfloat16, and in float32 without TF32.
        memory: bytes, as sold: 10^9 to the GB.
    """

    name: str
    bf16: float
    fp32: float
    memory: float

    def peak(self, precision: str) -> float:
        """Peak FLOP/s in ``"bf16"`` or ``"fp32"``."""
        return self.bf16 if precision == "bf16" else self.fp32


GPUS = {
    "b200": Gpu("B200", 2250e12, 75e12, 180e9),
    "h200": Gpu("H200 SXM", 989e12, 67e12, 141e9),
    "h100": Gpu("H100 SXM", 989e12, 67e12, 80e9),
    "h100-pcie": Gpu("H100 PCIe", 756e12, 51e12, 80e9),
    "a100": Gpu("A100 80 GB", 312e12, 19.5e12, 80e9),
    "a100-40": Gpu("A100 40 GB", 312e12, 19.5e12, 40e9),
    "l40s": Gpu("L40S", 362e12, 91.6e12, 48e9),
    "rtx4090": Gpu("RTX 4090", 165e12, 82.6e12, 24e9),
}


def gpu(name: str) -> Gpu:
    """Return a GPU by its short name.

    Raises:
        UserError: unknown name.
    """
    if name.lower() not in GPUS:
        raise unknown("GPU", name, GPUS)
    return GPUS[name.lower()]
