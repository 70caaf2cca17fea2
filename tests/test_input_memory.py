"""Where inputs lie in memory, which differs from call to call and which no guard asks: results and writes are eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dynaxla.errors import UnsupportedError
from dynaxla.observe.recorder import Recorder
from tests.lists import quick

Function = Callable[..., Any]


def _write_one_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[0] // 2
    x[:half].add_(x[half:])
    return x[half:]


def _write_a_slice(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x[1:3].mul_(2)
    return x[2:], x.view(2, -1).t(), x


def _write_back(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    x.copy_(y)
    return y[1:]


def _write_windows(x: torch.Tensor) -> torch.Tensor:
    x.as_strided((2, 3), (3, 1)).mul_(2)
    return x + 1


def _write_at_a_place(x: torch.Tensor) -> torch.Tensor:
    x.as_strided((2, 3), (3, 1), 5).mul_(2)
    return x + 1


def _read_windows(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((2, 3), (3, 1), 4) * 2


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _read_windows(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.sum().expand(16)


FUNCTIONS: dict[str, Function] = {
    "views": lambda x: (x[1:], x.view(4, 4)[:, 1], x.detach()[2:]),
    "a half that is not written": _write_one_half,
    "views of what is written": _write_a_slice,
    "a view of a value that is written": _write_back,
    "windows": lambda x: x.as_strided((2, 3), (3, 1)) + 1,
    "windows of a view": lambda x: x[2:].as_strided((2, 3), (3, 1)) + 1,
    "windows of a view that is transposed": lambda x: x.view(4, 4).t()[1:].as_strided((2, 3), (3, 1)) + 1,
    "windows at a place": lambda x: x.as_strided((2, 3), (3, 1), 4) + 1,
    "windows at a place by name": lambda x: torch.as_strided(x, (2, 3), (3, 1), storage_offset=4) + 1,
    "written windows": _write_windows,
    "windows written at a place": _write_at_a_place,
    "windows scattered into": lambda x: torch.as_strided_scatter(x, torch.ones(2, 3), (2, 3), (3, 1)),
    "windows scattered into a view": lambda x: torch.as_strided_scatter(x[2:], torch.ones(2, 3), (2, 3), (3, 1)),
    "windows scattered at a place": lambda x: torch.as_strided_scatter(x, torch.ones(2, 3), (2, 3), (3, 1), 5),
    "windows of no offset": lambda x: x.as_strided((2, 3), (3, 1), None) + 1,
    "windows in a checkpoint": lambda x: checkpoint(_read_windows, x, use_reentrant=False),
    "windows in a branch": lambda x: torch.cond(x.sum() > 0, _read_windows, lambda y: _read_windows(y) + 1, (x,)),
    "windows in a function with a gradient of its own": lambda x: _Windows.apply(x),  # type: ignore[no-untyped-call]
    "copied windows": lambda x: torch.as_strided_copy(x[2:], (2, 3), (3, 1)),
}

OF_BITS: dict[str, Function] = {
    "windows of another dtype": lambda x: x.view(torch.int32)[1:].as_strided((2, 3), (3, 1)) + 1,
    "windows that reach too far": lambda x: x[2:8].view(torch.int32).as_strided((2, 3), (8, 1)) + 1,
}
"""These have no gradients."""


LAYOUTS: dict[str, Function] = {
    "transposed": lambda memory: memory[:16].view(4, 4).t(),
    "rows with gaps": lambda memory: memory.view(8, 4)[::2],
    "columns with gaps": lambda memory: memory.view(4, 8)[:, ::2],
}


def observe(function: Function, call: Function, places: Sequence[Any], take: Function) -> list[Any]:
    """What calls give and write: values and strides of results, and the memory after a write to each."""
    memory, seen = torch.arange(40.0), list[Any]()
    for place in places:
        results = [each for each in tree_leaves(call(*take(memory, place))) if isinstance(each, torch.Tensor)]
        seen += [(each.tolist(), each.stride()) for each in results]
        for result in results:
            result.fill_(7.0)
        seen.append(memory.tolist())
    return seen


def take_one(memory: torch.Tensor, place: int) -> tuple[torch.Tensor, ...]:
    return (memory[place : place + 16],)


@pytest.mark.parametrize("dynamic", quick([False, True, None], None))
@pytest.mark.parametrize("places", [(0, 2, 1), (2, 0), (2, 3)])
@pytest.mark.parametrize("name", FUNCTIONS | OF_BITS)
def test_an_input_elsewhere_in_its_storage(name: str, places: Sequence[int], dynamic: bool | None) -> None:
    function = (FUNCTIONS | OF_BITS)[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    assert observe(function, compiled, places, take_one) == observe(function, function, places, take_one)


@pytest.mark.parametrize("dynamic", quick([False, True, None], None))
@pytest.mark.parametrize("places", [(0, 2, 1), (2, 0), (2, 3)])
@pytest.mark.parametrize("name", quick(FUNCTIONS, "a half that is not written"))
def test_gradients_of_an_input_elsewhere_in_its_storage(name: str, places: Sequence[int], dynamic: bool | None) -> None:
    def observe_gradients(call: Function) -> list[Any]:
        leaf, seen = torch.arange(40.0, requires_grad=True), list[Any]()
        for place in places:
            memory = leaf * 1
            results = [each for each in tree_leaves(call(memory[place : place + 16])) if each.requires_grad]
            loss = sum((each * torch.arange(1.0, each.numel() + 1).view(each.shape)).sum() for each in results)
            (gradient,) = torch.autograd.grad(loss, leaf)
            seen += [gradient.tolist(), memory.tolist(), [(each.tolist(), each.stride()) for each in results]]
        return seen

    compiled = torch.compile(FUNCTIONS[name], backend="dynaxla", dynamic=dynamic)
    assert observe_gradients(compiled) == observe_gradients(FUNCTIONS[name])


@pytest.mark.parametrize("dynamic", quick([False, True, None], None))
@pytest.mark.parametrize("places", [(0, 2, 1), (2, 0), (2, 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "name", ["windows", "copied windows", "written windows", "windows scattered into", "windows scattered into a view"]
)
def test_an_input_of_another_layout(name: str, layout: str, places: Sequence[int], dynamic: bool | None) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)

    def take(memory: torch.Tensor, place: int) -> tuple[torch.Tensor, ...]:
        return (LAYOUTS[layout](memory[place : place + 32]),)

    assert observe(function, compiled, places, take) == observe(function, function, places, take)


def test_windows_of_an_input_elsewhere_are_one_program(recorder: Recorder) -> None:
    function = FUNCTIONS["windows"]
    compiled = torch.compile(function, backend="dynaxla", options={"fallback": "error"}, dynamic=False)
    memory = torch.arange(40.0)
    with recorder.expect(graphs=1, compiles=1, eager_ops=0):
        for place in (0, 3, 5):
            assert torch.equal(compiled(memory[place : place + 16]), function(memory[place : place + 16]))


def _write_the_first(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


def _write_in_a_list(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([x], 2)
    return x * y


def _write_an_element(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[1] = y.sum()
    return x + y


def _write_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch.exp(torch.zeros(4), out=x)
    return x + y


def _write_and_view(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x.mul_(2)
    return x[1:3], y[None], y.detach(), x


WRITERS: dict[str, Function] = {
    "views are returned": _write_and_view,
    "a method": _write_the_first,
    "a list": _write_in_a_list,
    "an element": _write_an_element,
    "out": _write_out,
}


def take_two(memory: torch.Tensor, place: int | None) -> tuple[torch.Tensor, ...]:
    other = torch.arange(20.0, 24.0) if place is None else memory[place : place + 4]
    return memory[1:5], other


@pytest.mark.parametrize("dynamic", quick([False, True, None], None))
@pytest.mark.parametrize("places", [(2, 3), (2, 9), (9, 2), (None, 2), (2, None), (0, 1, 2), (9, 12, None)])
@pytest.mark.parametrize("name", WRITERS)
def test_inputs_that_share_memory_otherwise_than_before(
    name: str, places: Sequence[int | None], dynamic: bool | None
) -> None:
    function = WRITERS[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    assert observe(function, compiled, places, take_two) == observe(function, function, places, take_two)


def test_inputs_that_lie_apart_are_one_program(recorder: Recorder) -> None:
    compiled = torch.compile(_write_the_first, backend="dynaxla", options={"fallback": "error"}, dynamic=False)
    memory = torch.arange(40.0)
    with recorder.expect(graphs=1, compiles=1, eager_ops=0):
        for place in (None, 9, 12, 20):
            compiled(*take_two(memory, place))


def test_another_overlap_is_told(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    compiled = torch.compile(_write_the_first, backend="dynaxla", dynamic=False)
    memory = torch.arange(40.0)
    compiled(*take_two(memory, None))
    with recorder.expect(eager_ops=2):
        compiled(*take_two(memory, 2))
        compiled(*take_two(memory, 3))
    assert sum("share memory otherwise" in record.getMessage() for record in caplog.records) == 1


def test_another_overlap_is_an_error_if_asked() -> None:
    options = {"fallback": "error"}
    compiled = torch.compile(_write_the_first, backend="dynaxla", options=options, dynamic=False)
    memory = torch.arange(40.0)
    compiled(*take_two(memory, None))
    with pytest.raises(UnsupportedError, match="share memory otherwise"):
        compiled(*take_two(memory, 2))
    assert memory.tolist() == torch.cat([torch.tensor([0.0, 2.0, 4.0, 6.0, 8.0]), torch.arange(5.0, 40.0)]).tolist()
