"""Compiling for a device elsewhere computes nothing on the host, writes nothing, and says so where a value is asked for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dynaxla
from dynaxla.__main__ import main
from dynaxla.errors import NotComputedError
from dynaxla.precompile.program_report import ProgramReport
from tests.lists import quick
from tests.partition.test_fallback import triple
from tests.precompile.test_compile_for_target import attention, conv_net, mlp


def compile_on_cpu(function: Any, *args: Any, **options: Any) -> list[ProgramReport]:
    return dynaxla.compile_for_target(function, args, target="cpu", **options)


def keys(reports: list[ProgramReport]) -> list[tuple[str, str | None]]:
    return [(report.kind, report.key) for report in reports]


class Counter(torch.nn.Module):
    """Changes its buffers as it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.seen = torch.zeros(8)
        self.kept = [torch.zeros(8)]

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.add_(x.sum(0))
        self.kept[0].add_(1)
        cache[1:3] = x[:2]
        return torch.nn.functional.dropout(self.norm(x), 0.5) + cache.sum(0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("train", [False, True])
def test_no_host_could_compute_it(train: bool) -> None:
    """One product takes a minute here, and a GB. Tensors of these sizes are small, as they repeat one element."""
    size = 1 << 14
    weight = torch.zeros(1).expand(size, size).requires_grad_()
    x = torch.zeros(1).expand(size, size)

    def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ weight) @ weight
        torch._dynamo.graph_break()
        y = torch.sin(y) * y.exp()
        return triple(y @ weight) @ weight  # an op of ours, in eager

    reports = compile_on_cpu(model, x, weight, train=train)
    assert [report.kind for report in reports].count("backward") == 2 * train
    assert sum(report.flops for report in reports) > 4 * 2 * size**3


@pytest.mark.parametrize("train", [False, True])
def test_what_is_given_stays_as_it_was(train: bool) -> None:
    model, x, cache = Counter().train(), torch.randn(4, 8), torch.zeros(4, 8)
    tensors = {
        **dict(model.named_parameters()),
        **dict(model.named_buffers()),
        "seen": model.seen,
        "x": x,
        "cache": cache,
    }
    values = {name: (tensor.detach().clone(), tensor._version) for name, tensor in tensors.items()}
    drawn = torch.get_rng_state()
    kept = model.kept
    compile_on_cpu(model, x, cache, train=train)
    for name, tensor in {**dict(model.named_parameters()), **dict(model.named_buffers()), "seen": model.seen}.items():
        assert tensor is tensors[name], name
    assert model.kept is kept
    assert not kept[0].any()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, values[name][0]), name
        assert tensor._version == values[name][1], name
        assert tensor.grad is None
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_module_has_its_own_tensors_after_an_error() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Flatten(1))
    model.forward = lambda x: model[0](x).sum().item()  # type: ignore[method-assign]
    weight = model[0].weight
    with pytest.raises(NotComputedError):
        compile_on_cpu(model, torch.randn(2, 2))
    assert model[0].weight is weight


def tied() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 16, bias=False))
    model[2].weight = model[0].weight
    return model, (torch.randint(16, (3, 5)),)


def recurrent() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    return torch.nn.LSTM(4, 5, num_layers=2), (torch.randn(3, 2, 4),)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("factory", quick([mlp, conv_net, attention, tied, recurrent], conv_net, tied))
@pytest.mark.parametrize("place", ["meta", "fake"])
def test_weights_without_values_give_the_same_programs(
    place: str, factory: Callable[[], tuple[Any, ...]], train: bool
) -> None:
    model, args, *_ = factory()
    expected = compile_on_cpu(model, *args, train=train)
    with torch.device("meta") if place == "meta" else FakeTensorMode():
        model, *_ = factory()
    assert keys(compile_on_cpu(model, *args, train=train)) == keys(expected)
    assert {tensor.is_meta for tensor in model.parameters()} == {place == "meta"}


def test_arguments_without_values_give_the_same_programs() -> None:
    model, args, *_ = attention()
    expected = compile_on_cpu(model, *args, buckets=["x:1=8,16"])
    with torch.device("meta"):
        model, args, *_ = attention()
    given = compile_on_cpu(model, *args, buckets=["x:1=8,16"])
    assert keys(given) == keys(expected)
    assert [report.sizes for report in given] == [{"x:1": 16}, {"x:1": 8}]


def large() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):  # 64 GB
        return torch.nn.Sequential(*[torch.nn.Linear(1 << 16, 1 << 16) for _ in range(4)]), (torch.ones(2, 1 << 16),)


def test_a_factory_on_meta_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", f"{__name__}:large", "--target", "cpu", "--bucket=input:0=2,4"]) == 0
    assert "input:0=4" in capsys.readouterr().out


def item(x: torch.Tensor) -> Any:
    return x.sin().sum().item()


def branch(x: torch.Tensor) -> torch.Tensor:
    if x.sin().sum() > 0:
        return x.cos()
    return x.sin()


def count(x: torch.Tensor) -> torch.Tensor:
    return x.sin().nonzero()


def numbers(x: torch.Tensor) -> Any:
    return x.sin().tolist()


@torch.compiler.disable
def read_array(x: torch.Tensor) -> Any:
    return x.numpy()


def array(x: torch.Tensor) -> Any:
    return read_array(x.sin())


def text(x: torch.Tensor) -> str:
    return f"{x.sin().sum():.3f}"


def write_and_read(x: torch.Tensor) -> Any:
    x.add_(1)
    return x.tolist()


@pytest.mark.parametrize("function", [item, branch, count, numbers, array, text, write_and_read])
def test_a_value_that_python_asks_for_is_an_error_with_its_line(function: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(NotComputedError, match="computes nothing") as caught:
        compile_on_cpu(function, torch.randn(4))
    assert caught.value.frame is not None
    lines, start = inspect.getsourcelines(read_array if function is array else function)
    file, line, *_ = caught.value.frame.replace(" ", ":").split(":")
    assert file == __file__
    assert start <= int(line) < start + len(lines)  # Dynamo gives some of its code the line of the function


def test_values_of_the_arguments_are_known() -> None:
    """How often a loop runs, and how long the pieces are, may depend on what is given."""
    seen: list[Any] = []
    table = torch.tensor([5, 7])

    def model(x: torch.Tensor, lengths: torch.Tensor, times: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        pieces = x.split(lengths.tolist())
        for _ in range(int(times)):
            pieces = [piece.sin() for piece in pieces]
        seen.append((len(pieces), table[1].item(), lengths.nonzero().shape))
        return torch.cat(pieces).cos() if flag else x

    lengths = torch.tensor([[1, 2, 3]])[0]
    reports = compile_on_cpu(model, torch.randn(6), lengths, torch.tensor(2), torch.tensor([True]))
    assert seen == [(3, 7, (3, 1))]
    assert reports[-1].ops >= 2


def test_assertions_about_values_do_not_fail() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 100).all(), "too small")
        return triple(x).sin()

    assert len(compile_on_cpu(model, torch.zeros(4))) > 0
    assert len(compile_on_cpu(lambda x: (torch._assert_async(x.sum() > 1), x.sin())[1], torch.zeros(4))) == 1


@torch.library.custom_op("dynaxla_test::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("nothing is computed")


@torch.compiler.disable
def call_without_fake(x: torch.Tensor) -> torch.Tensor:
    return without_fake(x)


def test_an_op_in_eager_without_a_fake_kernel_is_an_error_with_its_line() -> None:
    with pytest.raises(NotComputedError, match=r"without_fake.*no fake kernel") as caught:
        compile_on_cpu(lambda x: call_without_fake(x.sin()).cos(), torch.randn(4))
    assert caught.value.frame is not None
    assert caught.value.frame.endswith("in call_without_fake: return without_fake(x)")


@pytest.mark.parametrize("train", [False, True])
def test_what_python_does_between_graphs_goes_on_without_values(train: bool) -> None:
    seen: list[torch.Tensor] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        y = x @ x.mT
        torch._dynamo.graph_break()
        seen.append(y)
        print(y)
        noise = torch.compiler.disable(torch.randn)(y.shape)
        return (y * noise).softmax(-1)[:, 1:].mT

    x = torch.randn(2, 4, 3, requires_grad=train)
    reports = compile_on_cpu(model, x, train=train)
    assert [report.kind for report in reports].count("program") == 2
    assert (seen[0].shape, seen[0].dtype, seen[0].requires_grad) == ((2, 4, 4), torch.float32, train)
