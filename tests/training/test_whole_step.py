"""Forward, backward and update in one executable: eager's parameters, in the tensors that the net has."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynaxla.observe.recorder import Recorder
from examples import whole_step
from tests.lists import quick
from tests.tolerances import assert_close
from tests.training.stepping import Step, compare, draw, mlp

Build = Callable[[nn.Module], Step]


@pytest.fixture(autouse=True)
def _captured_gradients() -> Iterator[None]:
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


def compile_whole(function: Any, **_: Any) -> Any:
    return torch.compile(function, backend="dynaxla", fullgraph=True)


def leave(function: Any, **_: Any) -> Any:
    return function


def check(build: Build, recorder: Recorder, net: nn.Module | None = None, sizes: tuple[int, ...] = (8,) * 5) -> None:
    """Trains a net compiled and its twin in eager: after every step everything is equal, and one executable did it all."""
    net = net or mlp()
    twin = copy.deepcopy(net)
    held = {name: (tensor, tensor.data_ptr()) for name, tensor in net.state_dict(keep_vars=True).items()}
    step, eager_step = compile_whole(build(net)), build(twin)
    before = recorder.snapshot()
    for seed, size in enumerate(sizes):
        x, labels = draw(seed, size)
        assert_close(step(x, labels), eager_step(x, labels))
        compare(net, twin)
    after = recorder.snapshot()
    varied = 1 + (len(set(sizes)) > 1)  # Dynamo captures again when it sees that a size varies
    assert after.graphs - before.graphs == after.compiles - before.compiles == varied
    assert (after.eager_ops, after.exact_shapes) == (before.eager_ops, before.exact_shapes)
    for name, tensor in net.state_dict(keep_vars=True).items():
        assert tensor is held[name][0], name
        assert tensor.data_ptr() == held[name][1], name


def by_backward(net: nn.Module) -> Step:
    """`loss.backward()`, a step written by hand, and gradients that go."""
    rate = torch.tensor(0.1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), labels)
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(rate * parameter.grad)  # type: ignore[operator]
                parameter.grad = None
        return loss.detach()

    return step


def by_lists(net: nn.Module) -> Step:
    """Gradients clipped, momenta, and updates of lists of tensors."""
    parameters = list(net.parameters())
    momenta = [torch.zeros_like(p) for p in parameters]

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), labels)
        gradients = list(torch.autograd.grad(loss, parameters))
        with torch.no_grad():
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            torch._foreach_mul_(gradients, (0.5 / norm).clamp(max=1.0))
            torch._foreach_lerp_(momenta, gradients, 0.1)
            torch._foreach_add_(parameters, momenta, alpha=-0.1)
        return loss.detach()

    return step


def by_kept_gradients(net: nn.Module) -> Step:
    """Gradients that add up over all steps, in the parameters' `grad`."""

    def step(x: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(net(x), labels)
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(0.1 * parameter.grad)  # type: ignore[operator]
        return loss.detach()

    return step


def under_autocast(net: nn.Module) -> Step:
    parameters = list(net.parameters())

    def step(x: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(net(x), labels)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-0.1)
        return loss.detach()

    return step


@pytest.mark.parametrize("build", [by_backward, by_lists, under_autocast])
def test_steps(build: Build, recorder: Recorder) -> None:
    check(build, recorder)


def test_batches_of_several_sizes(recorder: Recorder) -> None:
    check(by_backward, recorder, sizes=(8, 7, 6, 5, 8))


def test_gradients_that_stay(recorder: Recorder) -> None:
    """They are there before the first step: one that finds none is another graph."""
    net = mlp()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    check(by_kept_gradients, recorder, net)


class Normed(nn.Module):
    """A batch norm that counts, and a block that is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16)
        self.block, self.head = nn.Sequential(nn.Linear(16, 16), nn.GELU()), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        return self.head(x + checkpoint(self.block, x, use_reentrant=False))


def test_statistics_and_checkpoints(recorder: Recorder) -> None:
    check(by_backward, recorder, Normed())


def test_a_rate_that_changes_in_place(recorder: Recorder) -> None:
    rate = {}

    def build(net: nn.Module) -> Step:
        parameters, own = list(net.parameters()), torch.tensor(0.1)
        rate[id(net)] = own

        def step(x: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(net(x), labels)
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.sub_(own * gradient)
            return loss.detach()

        return step

    net = mlp()
    twin = copy.deepcopy(net)
    step, eager_step = compile_whole(build(net)), build(twin)
    with recorder.expect(compiles=1, graphs=1):
        for seed in range(4):
            x, labels = draw(seed)
            assert_close(step(x, labels), eager_step(x, labels))
            compare(net, twin)
            for own in rate.values():
                own.mul_(0.5)


def test_penalty_of_a_gradient(recorder: Recorder) -> None:
    """A gradient of a gradient, both taken inside."""

    def build(net: nn.Module) -> Step:
        parameters = list(net.parameters())

        def step(x: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(net(x), labels)
            first = torch.autograd.grad(loss, parameters, create_graph=True)
            total = loss + sum(g.square().sum() for g in first)
            gradients = torch.autograd.grad(total, parameters)
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-0.1)
            return total.detach()

        return step

    check(build, recorder)


def test_without_the_switch_the_report_names_it(recorder: Recorder) -> None:
    before = recorder.snapshot().captured
    net = mlp()
    step = torch.compile(by_backward(net), backend="dynaxla")
    with torch._dynamo.config.patch(trace_autograd_ops=False):
        step(*draw(0))
    ends = [capture.ended for capture in recorder.snapshot().captured[len(before) :]]
    assert any(end is not None and "trace_autograd_ops" in end.reason for end in ends)


def test_torchs_optimizer_is_a_second_executable(recorder: Recorder) -> None:
    """torch breaks the graph before every optimizer's step; a loss that lives on would need the backward's graph after that."""

    def build(net: nn.Module) -> Step:
        optimizer = torch.optim.AdamW(net.parameters(), torch.tensor(0.01))

        def step(x: Tensor, labels: Tensor) -> Tensor:
            loss = F.cross_entropy(net(x), labels)
            value = loss.detach()
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
            return value

        return step

    net = mlp()
    twin = copy.deepcopy(net)
    step, eager_step = torch.compile(build(net), backend="dynaxla"), build(twin)
    for seed, compiles in enumerate((2, 0, 0, 0)):
        x, labels = draw(seed)
        with recorder.expect(compiles=compiles, eager_ops=0):
            value = step(x, labels)
        assert_close(value, eager_step(x, labels))
        compare(net, twin)


def test_example(recorder: Recorder) -> None:
    runs = whole_step.compare("perceptron", steps=6)
    assert [run.executables for run in runs.values()] == [0, 3, 1, 1]
    eager = runs["eager"]
    for run in runs.values():
        assert_close(torch.tensor(run.losses), torch.tensor(eager.losses))
        for mine, wanted in zip(run.net.parameters(), eager.net.parameters(), strict=True):
            assert_close(mine, wanted)


@pytest.fixture
def _in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.long
@pytest.mark.usefixtures("_in_double")
@pytest.mark.parametrize("way", quick([whole_step.in_place, whole_step.functional], whole_step.in_place))
def test_transformer_of_the_example(way: Callable[..., Step], recorder: Recorder) -> None:
    """In float64: where a gradient is zero but for rounding, AdamW makes a step of any sign of it."""
    net = whole_step.transformer()
    twin, batch, labels = copy.deepcopy(net), torch.rand(8, 8, 8), torch.arange(8)
    step, eager_step = way(net, compile_whole), whole_step.in_pieces(twin, leave)
    with recorder.expect(compiles=1, graphs=1, eager_ops=0):
        losses = [step(batch, labels) for _ in range(3)]
    assert_close(torch.stack(losses), torch.stack([eager_step(batch, labels) for _ in range(3)]))
