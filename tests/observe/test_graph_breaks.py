"""What Dynamo does not capture: eager's results, a report of where a graph ended and why, and nothing compiled twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import dynaxla
from dynaxla.observe.graph_breaks import CaptureRecord, GraphBreak, read_capture
from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

COPIES = {"aten::copy_", "aten::clone", "aten::_to_copy", "aten::item", "aten::_local_scalar_dense"}


def prints(x: Tensor) -> Tensor:
    y = x.sin()
    print("between")
    return y.cos() + 1


def prints_a_tensor(x: Tensor) -> Tensor:
    y = x.sin()
    print(y)
    return y.cos() + 1


def reads_a_number(x: Tensor) -> Tensor:
    total = x.sum().item()
    return x * total


def reads_a_whole_number(x: Tensor) -> Tensor:
    largest = int(x.argmax())
    return x.sin() * largest


def branches(x: Tensor) -> Tensor:
    y = x * 2
    if y.sum() > 0:
        return y.sin()
    return y.cos()


def finds_positives(x: Tensor) -> Tensor:
    places = (x > 0).nonzero()
    return places.double().sum() + x.sum()


def selects_positives(x: Tensor) -> Tensor:
    positive = x[x > 0]
    return (positive * 2).sum()


def finds_unique_in_numpy(x: Tensor) -> Tensor:
    y = x.sin()
    found = np.unique(y.numpy())
    return y * found.size


def fits_in_numpy(x: Tensor) -> Tensor:
    y = x.sin()
    line = np.polyfit(np.arange(4.0), y.numpy(), 1)
    return y * torch.from_numpy(line).sum().float()


@torch.compiler.disable
def nothing(y: Tensor) -> None:
    pass


def calls_back(x: Tensor, callback: Callable[[Tensor], None] = nothing) -> Tensor:
    y = x.sin()
    callback(y)
    return y.cos() + 1


# The function, text of the line where its first graph ends, and what Dynamo's reason says.
BREAKS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "print": (prints, 'print("between")', "builtin operator `print`"),
    "print of a tensor": (prints_a_tensor, "print(y)", "builtin operator `print`"),
    "item": (reads_a_number, "x.sum().item()", "Tensor.item()"),
    "int": (reads_a_whole_number, "int(x.argmax())", "Tensor.item()"),
    "branch": (branches, "if y.sum() > 0", "a tensor's value"),
    "nonzero": (finds_positives, ".nonzero()", "output shape depends on input Tensor data"),
    "mask": (selects_positives, "x[x > 0]", "output shape depends on input Tensor data"),
    "numpy's unique": (finds_unique_in_numpy, "np.unique", "output shape depends on input Tensor data"),
    "numpy's polyfit": (fits_in_numpy, "np.polyfit", "numpy"),
    "callback": (calls_back, "callback(y)", "torch.compiler.disable"),
}


@pytest.mark.parametrize("name", BREAKS)
@torch.no_grad()
def test_breaks(name: str, recorder: Recorder) -> None:
    function, line, reason = BREAKS[name]
    x, other = torch.randn(4), torch.randn(4)
    compiled = torch.compile(function, backend="dynaxla")
    before = recorder.snapshot()
    assert_close(compiled(x), function(x))
    first, *rest = recorder.snapshot().captured[len(before.captured) :]
    assert first.ended is not None
    assert _names(first.ended, function, line)
    assert reason in first.ended.reason
    assert all(capture.ended is None for capture in rest)
    assert all(f"{function.__name__} in {__file__} after line" in capture.function for capture in rest)
    assert str(first) in dynaxla.report()
    with recorder.expect(compiles=0, graphs=0):
        assert_close(compiled(x), function(x))
    for _ in range(6):  # other numbers, other sides of the branch: a graph for each kind of them, not for each of them
        assert_close(compiled(other), function(other))
        assert_close(compiled(-other), function(-other))
    with recorder.expect(compiles=0, graphs=0):
        for scale in (2, 3, 4):
            assert_close(compiled(scale * other), function(scale * other))
    assert recorder.snapshot().fallbacks == before.fallbacks


def _names(ended: GraphBreak, function: Callable[..., Any], line: str) -> bool:
    """Whether the break names the file, the function, and the line with this text."""
    source, start = inspect.getsourcelines(function)
    offset = next(i for i, text in enumerate(source) if line in text)
    place = f"{__file__}:{start + offset} in {function.__name__}"
    return ended.frame is not None and ended.frame.startswith(place) and line in ended.frame


@pytest.mark.parametrize("function", [prints, calls_back])
@torch.no_grad()
def test_no_value_is_read_that_python_does_not_ask_for(function: Callable[..., Tensor]) -> None:
    compiled, x = torch.compile(function, backend="dynaxla"), torch.randn(1 << 14)  # small arguments are copied
    for _ in range(2):
        compiled(x)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        compiled(x)
    assert not COPIES & {event.name for event in seen.events()}  # type: ignore[union-attr]


@torch.no_grad()
def test_a_callback_sees_the_values() -> None:
    seen: list[Tensor] = []
    compiled, x = torch.compile(calls_back, backend="dynaxla"), torch.randn(64)
    keep = torch.compiler.disable(seen.append)
    for scale in (1, 2, 3):
        compiled(scale * x, keep)
    for scale, y in zip((1, 2, 3), seen, strict=True):
        assert_close(y, (scale * x).sin())


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 3
        print("inside")
        return y + 1


def _through_a_wrapper(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def wrapper(self: nn.Module, x: Tensor) -> Tensor:
        return function(self, x) + 1

    return wrapper


class Wrapped(nn.Module):
    @_through_a_wrapper
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.linear = Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.inner(x + 1))


def test_a_break_in_a_module_within_a_module_trains(recorder: Recorder) -> None:
    """Both functions' graphs end at the inner line; gradients go through all pieces."""
    net, x = Outer(), torch.randn(2, 4, requires_grad=True)
    (wanted,) = torch.autograd.grad(net(x).sum(), x)
    compiled = torch.compile(net, backend="dynaxla")
    before = recorder.snapshot().captured
    assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], wanted)
    ended = [capture.ended for capture in recorder.snapshot().captured[len(before) :]]
    assert [each is not None and _names(each, Inner.forward, "print") for each in ended] == [True, True, False, False]
    with recorder.expect(compiles=0):
        assert_close(torch.autograd.grad(compiled(x).sum(), x)[0], wanted)


def prints_first(x: Tensor) -> Tensor:
    print("first")
    return x.sin()


def prints_in_a_loop(x: Tensor) -> Tensor:
    for turn in range(3):
        x = x.sin()
        print(turn)
    return x


@pytest.mark.parametrize(("function", "graphs"), [(prints_first, 1), (prints_in_a_loop, 0)])
@torch.no_grad()
def test_breaks_without_a_graph_are_reported(
    function: Callable[[Tensor], Tensor], graphs: int, recorder: Recorder
) -> None:
    """Before the first there is nothing to compile; of a loop Dynamo makes no pieces, so the function runs in eager."""
    compiled, x = torch.compile(function, backend="dynaxla"), torch.randn(4)
    with recorder.expect(compiles=graphs):
        assert_close(compiled(x), function(x))
    with recorder.expect(compiles=0):
        assert_close(compiled(-x), function(-x))
    lines = dynaxla.report().partition("breaks without a graph")[2].splitlines()
    assert any(f"{__file__}:" in line and f"in {function.__name__}" in line and "`print`" in line for line in lines)


@torch.no_grad()
def test_what_ends_with_its_function(recorder: Recorder) -> None:
    """numpy calls that torch knows are part of the graph."""

    def sums(x: Tensor) -> Tensor:
        return torch.from_numpy(np.cumsum(x.sin().numpy())) * 2

    before = recorder.snapshot().captured
    x = torch.randn(4)
    with recorder.expect(compiles=1, graphs=1):
        assert_close(torch.compile(sums, backend="dynaxla")(x), sums(x))
    (capture,) = recorder.snapshot().captured[len(before) :]
    assert capture.ended is None
    assert str(capture).startswith(f"sums in {__file__}: ")


def _named(recorder: Recorder, compiled: Callable[[Tensor], Tensor]) -> list[str]:
    torch._dynamo.reset()  # functions compiled alike share graphs
    before = len(recorder.snapshot().captured)
    with torch.no_grad():
        compiled(torch.randn(2, 4))
    return [capture.function for capture in recorder.snapshot().captured[before:]]


def test_graphs_are_named_by_modules_not_by_wrappers(recorder: Recorder) -> None:
    """torch puts `inner` around callables of its own, `_call_impl` around modules; libraries put `wrapper` around forwards."""
    sequential, linear = nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)
    files = [inspect.getsourcefile(kind) for kind in (nn.Sequential, nn.Linear)]
    assert _named(recorder, torch.compile(sequential, backend="dynaxla")) == [f"Sequential.forward in {files[0]}"]
    assert _named(recorder, torch.compile(linear.forward, backend="dynaxla")) == [f"Linear.forward in {files[1]}"]
    assert _named(recorder, torch.compile(Wrapped(), backend="dynaxla")) == [f"Wrapped.forward in {__file__}"]
    in_place = Wrapped()
    in_place.compile(backend="dynaxla")
    assert _named(recorder, in_place) == [f"Wrapped.forward in {__file__}"]
    first, second = _named(recorder, torch.compile(Inner(), backend="dynaxla"))
    assert first == f"Inner.forward in {__file__}"
    assert second.startswith(f"Inner.forward in {__file__} after line ")
    assert _named(recorder, torch.compile(torch.relu, backend="dynaxla")) == ["relu"]


def test_a_module_of_torch_that_is_compiled_in_place_is_reported(recorder: Recorder) -> None:
    """Dynamo captures nothing of it, whatever the backend."""
    line = "Bilinear.compile(): Dynamo leaves torch.nn's own code to Python"
    assert line not in dynaxla.report()
    net, x = nn.Bilinear(4, 4, 2), torch.randn(3, 4)
    net.compile(backend="aot_eager")
    assert line not in dynaxla.report()
    net.compile(backend="dynaxla")
    with recorder.expect(graphs=0):
        net(x, x)
    assert line in dynaxla.report()
    net.register_forward_hook(lambda module, args, result: result + 1)
    assert line not in dynaxla.report()  # a hook is code of another's, with which Dynamo begins


def test_a_graph_that_is_not_dynamos() -> None:
    traced = torch.fx.symbolic_trace(lambda x: x.sin().cos())
    assert read_capture(traced) == CaptureRecord("a graph of no function", 2)


def test_a_graph_of_a_package_is_named(recorder: Recorder) -> None:
    """There is no call that Dynamo could be asked about, but the graph tells where it begins."""

    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.compile(doubled, backend="dynaxla", fullgraph=True).aot_compile(((torch.ones(2),), {}))
    assert recorder.snapshot().captured[-1].function == f"doubled in {__file__}"


def test_a_graph_is_noted_once(recorder: Recorder) -> None:
    """Dynamo captures again when it finds out, from the backend's own tracing, that a number must not be an input."""
    before: Sequence[CaptureRecord] = recorder.snapshot().captured
    compiled = torch.compile(lambda x, low: x.clamp(low, 9.0), backend="dynaxla")
    for low in (0.1, 0.2, 0.3):
        compiled(torch.randn(4), low)
    assert len(recorder.snapshot().captured) - len(before) == 3


@torch._dynamo.config.patch(recompile_limit=3)
def test_the_last_capture_that_dynamo_makes_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def scaled(x: torch.Tensor, word: str) -> torch.Tensor:
        return x * len(word)

    compiled = torch.compile(scaled, backend="dynaxla")
    before = dynaxla.read_metrics().last_captures
    x = torch.ones(3)
    for word in ("a", "to"):
        compiled(x, word)
    assert dynaxla.read_metrics().last_captures == before
    for word in ("one", "four", "five!"):  # the last two run in eager
        assert torch.equal(compiled(x, word), x * len(word))
    (line,) = dynaxla.read_metrics().last_captures[len(before) :]
    assert "scaled" in line
    assert "3 times" in line
    assert "word == " in line
    assert line in dynaxla.report()
    assert [record.getMessage() for record in caplog.records].count(line) == 1


def test_many_captures_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def added(x: torch.Tensor, word: str) -> torch.Tensor:
        return x + len(word)

    compiled, x = torch.compile(added, backend="dynaxla"), torch.ones(3)
    for length in range(18):
        assert torch.equal(compiled(x, length * "a"), x + length)
        told = [record.getMessage() for record in caplog.records if "16 times so far" in record.getMessage()]
        assert len(told) == (length >= 15)
    assert "added" in told[0]
    assert "word == " in told[0]
