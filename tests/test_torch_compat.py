"""What geonorm relies on inside torch; a test here that fails says which of it is gone."""

from __future__ import annotations

import torch

from geonorm import torch_compat


def test_a_function_can_be_marked_as_constant_to_compilers():
    answers = iter([2.0, 3.0])
    constant = torch_compat.constant_to_compilers(lambda: next(answers))
    compiled = torch.compile(lambda x: x * constant(), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(())).item() for _ in range(2)] == [2.0, 2.0]


def test_transforms_are_seen():
    seen = []

    def function(x):
        seen.append(torch_compat.in_transform())
        return x.sum()

    function(torch.ones(2))
    torch.func.grad(function)(torch.ones(2))
    assert seen == [False, True]


def test_the_key_inside_transforms_is_one_of_torchs():
    assert hasattr(torch._C.DispatchKey, torch_compat.INSIDE_TRANSFORMS)


def test_as_many_compilations_as_asked_for_are_allowed():
    """Of one function, each for another constant; too many are an error with ``fullgraph``."""
    torch._dynamo.reset()
    compiled_for = []

    def backend(graph, inputs):
        compiled_for.append(graph)
        return graph.forward

    class Block(torch.nn.Module):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def forward(self, x):
            return x * len(self.name)

    before = torch._dynamo.config.recompile_limit
    count = before + 4
    try:
        torch_compat.allow_compilations(count)
        for number in range(count):
            block = Block("x" * number)
            block.compile(backend=backend, fullgraph=True)
            block(torch.ones(2))
    finally:
        torch._dynamo.config.recompile_limit = before
    assert len(compiled_for) == count


def test_tensors_without_data_take_no_memory_and_know_what_they_share():
    with torch_compat.without_data():
        large = torch.empty(1 << 40)
        view, other = large[1:], torch.empty(2)
        product = other + torch.empty(2)
    assert product.shape == (2,)
    assert torch_compat.storage_id(view) == torch_compat.storage_id(large) != torch_compat.storage_id(other)
