"""What cannot be compiled runs in eager PyTorch: with a reason, with eager's numbers, and as little as possible."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from dynaxla.diagnostics import ReasonId
from dynaxla.errors import UnsupportedError
from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close


@torch.library.custom_op("dynaxla_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@triple.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


triple.register_autograd(lambda context, gradient: gradient * 3)


@torch.library.custom_op("dynaxla_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[::2].clone(), x[1::2].clone()


@halves.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty((x.shape[0] + 1) // 2), x.new_empty(x.shape[0] // 2)


@torch.library.custom_op("dynaxla_tests::increment_", mutates_args={"x"})
def increment_(x: torch.Tensor) -> None:
    x.add_(1)


Function = Callable[..., Any]


def _compile(function: Function, **options: Any) -> Function:
    return torch.compile(function, backend="dynaxla", options=options)


def _reasons(function: Function, *args: torch.Tensor, **options: Any) -> list[ReasonId]:
    with pytest.raises(UnsupportedError) as caught:
        _compile(function, fallback="error", **options)(*args)
    return [reason.id for reason in caught.value.reasons]


@torch.no_grad()
def test_a_custom_op_falls_back_between_two_executables(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        y = triple(y)
        return y.cos() + 1

    compiled = _compile(model)
    x = torch.randn(5)
    with recorder.expect(graphs=1, compiles=2, eager_ops=1), caplog.at_level(logging.WARNING, logger="dynaxla"):
        for _ in range(4):
            assert_close(compiled(x), model(x))
    (record,) = [r for r in caplog.records if r.name == "dynaxla"]
    message = record.getMessage()
    assert "dynaxla_tests.triple.default (float32)" in message
    assert ReasonId.CUSTOM_OP.value in message
    assert f"{__file__}:{inspect.getsourcelines(model)[1] + 2} in model: y = triple(y)" in message
    assert recorder.snapshot().fallbacks[-1] == message
    torch._dynamo.reset()
    assert _reasons(model, x) == [ReasonId.CUSTOM_OP]


@torch.no_grad()
def test_a_new_size_of_a_cut_graph_is_not_logged_again(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return triple(torch.tanh(x)).cos()

    compiled = torch.compile(model, backend="dynaxla", dynamic=True)
    with recorder.expect(graphs=1, compiles=6, eager_ops=1), caplog.at_level(logging.WARNING, logger="dynaxla"):
        for n in (3, 4, 5, 3):
            x = torch.randn(n)
            assert_close(compiled(x), model(x))
    assert len([r for r in caplog.records if r.name == "dynaxla"]) == 1


@torch.no_grad()
def test_one_op_on_two_lines_is_two_reasons() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = triple(x)
        return triple(y + 1)

    assert _reasons(model, torch.randn(3)) == [ReasonId.CUSTOM_OP, ReasonId.CUSTOM_OP]


@pytest.mark.parametrize("needs_gradients", [False, True])
def test_fallback_error_reaches_the_caller_unwrapped(needs_gradients: bool, recorder: Recorder) -> None:
    compiled = _compile(lambda x: triple(torch.tanh(x)), fallback="error")
    with recorder.expect(compiles=0, eager_ops=0):
        for _ in range(2):
            with pytest.raises(UnsupportedError) as caught:
                compiled(torch.randn(3, requires_grad=needs_gradients))
    assert type(caught.value) is UnsupportedError
    assert "DX200 1 op(s) cannot be compiled" in str(caught.value)
    assert "options={'fallback': 'eager'}" in str(caught.value)


def test_fallback_error_in_the_backward_alone_comes_unwrapped() -> None:
    @torch.library.custom_op("dynaxla_tests::backward_of_sine", mutates_args=())
    def backward_of_sine(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    backward_of_sine.register_fake(torch.empty_like)

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * backward_of_sine(*context.saved_tensors)

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(UnsupportedError):
        _compile(Sine.apply, fallback="error")(x).sum().backward()


@torch.no_grad()
def test_fallback_error_lets_through_what_compiles(recorder: Recorder) -> None:
    x = torch.randn(3)
    with recorder.expect(compiles=1, eager_ops=0):
        assert_close(_compile(lambda x: torch.tanh(x) + 1, fallback="error")(x), torch.tanh(x) + 1)


def test_executor_eager_gives_eagers_numbers_and_compiles_nothing(recorder: Recorder) -> None:
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    x = torch.randn(4, 6)
    compiled = _compile(net, executor="eager")
    with recorder.expect(graphs=3, compiles=0, folds=0, eager_ops=0):  # forward, backward, inference
        compiled(x).sum().backward()
        found = [p.grad.clone() for p in net.parameters()]
        with torch.no_grad():
            result = compiled(x)
    net.zero_grad()
    net(x).sum().backward()
    assert_close(result, net(x).detach())
    for gradient, parameter in zip(found, net.parameters(), strict=True):
        assert_close(gradient, parameter.grad)


def test_executor_eager_repeats_random_numbers() -> None:
    compiled = _compile(lambda x: torch.nn.functional.dropout(x, 0.5) + torch.rand(8), executor="eager")
    torch.manual_seed(1)
    first = compiled(torch.ones(8))
    torch.manual_seed(1)
    assert torch.equal(compiled(torch.ones(8)), first)


@torch.no_grad()
def test_sizes_that_depend_on_data_inside_a_graph(recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x)
        z = y.clone()
        z[y > 1] += 1
        return torch.nonzero(y) + 1, y[y > 1] * 2, z * 2

    compiled = torch.compile(model, backend="dynaxla", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), recorder.expect(graphs=1):
        for values in ([0.0, 1.0, 2.0, 5.0], [3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]):
            x = torch.tensor(values)
            for actual, expected in zip(compiled(x), model(x), strict=True):
                assert_close(actual, expected)


@torch.no_grad()
def test_sizes_that_depend_on_data_break_the_graph_by_default(recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x * 2) + 1

    x = torch.tensor([0.0, 1.0, 2.0])
    with recorder.expect(graphs=2, compiles=2, eager_ops=0):
        assert_close(_compile(model)(x), model(x))


@pytest.mark.parametrize("captured", [True, False])
@torch.no_grad()
def test_item(captured: bool, recorder: Recorder) -> None:
    def model(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item() + n.item()

    compiled = torch.compile(model, backend="dynaxla", fullgraph=captured)
    with torch._dynamo.config.patch(capture_scalar_outputs=captured):
        for seed in range(3):
            torch.manual_seed(seed)
            x, n = torch.rand(4), torch.tensor(seed)
            assert_close(compiled(x, n), model(x, n))


def test_an_op_that_torch_wraps_is_named_with_its_line(recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        increment_(y)  # a mutation, made functional
        return checkpoint(lambda y: F.dropout(y.sin(), 0.5).cos(), y, use_reentrant=False)  # a draw to be repeated

    x = torch.rand(5, requires_grad=True)
    _compile(model, rng="eager")(x).sum().backward()
    wrapped, drawn, again = recorder.snapshot().fallbacks[-3:]
    assert wrapped.startswith(
        "dynaxla_tests.increment_.default (float32) runs in eager PyTorch: custom_op; torch calls it by "
    )
    assert "a mutation, made functional" in wrapped
    for line, wrapper in ((drawn, "run_and_save_rng_state"), (again, "run_with_rng_state")):
        assert line.startswith("aten.native_dropout.default")
        assert f"random; torch calls it by {wrapper}" in line
        assert "a draw to be repeated" in line


@torch.no_grad()
def test_a_number_that_is_read_is_no_size(recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.sum().item())] * 2

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = _compile(model)
        with recorder.expect(compiles=2):  # the sum's, and that of two elements
            for x in (torch.tensor([0.5, 0.6, 1.0]), torch.tensor([1.5, 0.6, 0.7])):
                assert_close(compiled(x), model(x))
    assert "reads_value" in recorder.snapshot().fallbacks[-1]
    assert "a number is read out of a tensor" in recorder.snapshot().fallbacks[-1]
    assert "does not follow from any one of its inputs' sizes" in recorder.snapshot().exact_shapes[-1]


@torch.no_grad()
def test_a_branch_on_data() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) if x.sum() > 0 else torch.exp(x)

    compiled = _compile(model)
    for x in (torch.ones(3), -torch.ones(3), torch.ones(3)):
        assert_close(compiled(x), model(x))


@torch.no_grad()
def test_torch_cond_inside_a_graph() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        return torch.cond(y.sum() > 0, torch.sin, lambda y: triple(y), (y,)) + 1

    compiled = torch.compile(model, backend="dynaxla", fullgraph=True)
    for x in (torch.ones(3), -torch.ones(3)):
        assert_close(compiled(x), model(x))
    torch._dynamo.reset()
    assert ReasonId.HIGHER_ORDER in _reasons(model, torch.ones(3))


RANDOM = {
    "rand": lambda x: x + torch.rand(6),
    "randn": lambda x: torch.randn(6) * x.exp(),
    "rand_like": lambda x: torch.rand_like(x * 2) + x,
    "randint": lambda x: torch.randint(0, 9, (6,)) + x,
    "randperm": lambda x: x[torch.randperm(6)],
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)) * 2,
    "multinomial": lambda x: torch.multinomial(torch.softmax(x, 0), 3) + 1,
    "normal": lambda x: torch.normal(x * 2, 1.0) + 1,
    "uniform_": lambda x: torch.empty(6).uniform_(-1, 1) + x,
    "dropout": lambda x: torch.nn.functional.dropout(x.exp(), 0.5) * 2,
    "poisson": lambda x: torch.poisson(x.exp()) + 1,
    "several in order": lambda x: (torch.rand(6) - x.cos()) * torch.rand(6) + torch.nn.functional.dropout(x, 0.3),
}


@pytest.mark.parametrize("name", RANDOM)
@torch.no_grad()
def test_eagers_random_numbers_repeat_under_manual_seed(name: str) -> None:
    function = RANDOM[name]
    compiled = _compile(function, rng="eager")
    x = torch.randn(6)
    compiled(x)
    results = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        results.append(compiled(x))
    torch.manual_seed(5)
    assert_close(results[0], function(x))  # eager draws them, so they are eager's numbers too
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    torch._dynamo.reset()
    assert set(_reasons(function, x, rng="eager")) == {ReasonId.RANDOM}


def test_dropout_in_training_gives_eagers_masks_and_gradients_on_request() -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 32), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(32, 8), torch.nn.Dropout(0.2)
    )
    x = torch.randn(4, 6)
    compiled = _compile(net, rng="eager")
    outcomes = []
    for function in (compiled, compiled, net):
        torch.manual_seed(9)
        net.zero_grad()
        result = function(x)
        result.square().sum().backward()
        outcomes.append([result.detach(), *(p.grad.clone() for p in net.parameters())])
    for first, again, eager in zip(*outcomes, strict=True):
        assert torch.equal(first, again)
        assert_close(first, eager)
    net.eval()
    with torch.no_grad():
        assert_close(compiled(x), net(x))


def test_gradients_through_a_custom_op(recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return triple(torch.tanh(x)).square().sum()

    x = torch.randn(7, requires_grad=True)
    with recorder.expect(graphs=2, eager_ops=1):
        _compile(model)(x).backward()
    found, x.grad = x.grad, None
    model(x).backward()
    assert_close(found, x.grad)


@torch.no_grad()
def test_an_eager_op_with_several_results_first_last_and_alone(recorder: Recorder) -> None:
    def middle(x: torch.Tensor) -> torch.Tensor:
        left, right = halves(x.exp())
        return left * 2 + right

    def first(x: torch.Tensor) -> torch.Tensor:
        left, right = halves(x)
        return left * right

    def last(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return halves(x.exp())

    x = torch.randn(8)
    for function, compiles in ((middle, 2), (first, 1), (last, 1), (halves, 0)):
        with recorder.expect(compiles=compiles, eager_ops=1):
            actual, expected = _compile(function)(x), function(x)
        for a, e in zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]:
            assert_close(a, e)
        torch._dynamo.reset()


@torch.no_grad()
def test_a_custom_op_that_writes_to_its_argument() -> None:
    def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(x)
        increment_(y)
        increment_(x)
        return y * 2, x + 1

    given, reference = torch.zeros(4), torch.zeros(4)
    for actual, expected in zip(_compile(model)(given), model(reference), strict=True):
        assert_close(actual, expected)
    assert torch.equal(given, reference)


class Blocks(torch.nn.Module):
    """Residual blocks, with or without an op in each that nobody can compile."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.norm = torch.nn.LayerNorm(8)
        self.cut = cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = torch.nn.functional.gelu(layer(self.norm(x)))
            x = x + (triple(y) if self.cut else y * 3)
        return x


@torch.no_grad()
def test_results_are_the_same_with_and_without_partition(recorder: Recorder) -> None:
    whole, cut = Blocks(False), Blocks(True)
    cut.load_state_dict(whole.state_dict())
    x = torch.randn(2, 5, 8)
    with recorder.expect(compiles=1, eager_ops=0):
        expected = _compile(whole)(x)
    with recorder.expect(graphs=1, compiles=4, eager_ops=3):
        actual = _compile(cut)(x)
    assert_close(actual, expected)
    assert_close(actual, whole(x))


@torch.no_grad()
def test_a_weight_update_shows_on_both_sides_of_an_eager_op() -> None:
    model = Blocks(True)
    compiled = _compile(model)
    x = torch.randn(2, 8)
    compiled(x)
    for parameter in model.parameters():
        parameter.mul_(-0.5)
    assert_close(compiled(x), model(x))


@torch.no_grad()
def test_dynamo_sees_one_graph_where_an_op_falls_back() -> None:
    counter = CompileCounterWithBackend("dynaxla")
    x = torch.randn(4)
    assert_close(torch.compile(lambda x: triple(x + 1) * 2, backend=counter)(x), (x + 1) * 6)
    assert counter.frame_count == 1


@torch.library.custom_op("dynaxla_tests::mispredicted", mutates_args=())
def mispredicted(x: torch.Tensor, how: str) -> torch.Tensor:
    return {"dtype": x.view(torch.int32), "sizes": x.t(), "rank": x.flatten(), "right": x}[how].clone()


@mispredicted.register_fake
def _(x: torch.Tensor, how: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.no_grad()
@pytest.mark.parametrize("how", ["dtype", "sizes", "rank"])
def test_a_result_unlike_its_fake_value_is_not_read_as_one(
    how: str, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Same number of bytes each: an executable made for the fake value would read them as something else."""

    def model(x: torch.Tensor, how: str) -> tuple[torch.Tensor, ...]:
        y = mispredicted(x, how)
        return y, y * 2, triple(y + 1).sum(0) - 1

    compiled, x = _compile(model), torch.randn(2, 3)
    with caplog.at_level(logging.WARNING, logger="dynaxla"):
        for _ in range(2):
            for mine, eager in zip(compiled(x, how), model(x, how), strict=True):
                assert_close(mine, eager)
    assert sum(ReasonId.MISPREDICTED.value + ";" in r.getMessage() for r in caplog.records) == 2
    with recorder.expect(eager_ops=2, compiles=2):
        assert_close(_compile(model)(x, "right")[2], model(x, "right")[2])


@torch.no_grad()
def test_an_op_with_an_effect_has_a_reason_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten._print("told")
        return x * 2

    x = torch.randn(4)
    assert ReasonId.SIDE_EFFECT in _reasons(model, x)
    capfd.readouterr()
    assert_close(_compile(model)(x), model(x))
    assert capfd.readouterr().out.split() == ["told", "told"]


@pytest.mark.parametrize("of", [torch.ones, lambda n: torch.nn.Parameter(torch.ones(n))])
def test_an_input_that_is_given_other_memory(of: Callable[[int], torch.Tensor], recorder: Recorder) -> None:
    def swap(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.data = y
        return x * 2

    x, y = of(3), torch.full((3,), 5.0)
    assert torch.compile(swap, backend="dynaxla")(x, y).tolist() == [10, 10, 10]
    assert x.data_ptr() == y.data_ptr()
    assert "side_effect; an input is given other memory" in recorder.snapshot().fallbacks[-1]
    with pytest.raises(UnsupportedError, match="copy_"):
        torch.compile(swap, backend="dynaxla", options={"fallback": "error"})(x, y)


def test_memory_that_is_given_back_in_the_midst_of_a_graph(recorder: Recorder) -> None:
    def release(x: torch.Tensor) -> torch.Tensor:
        y = (x + 1).sin()
        x.untyped_storage().resize_(0)
        return y.cos()

    x = torch.randn(10)
    expected = (x + 1).sin().cos()
    assert_close(torch.compile(release, backend="dynaxla", fullgraph=True)(x), expected)
    assert x.untyped_storage().size() == 0
    assert "side_effect; the memory of an input is resized" in recorder.snapshot().fallbacks[-1]
