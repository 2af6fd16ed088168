"""Compiles every kernel as a launch would, without a GPU; a program of its own because it must not be interpreted."""

from __future__ import annotations

import itertools
import json
import re

import torch
import triton
from benchmarks import norm_kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from geonorm.ops import launch

NAMES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TARGETS = [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)]
compiled: list[dict] = []
targets = itertools.cycle(TARGETS)


def compile_instead(kernel, programs, like, *arguments, **constants):
    """Take the place of a launch: the same arguments, turned into the types that they would be compiled for."""
    options = {"num_warps": constants.pop("num_warps"), "enable_fp_fusion": True}
    names = kernel.arg_names
    assert len(names) == len(arguments) + len(constants)
    signature, aligned = dict.fromkeys(constants, "constexpr"), {}
    for index, (name, value) in enumerate(zip(names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name], aligned[(index,)] = NAMES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, int) and value == 1:
            # Triton's launcher makes a constant of every 1.
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
            assert isinstance(value, (int, float)), name
            if isinstance(value, int) and value % 16 == 0:
                aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel,
        {name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    result = triton.compile(source, target=next(targets), options=options)
    # The offset of a row is added to a column of pointers, or to one pointer; offsets within a row to a line of them.
    pattern = r"tt\.addptr[^:]*: (?:tensor<\d+x1x)?!tt\.ptr<\w+>(?:>, tensor<\d+x1x|, )(i\d+)"
    offsets = sorted(set(re.findall(pattern, result.asm["ttir"])))
    compiled.append(
        {
            "kernel": kernel.fn.__name__,
            "binary_bytes": len(result.asm["cubin"]),
            "row_offsets": offsets,
        }
    )


def main():
    launch.start = compile_instead
    alpha = torch.tensor([0.5])
    infinity = float("inf")
    for p, limit, dim in (
        (infinity, 0.5, 300), (infinity, 0.5, 20000), (1.0, None, 300), (2.0, 0.5, 20000), (0.7, 0.3, 300),
    ):  # fmt: skip
        x, u = torch.ones(6, dim, dtype=torch.bfloat16), torch.ones(6, dim)
        size, radius = (alpha, None) if dim == 300 else (0.5, 2.0)
        launch.step_forward(x, u, size, p, limit, radius)
        launch.step_backward(x, x, u, size, p, limit, radius, [True, p != 1.0, True])
    for dim, weight_of_x in ((300, 1.0), (20000, 1.0), (300, 2.0)):
        x, u, weight = torch.ones(6, dim, dtype=torch.float16), torch.ones(6, dim), torch.ones(dim)
        norm_kernels.launch_forward(x, u, weight, weight_of_x, 1e-6, with_sum=weight_of_x == 1.0)
        norm_kernels.launch_backward(x, x, x, None, weight, 1.0, 1e-6, False, True)
        norm_kernels.launch_backward(x, None, x, u, weight, weight_of_x, 1e-6, weight_of_x != 1.0, weight_of_x == 1.0)
    number = torch.ones(1, 1)
    launch.step_forward(number, number, alpha, 3.0, 0.2, None)
    launch.step_backward(number, number, number, alpha, 3.0, 0.2, None, [True, True, True])
    norm_kernels.launch_forward(number, number, number[0], 1.0, 1e-6, with_sum=True)
    norm_kernels.launch_backward(number, number, number, None, number[0], 1.0, 1e-6, False, True)
    print(json.dumps(compiled))


if __name__ == "__main__":
    main()
