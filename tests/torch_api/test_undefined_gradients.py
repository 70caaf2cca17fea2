"""What the wall relies on where gradients of a graph's results are undefined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from dynaxla.torch_api import aot, own_backwards, undefined_gradients
from dynaxla.torch_api.undefined_gradients import Undefined
from tests.torch_api.boundary import boundary


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Backend:
    """Notes what a backward is compiled and called with.

    Attributes:
        undefined: what `find_undefined` gives while a backward is compiled.
        gradients: the positions that `find_gradients` gives.
        own: the numbers that `find_own_backward` gives, by the nodes' names.
        sums: the names of the nodes of which `is_gradient_sum` holds.
        args: of the last call of a backward.
    """

    undefined: frozenset[int]
    gradients: tuple[int, ...]
    own: dict[str, int]
    sums: list[str]
    args: list[Any]

    def __call__(self, module: GraphModule, inputs: Any) -> Any:
        made = aot.aot_autograd(fw_compiler=self._compile, bw_compiler=self._compile_backward)
        with undefined_gradients.take_undefined():
            return made(module, inputs)

    def _compile(self, module: GraphModule, _: Any) -> Any:
        return aot.box_function(lambda args: list(module(*args)))

    def _compile_backward(self, module: GraphModule, _: Any) -> Any:
        self.undefined, self.gradients = undefined_gradients.find_undefined(), aot.find_gradients(module.graph)
        numbers = {node.name: aot.find_own_backward(node) for node in module.graph.nodes}
        self.sums = [node.name for node in module.graph.nodes if aot.is_gradient_sum(node)]
        self.own = {name: number for name, number in numbers.items() if number is not None}

        def run(args: list[Any]) -> list[Any]:
            self.args = list(args)
            return list(module(*(each.make_zeros() if type(each) is Undefined else each for each in args)))

        return aot.box_function(run)


@boundary(
    "undefined_gradients.leave_undefined",
    "undefined_gradients.take_undefined",
    "undefined_gradients.find_undefined",
    "undefined_gradients.Undefined",
    "aot.find_gradients",
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiled_backward_is_told_which_gradients_are_undefined(dynamic: bool) -> None:
    undefined_gradients.leave_undefined()
    backend = Backend()

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.sin(), x.double().sum(0), x.detach() + 1, x.exp()

    x = torch.ones(2, 3, requires_grad=True)
    torch.compile(function, backend=backend, dynamic=dynamic)(x)[3].sum().backward()
    assert x.grad is not None
    sine, total, _ = (backend.args[i] for i in backend.gradients)
    assert [type(backend.args[i]) is Undefined for i in backend.gradients] == [True, True, False]
    assert backend.undefined == (frozenset() if dynamic else frozenset(backend.gradients[:2]))
    assert (sine.make_zeros().shape, sine.make_zeros().dtype) == ((2, 3), torch.float32)
    assert (total.make_zeros().shape, total.make_zeros().dtype) == ((3,), torch.float64)


@boundary("undefined_gradients.leave_undefined")
def test_other_backends_get_zeros() -> None:
    undefined_gradients.leave_undefined()
    x = torch.zeros(3, requires_grad=True)
    torch.compile(lambda x: (x * 2, x.log()), backend="aot_eager")(x)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.isnan().all()


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].tanh()


@boundary("aot.find_own_backward")
def test_what_is_of_a_users_own_backward() -> None:
    backend = Backend()
    x = torch.ones(3, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return Halved.apply(Halved.apply(x.sin()).cos()).exp()  # type: ignore[no-untyped-call, no-any-return]

    torch.compile(function, backend=backend)(x).sum().backward()
    assert sorted(backend.own) == ["tanh", "tanh_1"]
    assert len(set(backend.own.values())) == 2


class Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * 2, y.long()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return ctx.saved_tensors[0], gradients[0] * 2


@boundary("own_backwards.tie_own_gradients")
def test_gradients_of_users_that_read_none_are_tied_to_those_that_come() -> None:
    graphs: list[GraphModule] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        own_backwards.tie_own_gradients(module)
        graphs.extend(each for name, each in module.named_modules() if name.startswith(("bwd_body", "hook_body")))
        return aot.aot_autograd(fw_compiler=lambda each, _: aot.box_function(lambda args: list(each(*args))))(
            module, inputs
        )

    def function(x: Tensor, y: Tensor) -> Tensor:
        first, second = Given.apply(x, y)  # type: ignore[no-untyped-call]
        product = first * second
        product.register_hook(torch.ones_like)
        return product

    x, y = torch.full((3,), 4.0, requires_grad=True), torch.ones(3, requires_grad=True)
    torch.compile(function, backend=backend)(x, y).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4, 4, 4]
    tied = {len(each.graph.find_nodes(op="call_function", target=torch.where)) for each in graphs}
    assert tied == {0, 1}  # a hook that gives ones like what comes reads it


@boundary("aot.is_gradient_sum")
def test_sums_of_gradients() -> None:
    backend = Backend()

    def function(x: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient + 1)
        return x.sin() + x.logcumsumexp(0)

    torch.compile(function, backend=backend)(torch.ones(3, requires_grad=True) * 1).sum().backward()
    assert len(backend.sums) == 1


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].t() * 5


def beside(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, Reversed.apply(y)  # type: ignore[no-untyped-call]


def twice(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return Reversed.apply(y), Reversed.apply(y)[0]  # type: ignore[no-untyped-call]


def turned(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, Turned.apply(y), Turned.apply(x)  # type: ignore[no-untyped-call]


def of_inputs(x: Tensor) -> tuple[Tensor, ...]:
    return Reversed.apply(x), Reversed.apply(x[0]), x * 2  # type: ignore[no-untyped-call]


@boundary("own_backwards.hide_own_views")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [beside, twice, turned, of_inputs])
def test_a_users_backward_of_a_view_is_called(function: Callable[[Tensor], tuple[Tensor, ...]], dynamic: bool) -> None:
    found = []
    for run in (function, torch.compile(function, backend="dynaxla", dynamic=dynamic)):
        x = torch.arange(6.0).view(2, 3).requires_grad_()
        results = run(x)
        sum((i + 1) * each.sum() for i, each in enumerate(results)).backward()  # type: ignore[union-attr]
        assert x.grad is not None
        found.append(([(each.tolist(), each.stride()) for each in results], x.grad))
    assert found[1][0] == found[0][0]
    assert torch.equal(found[1][1], found[0][1])
