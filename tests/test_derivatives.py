"""Derivatives beyond the first backward: second ones, forward mode, every transform of torch.func, on every way."""

from __future__ import annotations

import itertools

import pytest
import torch
from benchmarks import norms
from torch import func
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from geonorm import ops, sphere_step
from step_tools import CPP, IMPLS, TRITON, both, every_retraction, rows
from tolerances import SAME_64, step_bound, worst

WAYS = [*(impl for impl in IMPLS if impl != "cpp"), CPP, "auto", pytest.param("auto with kernels", marks=CPP.marks)]
every_way = pytest.mark.parametrize("impl", WAYS, indirect=True)
OPTIONS = {"max_angle": 0.9, "radius": 2.0}


@pytest.fixture
def impl(request, monkeypatch):
    """Name of an implementation; ``auto`` without the C++ kernels, or with them."""
    if request.param != "auto with kernels":
        return request.param
    monkeypatch.delenv("GEONORM_CPP", raising=False)
    assert ops.which(torch.ones(1, 1)) == "cpp"
    return "auto"


def inputs(dtype=torch.float64):
    """Rows with every size of update; the last has none along the sphere."""
    x, u, alpha = rows(4, 3, dtype=dtype), rows(4, 3, dtype=dtype), torch.tensor([0.8], dtype=dtype, requires_grad=True)
    with torch.no_grad():
        u[0] = 6 * x[0] + u[0]
        u[1] *= 1e-3
        u[2] *= 5
        u[3] = 1.5 * x[3]
    return x, u, alpha


# --- against finite differences -------------------------------------------------------------------------------------


@both
@every_retraction
def test_gradcheck(retraction, impl):
    for max_angle, radius in ((None, None), (0.3, 3.0), (1.2, None)):

        def step(*values, max_angle=max_angle, radius=radius):
            return sphere_step(*values, retraction=retraction, max_angle=max_angle, radius=radius, impl=impl)

        assert gradcheck(step, inputs(), check_forward_ad=True, check_batched_grad=True)


@both
@every_retraction
def test_gradgradcheck(retraction, impl):
    for max_angle, radius in ((None, None), (0.3, 3.0)):

        def step(*values, max_angle=max_angle, radius=radius):
            return sphere_step(*values, retraction=retraction, max_angle=max_angle, radius=radius, impl=impl)

        assert gradgradcheck(step, inputs(), check_fwd_over_rev=True)


# --- every way to ask for a derivative ------------------------------------------------------------------------------


def cubes(impl, dtype=torch.float64):
    """A scalar function of one point whose update depends on it too, and a point and a direction for it."""
    x, u, direction = (rows(3, 5, dtype=dtype, grad=False) for _ in range(3))

    def f(x):
        return sphere_step(x, u * x.cos(), 0.8, **OPTIONS, impl=impl).pow(3).sum()

    return f, x, direction


def second_derivative_by_hand(f, x, direction):
    """Hessian-vector product by two backward passes, the inputs named."""
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    return torch.autograd.grad((first * direction).sum(), leaf)[0]


def forward_mode(f, x, direction):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, direction))).tangent


def second_by_backward(f, x, direction):
    """The same with ``backward``, into ``.grad``."""
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf), leaf, create_graph=True)
    (first * direction).sum().backward()
    return leaf.grad


def by_hessian(transform):
    return lambda f, x, direction: torch.einsum("abcd,cd->ab", transform(f)(x), direction)


FIRST = {
    "jvp": lambda f, x, direction: func.jvp(f, (x,), (direction,))[1],
    "jacfwd": lambda f, x, direction: (func.jacfwd(f)(x) * direction).sum(),
    "jacrev": lambda f, x, direction: (func.jacrev(f)(x) * direction).sum(),
    "grad": lambda f, x, direction: (func.grad(f)(x) * direction).sum(),
    "vjp": lambda f, x, direction: (func.vjp(f, x)[1](torch.ones_like(f(x)))[0] * direction).sum(),
    "linearize": lambda f, x, direction: func.linearize(f, x)[1](direction),
    "dual numbers": forward_mode,
    "vmap of jvp": lambda f, x, direction: func.vmap(lambda t: func.jvp(f, (x,), (t,))[1])(direction[None])[0],
    "functional.jvp": lambda f, x, direction: torch.autograd.functional.jvp(f, x, direction)[1],
}
SECOND = {
    "create_graph, inputs named": second_derivative_by_hand,
    "create_graph, backward": second_by_backward,
    "hessian": by_hessian(func.hessian),
    "jacrev of jacrev": by_hessian(lambda f: func.jacrev(func.jacrev(f))),
    "jacfwd of jacfwd": by_hessian(lambda f: func.jacfwd(func.jacfwd(f))),
    "jacrev of jacfwd": by_hessian(lambda f: func.jacrev(func.jacfwd(f))),
    "jvp of grad": lambda f, x, direction: func.jvp(func.grad(f), (x,), (direction,))[1],
    "grad of grad": lambda f, x, direction: func.grad(lambda x: (func.grad(f)(x) * direction).sum())(x),
    "functional.hvp": lambda f, x, direction: torch.autograd.functional.hvp(f, x, direction)[1],
    "functional.hessian": by_hessian(lambda f: lambda x: torch.autograd.functional.hessian(f, x, vectorize=True)),
}


@every_way
@pytest.mark.parametrize("name", FIRST)
def test_first_derivatives(name, impl):
    f, x, direction = cubes(impl)
    leaf = x.clone().requires_grad_()
    want = (torch.autograd.grad(f(leaf), leaf)[0] * direction).sum()
    assert worst(FIRST[name](f, x, direction), want) <= SAME_64


@every_way
@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives(name, impl):
    f, x, direction = cubes(impl)
    torch.manual_seed(0)
    want = second_derivative_by_hand(cubes("reference")[0], x, direction)
    assert worst(SECOND[name](f, x, direction), want) <= SAME_64


@every_way
def test_third_derivative(impl):
    f, x, direction = cubes(impl)

    def third(f):
        leaf = x.clone().requires_grad_()
        value = f(leaf)
        for _ in range(2):
            (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
            value = (gradient * direction).sum()
        return torch.autograd.grad(value, leaf)[0]

    torch.manual_seed(0)
    assert worst(third(f), third(cubes("reference")[0])) <= 8 * SAME_64


@pytest.mark.parametrize(("name", "ask"), [*FIRST.items(), *SECOND.items()])
@pytest.mark.parametrize("impl", [TRITON])
def test_triton(impl, name, ask):
    f, x, direction = cubes(impl, torch.float32)
    torch.manual_seed(0)
    exact = ask(cubes("reference")[0], x.double(), direction.double())
    assert worst(ask(f, x, direction), exact) <= 64 * step_bound(torch.float32, 5)


@pytest.mark.parametrize("impl", [*WAYS, TRITON], indirect=True)
def test_vmap_over_rows_and_step_sizes(impl):
    dtype = torch.float32 if impl == "triton" else torch.float64
    bound = 64 * step_bound(dtype, 5) if impl == "triton" else SAME_64
    x, u = (rows(6, 3, 5, dtype=dtype, grad=False) for _ in range(2))
    alphas = torch.linspace(0.1, 2.0, 6, dtype=dtype)
    step = lambda x, u, alpha: sphere_step(x, u, alpha, **OPTIONS, impl=impl)  # noqa: E731
    each = torch.stack([step(x[i], u[i], alphas[i]) for i in range(6)])
    assert worst(func.vmap(step)(x, u, alphas), each) <= bound
    gradients = func.vmap(func.grad(lambda *values: step(*values).pow(3).sum(), argnums=(0, 1, 2)))(x, u, alphas)
    for i, argument in itertools.product(range(6), range(3)):
        want = func.grad(lambda *values: step(*values).pow(3).sum(), argnums=argument)(x[i], u[i], alphas[i])
        assert worst(gradients[argument][i], want) <= bound


@every_way
def test_tangents_and_batches_that_enter_with_the_gradient_alone(impl):
    x, u, g, tangent = rows(3, 5), rows(3, 5), rows(3, 5, grad=False), rows(3, 5, grad=False)
    y = sphere_step(x, u, **OPTIONS, impl=impl)
    want = torch.autograd.grad(y, (x, u), tangent, retain_graph=True)
    with forward_ad.dual_level():
        duals = torch.autograd.grad(y, (x, u), forward_ad.make_dual(g, tangent), retain_graph=True)
        tangents = [forward_ad.unpack_dual(value).tangent for value in duals]
    batched = torch.autograd.grad(y, (x, u), torch.stack([g, tangent]), is_grads_batched=True)
    for one, other, exact in zip(tangents, batched, want, strict=True):
        assert worst(one, exact) <= SAME_64
        assert worst(other[1], exact) <= SAME_64


@every_way
def test_zero_rows_have_zero_second_derivatives_and_leave_the_others_alone(impl):
    x, u, alpha = inputs()
    keep = [0, 2, 3]
    with torch.no_grad():
        x[1] = 0

    def second(x, u):
        x, u = x.detach().requires_grad_(), u.detach().requires_grad_()
        y = sphere_step(x, u, alpha, **OPTIONS, impl=impl)
        first = torch.autograd.grad(y.pow(3).sum(), (x, u), create_graph=True)
        return torch.autograd.grad(sum(value.square().sum() for value in first), (x, u))

    for one, alone in zip(second(x, u), second(x[keep], u[keep]), strict=True):
        assert not one[1].any()
        assert worst(one[keep], alone) <= SAME_64


# --- compiled, and the operations by their own names ----------------------------------------------------------------


@pytest.mark.parametrize("impl", ["auto", CPP])
@pytest.mark.parametrize("name", ["jvp", "jvp of grad"])
def test_a_compiled_transform(name, impl):
    f, x, direction = cubes(impl)
    ask = {**FIRST, **SECOND}[name]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ask(f, x, direction), fullgraph=True, backend="aot_eager")
    assert worst(compiled(x), ask(f, x, direction)) <= SAME_64


@pytest.mark.parametrize("impl", ["auto", CPP])
def test_a_transform_of_what_was_compiled_before(impl):
    f, x, direction = cubes(impl)
    torch._dynamo.reset()
    compiled = torch.compile(f, backend="aot_eager")
    compiled(x), compiled(x.clone().requires_grad_()).backward()
    for name in ("jvp", "grad"):
        assert worst(FIRST[name](compiled, x, direction), FIRST[name](f, x, direction)) <= SAME_64
    for ask in (forward_mode, second_derivative_by_hand):
        try:
            got = ask(compiled, x, direction)
        except RuntimeError as error:
            got = str(error)
        want = ask(f, x, direction)
        assert refused(got) if isinstance(got, str) else worst(got, want) <= SAME_64


def refused(message):
    """PyTorch has no second backward for what it compiled; a closed operation in a graph has no forward mode."""
    return "double backward" in message or "no forward-mode derivative" in message


@pytest.mark.parametrize("impl", [TRITON, CPP])
def test_operations_called_by_name(impl):
    operation = getattr(torch.ops.geonorm, f"sphere_step_{impl}")
    dtype = torch.float32 if impl == "triton" else torch.float64
    bound = 64 * step_bound(dtype, 5) if impl == "triton" else SAME_64
    f, x, direction = cubes("reference", dtype)
    torch.manual_seed(0)
    _, u = rows(3, 5, dtype=x.dtype, grad=False), rows(3, 5, dtype=x.dtype, grad=False)

    def by_name(x):
        return operation(x, u * x.cos(), None, 0.8, float("inf"), 0.9, 2.0).pow(3).sum()

    for ask in ({**FIRST, **SECOND}[key] for key in ("jvp", "grad", "hessian", "create_graph, inputs named")):
        assert worst(ask(by_name, x, direction), ask(f, x, direction)) <= bound
    with pytest.raises(RuntimeError, match=r"no forward-mode derivative; geonorm\.sphere_step has"):
        forward_mode(by_name, x, direction)


@pytest.mark.parametrize("name", ["jvp", "dual numbers", "hessian", "create_graph, inputs named", "jvp of grad"])
@pytest.mark.parametrize("function", ["add", "scaled"])
@pytest.mark.parametrize("impl", [TRITON])
def test_norms_that_the_step_is_compared_with(impl, function, name):
    x, u, direction = (rows(3, 8, dtype=torch.float32, grad=False) for _ in range(3))
    weight = 1 + 0.1 * rows(8, dtype=torch.float32, grad=False)

    def f(x, impl):
        if function == "scaled":
            return norms.scaled_add_rms_norm(x, u.to(x), weight.to(x) * x[0], alpha=1.5, impl=impl).pow(3).sum()
        total, y = norms.add_rms_norm(x, u.to(x), weight.to(x) * x[0], impl=impl)
        return (total * y.square()).sum()

    ask = {**FIRST, **SECOND}[name]
    exact = ask(lambda x: f(x, "reference"), x.double(), direction.double())
    assert worst(ask(lambda x: f(x, impl), x, direction), exact) <= 64 * step_bound(torch.float32, 8)
