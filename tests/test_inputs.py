"""Whatever a caller may pass or return."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import dynaxla
from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _compile(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend="dynaxla", options=options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@torch.no_grad()
def test_float_dtypes(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x @ y, torch.softmax(x, -1), (x * 2 + 1).sum(), x > y.t(), torch.where(x > 0, x, y.t())

    x, y = torch.randn(4, 6, dtype=dtype), torch.randn(6, 4, dtype=dtype)
    for actual, expected in zip(_compile(f)(x, y), f(x, y), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@torch.no_grad()
def test_integer_dtypes_keep_all_bits(dtype: torch.dtype) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, x * 3, x.sum(), x // 3, x == x.max(), x.to(torch.float64) / 7

    info = torch.iinfo(dtype)
    x = torch.tensor([info.min, info.max, 0, 1, 5, info.max - 1], dtype=dtype)
    for actual, expected in zip(_compile(f)(x), f(x), strict=True):
        assert_close(actual, expected)


@torch.no_grad()
def test_int64_beyond_32_bits_and_complex() -> None:
    big = torch.tensor([2**40 + 1, -(2**50)])
    assert torch.equal(_compile(lambda x: x * 5 - 2)(big), big * 5 - 2)
    z = torch.randn(3, 4, dtype=torch.complex64)

    def f(z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return z * z.conj(), z.abs(), z + 1j, z.sum()

    for actual, expected in zip(_compile(f)(z), f(z), strict=True):
        assert_close(actual, expected)
    assert_close(_compile(lambda z: z * 2)(z.conj()), z.conj() * 2)


@torch.no_grad()
def test_bool_results_and_masks() -> None:
    x = torch.randn(5, 5)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mask = (x > 0) & ~(x > 1)
        return mask, mask.any(), mask.all(dim=0), mask.sum(), x.masked_fill(mask, -1.0)

    for actual, expected in zip(_compile(f)(x), f(x), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
@torch.no_grad()
def test_a_mask_times_nan_or_infinity_is_nan(dtype: torch.dtype) -> None:
    def f(mask: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return mask * x, mask.to(dtype) * x, mask / 0, mask // 0.0, torch.div(mask, 0.0, rounding_mode="trunc")

    mask, x = torch.tensor([True, False, True, False]), torch.tensor([torch.inf, torch.inf, torch.nan, torch.nan])
    for actual, expected in zip(_compile(f)(mask, x.to(dtype)), f(mask, x.to(dtype)), strict=True):
        assert_close(actual, expected)


@torch.no_grad()
def test_strides_in_and_out() -> None:
    """Transposed, sliced, expanded, channels-last, flipped-by-view and misaligned inputs; eager's strides come back."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, x.transpose(0, 1), (x + 1).transpose(0, 1), x.sum(0)

    base = torch.randn(8, 9)
    flat = torch.randn(37)
    for x in (base.t(), base[1::2, 2:7], base[:1].expand(4, 9), flat[1:].view(6, 6), base[3:5]):
        for actual, expected in zip(_compile(f)(x), f(x), strict=True):
            assert_close(actual, expected)
        torch._dynamo.reset()
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    scaled = _compile(lambda x: torch.relu(x))(image)
    assert_close(scaled, torch.relu(image))
    assert scaled.stride() == torch.relu(image).stride()
    heads = _compile(lambda x: (x + 1).view(2, 3, 4, 5).transpose(1, 2))(torch.randn(2, 3, 20))
    assert heads.stride() == (60, 5, 20, 1)


@pytest.mark.parametrize(
    "move", [torch.Tensor.t_, lambda y: y.as_strided_((2, 2), (1, 2), 5)], ids=["t_", "as_strided_"]
)
@torch.no_grad()
def test_an_input_that_changes_its_strides_keeps_its_place_in_memory(move: Any) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        move(x.contiguous())  # x itself
        return x * 2

    expected, x = (torch.arange(12.0)[3:9].view(3, 2) for _ in range(2))
    assert_close(_compile(f)(x), f(expected))
    assert_close(x, expected)
    assert (x.stride(), x.storage_offset()) == (expected.stride(), expected.storage_offset())


@torch.no_grad()
def test_aliasing_inputs_and_mutation() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        y.mul_(2)
        return x + y

    base, reference = torch.arange(12.0), torch.arange(12.0)
    assert_close(_compile(f)(base[:8], base[4:]), f(reference[:8], reference[4:]))
    assert_close(base, reference)
    net = torch.nn.Linear(4, 4)
    assert_close(_compile(lambda x: net(x) + net.weight)(net.weight), net(net.weight) + net.weight)


@torch.no_grad()
def test_zero_size_and_zero_dim() -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, x.sum(), torch.cat([x, x])

    for x in (torch.randn(0), torch.randn(0, 3), torch.randn(2, 0, 3)):
        for actual, expected in zip(_compile(f)(x), f(x), strict=True):
            assert_close(actual, expected)
        torch._dynamo.reset()
    scalar = torch.tensor(2.5)
    assert_close(_compile(lambda x: x * x + 1)(scalar), scalar * scalar + 1)
    matrix = torch.randn(3, 0) @ torch.randn(0, 4)
    assert_close(_compile(torch.mm)(torch.randn(3, 0), torch.randn(0, 4)), matrix)


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None


@torch.no_grad()
def test_structures_nones_and_identities() -> None:
    def f(pair: Pair, table: dict[str, torch.Tensor]) -> dict[str, Any]:
        doubled = pair.left * 2
        return {"pair": Pair(doubled, None), "same": doubled, "again": doubled, "given": pair.left, "t": table["k"] + 1}

    x, table = torch.randn(3), {"k": torch.ones(2)}
    found = _compile(f)(Pair(x, None), table)
    assert found["pair"].right is None
    assert found["given"] is x
    assert found["same"] is found["again"]
    assert_close(found["pair"].left, x * 2)
    assert_close(found["t"], torch.full((2,), 2.0))


@torch.no_grad()
def test_numbers_as_arguments(recorder: Recorder) -> None:
    def f(x: torch.Tensor, scale: float, flag: bool, power: int) -> torch.Tensor:
        return (x * scale + (1 if flag else -1)) ** power

    compiled = _compile(f)
    x = torch.rand(4)
    compiled(x, 0.5, True, 2), compiled(x, 0.25, True, 2)
    with recorder.expect(compiles=0):
        for scale in (0.1, 3.7, -2.0, 1e6):
            assert_close(compiled(x, scale, True, 2), f(x, scale, True, 2))
    for flag in (True, False):
        for power in (2, 3, 4):
            assert_close(compiled(x, 0.3, flag, power), f(x, 0.3, flag, power))


@torch.no_grad()
def test_without_buckets_sizes_that_vary_run_at_their_exact_shape(recorder: Recorder) -> None:
    def f(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.softmax(x @ x.t(), -1).mean(0) * x.shape[0], x.shape[0] + 1

    compiled = _compile(f, bucketing="off")
    compiled(torch.randn(4, 3)), compiled(torch.randn(5, 3))
    with recorder.expect(graphs=0, compiles=3):
        for n in (6, 7, 8, 6, 7, 8):
            x = torch.randn(n, 3)
            (actual, size), (expected, wanted) = compiled(x), f(x)
            assert_close(actual, expected)
            assert size == wanted


@torch.no_grad()
def test_executables_are_bounded(recorder: Recorder, caplog: pytest.LogCaptureFixture) -> None:
    compiled = _compile(lambda x: x * 2 + 1, max_executables=2, bucketing="off")
    for n in (3, 4, 5, 6, 7):
        x = torch.randn(n)
        assert_close(compiled(x), x * 2 + 1)
    with recorder.expect(evictions=1, compiles=1):
        compiled(torch.randn(4))
    told = [r.getMessage() for r in caplog.records if "max_executables" in r.getMessage()]
    assert len(told) == 1, "once, not at every call"
    assert "has the sizes 4, 5, 6" in told[0]


@torch.no_grad()
def test_nothing_to_compute_compiles_nothing(recorder: Recorder) -> None:
    with recorder.expect(compiles=0):
        x = torch.randn(3)
        assert _compile(lambda x: (x, x.shape[0]))(x)[0] is x


def test_gradients_and_inference_mode() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    x = torch.randn(3, 5)
    compiled = _compile(net)
    compiled(x).square().sum().backward()
    found = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(x).square().sum().backward()
    for gradient, parameter in zip(found, net.parameters(), strict=True):
        assert_close(gradient, parameter.grad)
    with torch.no_grad():
        assert_close(compiled(x), net(x))
    with torch.inference_mode():
        assert_close(compiled(x), net(x))


@torch.no_grad()
def test_results_are_the_callers_own() -> None:
    """Writing to a result, or to an input after the call, changes nothing else."""
    compiled = _compile(lambda x: (x + 1, x + 2))
    x = torch.zeros(64)
    first, second = compiled(x)
    x.fill_(9)
    first.fill_(5)
    assert torch.equal(second, torch.full((64,), 2.0))
    again, _ = compiled(torch.zeros(64))
    assert torch.equal(again, torch.ones(64))
    assert torch.equal(first, torch.full((64,), 5.0))


@pytest.mark.parametrize("dynamic", [False, True])
def test_empty_results_may_be_resized_by_eager(dynamic: bool) -> None:
    def sort(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = torch.empty(0), torch.empty(0, dtype=torch.int64)
        torch.sort(x * 2, out=(values, places))  # breaks the graph, as it resizes them
        return values, places, x[:0]

    x = torch.randn(5)
    for mine, eager in zip(torch.compile(sort, backend="dynaxla", dynamic=dynamic)(x), sort(x), strict=True):
        assert_close(mine, eager)
    with torch.no_grad():
        empty = torch.compile(lambda x: torch.empty(0, 3) + x.sum(), backend="dynaxla", dynamic=dynamic)
        assert empty(x).resize_(7).shape == (7,)


@torch.no_grad()
def test_threads_share_one_compiled_model(recorder: Recorder) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    compiled = _compile(net)
    inputs = [torch.randn(8, 16) for _ in range(8)]
    compiled(inputs[0])
    failures: list[str] = []

    def call(x: torch.Tensor) -> None:
        with torch.no_grad():
            expected = net(x)
            for _ in range(50):
                if not torch.allclose(compiled(x), expected, atol=1e-5):
                    failures.append("wrong")

    with recorder.expect(compiles=0):
        threads = [threading.Thread(target=call, args=(x,)) for x in inputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@torch.no_grad()
def test_one_compiled_function_first_called_by_many_threads() -> None:
    compiled = _compile(lambda x: torch.sin(x) * 3)
    x = torch.randn(10)
    results: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            results.append(compiled(x))

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    for result in results:
        assert_close(result, torch.sin(x) * 3)


def test_backend_is_found_by_name() -> None:
    assert "dynaxla" in torch._dynamo.list_backends()
    assert dynaxla.__version__
