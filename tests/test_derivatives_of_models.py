"""Second derivatives and torch.func transforms through wirings and rewired models."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import func

from family_models import PLACEMENTS, VOCABULARY, prompts, rewired_model
from geonorm import ops, sphere_step
from geonorm.placements import Wiring
from step_tools import CPP
from tolerances import EPS, SAME_64, worst


@pytest.fixture(params=["without kernels", pytest.param("with kernels", marks=CPP.marks)])
def kernels(request, monkeypatch):
    """What auto takes without the C++ kernels, and with them."""
    if request.param == "with kernels":
        monkeypatch.delenv("GEONORM_CPP", raising=False)
    else:
        monkeypatch.setenv("GEONORM_CPP", "0")
    assert ops.which(torch.ones(1, 1)) == ("cpp" if request.param == "with kernels" else "autograd")


def composed(monkeypatch):
    """From here on every step of the placement is the plain composition."""
    monkeypatch.setattr("geonorm.placements.geonorm.sphere_step", functools.partial(sphere_step, impl="reference"))


def hessian_vector_product(loss, parameters):
    """By two backward passes with the inputs named."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in parameters.items()}
    generator = torch.Generator().manual_seed(3)
    directions = {name: torch.randn(v.shape, dtype=v.dtype, generator=generator) for name, v in leaves.items()}
    first = torch.autograd.grad(loss(leaves), list(leaves.values()), create_graph=True)
    product = sum((one * directions[name]).sum() for one, name in zip(first, leaves, strict=True))
    second = torch.autograd.grad(product, list(leaves.values()))
    return dict(zip(leaves, second, strict=True)), directions


def test_hessian_vector_product_of_a_rewired_model(kernels, monkeypatch):
    options = {"learnable": True, "max_angle": 0.8}
    model = rewired_model("llama", "geonorm", options=options, attn_implementation="eager").double()
    ids, parameters = prompts(2, 7), dict(model.named_parameters())

    def loss(parameters):
        logits = func.functional_call(model, parameters, (ids,)).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))

    got, directions = hessian_vector_product(loss, parameters)
    constants = {name: value.detach() for name, value in parameters.items()}
    _, forward_over_reverse = func.jvp(func.grad(loss), (constants,), (directions,))
    composed(monkeypatch)
    want, _ = hessian_vector_product(loss, parameters)
    assert any("alpha" in name and bool(value.any()) for name, value in want.items())
    for name, value in want.items():
        assert worst(got[name], value) <= SAME_64, name
        # Another order of the same operations, and Llama's own norms and softmax work in float32 in any model.
        assert worst(forward_over_reverse[name], value) <= 8 * EPS[torch.float32], name


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_transforms_of_a_wiring(placement, kernels):
    options = {"learnable": True, "max_angle": 0.8} if placement == "geonorm" else {}
    wiring = Wiring(placement, 6, 1, **options).double()
    weights = [torch.randn(6, 6, dtype=torch.float64) for _ in wiring.connections]

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wiring = wiring

        def forward(self, h):
            stream = self.wiring.enter(h)
            for connection, weight in zip(self.wiring.connections, weights, strict=True):
                stream = connection(stream, lambda h, weight=weight: (h @ weight).tanh())
            return self.wiring.exit(stream)

    net = Net()
    parameters = {name: value.detach() for name, value in net.named_parameters()}
    h, direction = (torch.randn(3, 6, dtype=torch.float64) for _ in range(2))

    def value(h, parameters=parameters):
        return func.functional_call(net, parameters, (h,)).pow(3).sum()

    leaf = h.clone().requires_grad_()
    (first,) = torch.autograd.grad(value(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first * direction).sum(), leaf)
    step = 1e-6
    quotient = (func.grad(value)(h + step * direction) - func.grad(value)(h - step * direction)) / (2 * step)
    # A central difference at 1e-6 keeps half of the digits.
    assert worst(second, quotient) <= SAME_64**0.5
    assert worst(func.jvp(value, (h,), (direction,))[1], (first * direction).sum()) <= SAME_64
    assert worst(func.jacrev(value)(h), first) <= SAME_64
    assert worst(torch.einsum("abcd,cd->ab", func.hessian(value)(h), direction), second) <= SAME_64
    rows = func.vmap(func.grad(lambda row: value(row[None])))(h)
    assert worst(rows, first) <= SAME_64
