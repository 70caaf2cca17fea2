"""Parametrized weights, batch norms' statistics, hooks and derivatives of compiled functions: eager's at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close
from tests.training.stepping import FORWARD_AND_BACKWARD, Step, Wrap, check, compiled, draw, in_eager, mlp, plain


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.tril() + weight.tril(-1).T


@pytest.mark.parametrize("kind", ["weight norm", "weight norm by rows", "spectral norm", "orthogonal", "own"])
def test_parametrizations(kind: str, recorder: Recorder) -> None:
    net: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    if kind == "own":
        parametrize.register_parametrization(net[0], "weight", Symmetric())
    elif kind.startswith("weight"):
        parametrizations.weight_norm(net[0], dim=0 if kind == "weight norm" else 1)
    else:
        getattr(parametrizations, kind.replace(" ", "_"))(net[0])
    check(plain, recorder, FORWARD_AND_BACKWARD, net)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_weight_norms(dim: int, dtype: torch.dtype, recorder: Recorder) -> None:
    net, x = nn.Linear(6, 3, dtype=dtype), torch.randn(8, 6, dtype=dtype)
    parametrizations.weight_norm(net, dim=dim)
    parameters = list(net.parameters())
    wanted = torch.autograd.grad(net(x).square().sum(), parameters)
    with recorder.expect(compiles=2, eager_ops=0):
        mine = torch.autograd.grad(compiled(net)(x).square().sum(), parameters)
    for gradient, other in zip(mine, wanted, strict=True):
        assert_close(gradient, other)


def test_parametrization_computed_once(recorder: Recorder) -> None:
    """`parametrize.cached`: the second forward takes the first one's weight, so it is another graph."""
    net: Any = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    parametrize.register_parametrization(net[0], "weight", Symmetric())

    def run(net: nn.Module, wrap: Wrap) -> Step:
        forward = wrap(net)
        step = plain(net, lambda _: lambda x: forward(x) + forward(x + 1))

        def cached(x: Tensor, labels: Tensor) -> None:
            with parametrize.cached():
                step(x, labels)

        return cached

    check(run, recorder, [4, 0, 0, 0], net)


def test_batch_norm_statistics(recorder: Recorder) -> None:
    """Training and evaluation in turn: the statistics are those of all steps, in the tensors that the net has."""
    net: Any = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def run(net: nn.Module, wrap: Wrap) -> Step:
        forward = wrap(net)
        step = plain(net, lambda _: forward)

        def and_evaluate(x: Tensor, labels: Tensor) -> Tensor:
            step(x, labels)
            net.eval()
            with torch.no_grad():
                result = forward(x)
            net.train()
            return result  # type: ignore[no-any-return]

        return and_evaluate

    check(run, recorder, [3, 0, 0, 0], net)
    assert net[1].num_batches_tracked == 4


def test_batch_norm_that_averages_all_batches(recorder: Recorder) -> None:
    """`momentum=None` reads the number of batches as a Python number, before which Dynamo ends the graph."""
    net = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 3))
    check(plain, recorder, [0, 0, 0], net)


def test_hooks(recorder: Recorder) -> None:
    def run(net: nn.Module, wrap: Wrap) -> Step:
        net[0].register_forward_hook(lambda module, args, output: output * 2)  # type: ignore[operator]
        net[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))  # type: ignore[operator]
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
        return plain(net, wrap)

    check(run, recorder, FORWARD_AND_BACKWARD)


def test_backward_hooks_of_modules(recorder: Recorder) -> None:
    """Dynamo leaves a module that has some to eager."""

    def run(net: nn.Module, wrap: Wrap) -> Step:
        net[2].register_full_backward_hook(lambda module, given, got: (given[0] * 3,))  # type: ignore[operator]
        return plain(net, wrap)

    check(run, recorder, [0, 0, 0])


def test_updates_in_the_backward(recorder: Recorder) -> None:
    def run(net: nn.Module, wrap: Wrap) -> Step:
        forward = wrap(net)

        def update(parameter: Tensor) -> None:
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]
            parameter.grad = None

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        return lambda x, labels: F.cross_entropy(forward(x), labels).backward()

    check(run, recorder, FORWARD_AND_BACKWARD)


def _loss(net: nn.Module) -> Any:
    return lambda parameters, x, labels: F.cross_entropy(functional_call(net, parameters, (x,)), labels)


def test_gradients_inside(recorder: Recorder) -> None:
    """`torch.func`: gradients, per sample gradients and Hessian products are one executable each."""
    net = mlp()
    parameters, (x, labels) = {name: p.detach() for name, p in net.named_parameters()}, draw(0)
    gradient = torch.func.grad(_loss(net))
    of_each = torch.func.vmap(gradient, (None, 0, 0))

    def product(parameters: Any, x: Tensor, labels: Tensor) -> Any:
        return torch.func.jvp(lambda p: gradient(p, x, labels), (parameters,), (parameters,))[1]

    for function, args in (
        (gradient, (x, labels)),
        (lambda p, x, labels: of_each(p, x[:, None], labels[:, None]), (x, labels)),
        (product, (x, labels)),
    ):
        torch._dynamo.reset()
        wanted = function(parameters, *args)
        with recorder.expect(compiles=1, eager_ops=0):
            mine = torch.compile(function, backend="dynaxla", fullgraph=True)(parameters, *args)
        for name, value in wanted.items():
            assert_close(mine[name], value)


def test_double_backward_is_an_error_or_right() -> None:
    """Through a compiled function: AOTAutograd's error. Of a function whose gradient is taken inside: eager's numbers."""

    def loss(x: Tensor) -> Tensor:
        return torch.tanh(x * x).sum()

    def penalty(x: Tensor) -> Tensor:
        return torch.func.grad(loss)(x).square().sum()

    x = torch.randn(5, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(loss)(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.square().sum().backward()
    wanted, mine = (torch.autograd.grad(wrap(penalty)(x), x)[0] for wrap in (in_eager, compiled))
    assert_close(mine, wanted)
