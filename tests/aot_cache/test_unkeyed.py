"""What a capture depends on beside Dynamo's graph is in its key, or the capture is not stored: never another one's numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.testing._internal.two_tensor import TwoTensor

import dynaxla
from dynaxla.aot_cache.capture_key import describe_inputs, find_unkeyed_formulas
from dynaxla.observe.recorder import Recorder
from tests.aot_cache.stored import compile_anew
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("captures")


@pytest.fixture
def reasons() -> Callable[[], list[str]]:
    """Why captures were not stored since the test began."""
    before = len(dynaxla.read_metrics().captures_not_kept)
    return lambda: list(dynaxla.read_metrics().captures_not_kept[before:])


def doubles_one(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return x + y


def apart() -> tuple[Tensor, Tensor]:
    return torch.arange(6.0)[:4], torch.arange(6.0)[:4]


def overlapping() -> tuple[Tensor, Tensor]:
    memory = torch.arange(6.0)
    return memory[:4], memory[:4]


@pytest.mark.parametrize("first", [apart, overlapping])
@torch.no_grad()
def test_which_inputs_share_memory_is_in_the_key(first: Any, recorder: Recorder) -> None:
    """Sizes and strides, which torch's key has, and offsets are the same."""
    second = overlapping if first is apart else apart
    for given, loaded in ((first, 0), (second, 0), (first, 1), (second, 1)):
        with recorder.expect(captures_loaded=loaded):
            assert_close(compile_anew(doubles_one, dynamic=False)(*given()), doubles_one(*given()))


@torch.no_grad()
def test_where_inputs_begin_in_a_shared_memory_is_in_the_key(recorder: Recorder) -> None:
    """A write to a view is a write to a part of the other input, which the graph has as numbers. torch's key has no offsets."""

    def grow(whole: Tensor, part: Tensor) -> Tensor:
        part.mul_(10)
        return whole + 1

    for loaded in (0, 1):
        for at in (2, 0, 4):
            memory, expected = torch.ones(8), torch.ones(8)
            with recorder.expect(captures_loaded=loaded):
                found = compile_anew(grow, dynamic=False)(memory, memory[at : at + 4])
            assert_close(found, grow(expected, expected[at : at + 4]))
            assert_close(memory, expected)


FIXED: dict[str, Callable[[Tensor, float], Tensor]] = {
    "int": lambda x, m: x * m + int(m),
    "a bound": lambda x, m: torch.clamp(x * m, max=m - 0.25),
    "a slope": lambda x, m: F.leaky_relu(-x * m, m),
    "a fill value": lambda x, m: x * m + torch.full((1,), m),
    "a comparison": lambda x, m: x * m + (m > 3) * 2,
    "alpha and beta": lambda x, m: torch.addmm(x[None], x[None], x[:, None], alpha=m, beta=m),
    "a norm": lambda x, m: torch.norm(x * m, p=m)[None],
}


FEWER = ("a slope", "alpha and beta")
"""Without gradients one capture of these takes any number, so that there are fewer to be found."""


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("what", FIXED)
def test_a_float_that_is_a_constant_of_a_capture_is_guarded_where_it_is_found(
    what: str, train: bool, recorder: Recorder
) -> None:
    function = FIXED[what]
    before = recorder.snapshot().captures_loaded
    for numbers in ((1.5, 2.5, 3.5, 4.5), (1.5, 2.5, 4.5, 3.5), (1.5, 3.5, 2.5, 5.5)):
        compiled = compile_anew(function)
        for number in numbers:
            found = []
            for each in (compiled, function):
                x = torch.ones(1, requires_grad=train)
                y = each(x, number)
                gradients = torch.autograd.grad(y.sum(), x) if train else ()
                found.append(torch.cat([y.detach().view(-1), *gradients]))
            assert_close(*found)
    least = 3 if what in FEWER and not train else 4
    assert recorder.snapshot().captures_loaded - before >= least


@pytest.mark.parametrize("function", [lambda x, m: x * m, FIXED["a slope"]])
@torch.no_grad()
def test_a_float_that_varies_is_an_input_of_a_stored_capture(
    function: Callable[[Tensor, float], Tensor], recorder: Recorder
) -> None:
    for loaded in (0, 2):
        compiled, before = compile_anew(function), len(recorder.snapshot().captured)
        with recorder.expect(captures_loaded=loaded):
            for number in (1.5, 2.5, 3.5):
                assert_close(compiled(torch.ones(1), number), function(torch.ones(1), number))
        assert len(recorder.snapshot().captured) - before == 2


@torch.no_grad()
def test_a_method_of_a_float_is_no_error(reasons: Callable[[], list[str]], recorder: Recorder) -> None:
    compiled = compile_anew(lambda x, m: 2 * x if m.is_integer() else x)
    with recorder.expect(eager_ops=0):
        assert [compiled(torch.ones(1), number).item() for number in (1.0, 2.5, 3.0)] == [2, 1, 2]
    assert any("to be Node" in told for told in reasons())


@torch.no_grad()
def test_what_torch_guards_by_memory_is_not_stored(reasons: Callable[[], list[str]], recorder: Recorder) -> None:
    """A capture that was loaded would set no such guard, and serve inputs that overlap otherwise."""

    def split(size: int, at: int) -> tuple[Tensor, Tensor]:
        memory = torch.arange(2.0 * size)
        return memory[:size], memory[at : at + size]

    for _ in range(2):
        compiled = compile_anew(doubles_one, dynamic=True)
        with recorder.expect(captures_loaded=0):
            for size, at in ((5, 5), (6, 6), (6, 2), (7, 3), (6, 6)):
                assert_close(compiled(*split(size, at)), doubles_one(*split(size, at)))
    assert reasons()
    assert all("guards on how its inputs share memory" in told for told in reasons())


def make_scaling_class(factor: float) -> type:
    class Scaled(torch.Tensor):
        """A tensor whose sine is another one."""

        @staticmethod
        def __new__(cls, inner: Tensor) -> Any:
            return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]

        def __init__(self, inner: Tensor) -> None:
            self.a = inner

        def __repr__(self) -> str:  # type: ignore[override]
            return "Scaled"

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["a"], None

        @staticmethod
        def __tensor_unflatten__(inner: dict[str, Tensor], *_: object) -> Any:
            return Scaled(inner["a"])

        @classmethod
        def __torch_dispatch__(cls, op: Any, types: object, args: Any, kwargs: Any = None) -> Any:
            result = op(*(x.a if isinstance(x, Scaled) else x for x in args), **(kwargs or {}))
            return Scaled(result * factor if op is torch.ops.aten.sin.default else result)

    return Scaled


@torch.no_grad()
def test_a_tensor_class_of_the_users_is_captured_in_every_process(
    reasons: Callable[[], list[str]], recorder: Recorder
) -> None:
    """Its name is the same, and what it computes is not; within a class of torch's too."""
    for factor in (1.0, 5.0):
        x = make_scaling_class(factor)(torch.ones(3))
        with recorder.expect(captures_loaded=0):
            assert_close(compile_anew(lambda x: x.sin())(x).a, torch.ones(3).sin() * factor)
        assert "Scaled: no key says what it computes" in reasons()[-1]
        assert find_unkeyed_formulas([TwoTensor(x, x)]) is not None
    assert len(reasons()) == 2


def test_jagged_tensors_have_no_key(reasons: Callable[[], list[str]]) -> None:
    x = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    torch.compile(lambda x: (x * 2).values(), backend="dynaxla")(x)
    assert "an input is a jagged tensor: torch has no key for its ragged size" in reasons()[-1]


@torch.no_grad()
def test_a_tensor_class_of_torchs_is_stored_without_a_warning(recorder: Recorder) -> None:
    """torch's key has not its name, and torch warns that it does not describe itself for keys, which no user can change."""
    x = TwoTensor(torch.ones(3), torch.zeros(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for loaded in (0, 1):
            with recorder.expect(captures_loaded=loaded):
                assert_close(compile_anew(lambda x: x.sin())(x).a, torch.ones(3).sin())
    assert "TwoTensor" in describe_inputs([x])
    assert "TwoTensor" not in describe_inputs([x.a])


@pytest.fixture
def gelu_of_the_users() -> Iterator[Callable[[float], None]]:
    """Gives `aten.gelu` a kernel that multiplies by a factor."""
    libraries = []

    def replace(factor: float) -> None:
        libraries.append(torch.library.Library("aten", "IMPL"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it replaces torch's
            libraries[-1].impl("gelu", lambda x, approximate="none": x * factor, "AutogradCPU", allow_override=True)

    yield replace
    for library in reversed(libraries):
        library._destroy()


@torch.no_grad()
def test_an_op_with_a_kernel_of_the_users_is_captured_in_every_process(
    gelu_of_the_users: Callable[[float], None], reasons: Callable[[], list[str]], recorder: Recorder
) -> None:
    """What torch has seen of an op in this process it may still use: which numbers come is not looked at."""
    x = torch.ones(3)
    compile_anew(nn.functional.gelu)(x)
    for factor in (2.0, 3.0):
        gelu_of_the_users(factor)
        with recorder.expect(captures_loaded=0):
            compile_anew(nn.functional.gelu)(x)
    assert len(reasons()) == 2
    assert all("aten.gelu computes what the user says" in told for told in reasons())


@torch.no_grad()
def test_a_decomposition_of_the_users_is_captured_in_every_process(
    monkeypatch: pytest.MonkeyPatch, reasons: Callable[[], list[str]], recorder: Recorder
) -> None:
    compile_anew(nn.functional.silu)(torch.ones(3))
    monkeypatch.setitem(decomposition_table, torch.ops.aten.silu.default, lambda x: x * 2)
    with recorder.expect(captures_loaded=0):
        compile_anew(nn.functional.silu)(torch.ones(3))
    assert "aten.silu.default computes what the user says" in reasons()[0]


class Scaling(nn.Module):
    """Multiplies by a number that is an attribute."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def close_over(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def default_to(factor: float) -> Callable[..., Tensor]:
    def scale(x: Tensor, factor: float = factor) -> Tensor:
        return x * factor

    return scale


@pytest.mark.parametrize("make", [Scaling, close_over, default_to])
@torch.no_grad()
def test_a_value_of_pythons_is_in_the_graph(make: Callable[[float], Any], recorder: Recorder) -> None:
    x = torch.ones(3)
    for factor, loaded in ((2.0, 0), (3.0, 0), (2.0, 1), (3.0, 1)):
        with recorder.expect(captures_loaded=loaded):
            assert_close(compile_anew(make(factor), dynamic=False)(x), x * factor)


@torch.no_grad()
def test_an_attribute_that_changed_is_seen(recorder: Recorder) -> None:
    """In the process that loaded the capture, by Dynamo's guard."""
    x = torch.ones(3)
    compile_anew(Scaling(2.0), dynamic=False)(x)
    module = Scaling(2.0)
    compiled = compile_anew(module, dynamic=False)
    with recorder.expect(captures_loaded=1):
        assert_close(compiled(x), x * 2)
        module.factor = 3.0
        assert_close(compiled(x), x * 3)
