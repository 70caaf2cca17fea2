"""Results have the dtypes of eager's where torch's fake kernels say others: compiled, and on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynaxla
from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

aten = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


def normalize(x: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    """Calls every normalization whose results are more than one, with parameters and without, of x [2, 4, 4]."""
    results: list[Tensor] = []
    for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
        results += aten.native_layer_norm(x, [4], w, b, 1e-5)
        results += aten.native_group_norm(x, w, b, 2, 4, 4, 2, 1e-5)
        results += aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)
        results += aten._native_batch_norm_legit_no_training(x, w, b, bias, weight, 0.1, 1e-5)
        for training in (True, False):
            results += aten._native_batch_norm_legit_functional(x, w, b, bias, weight, training, 0.1, 1e-5)
            results += aten.native_batch_norm(x, w, b, bias.clone(), weight.clone(), training, 0.1, 1e-5)
        results += aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)
    return results


def operands(dtype: torch.dtype, parameters: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(sizes, generator=generator) for sizes in ((2, 4, 4), (4,), (4,)))
    return x.to(dtype), (weight.abs() + 1).to(parameters), bias.to(parameters)


@pytest.mark.parametrize("dtype", sorted(HALVES, key=str), ids=str)
@pytest.mark.parametrize("parameters", ["float32", "the input's"])
def test_as_eager(dtype: torch.dtype, parameters: str, recorder: Recorder) -> None:
    given = operands(dtype, torch.float32 if parameters == "float32" else dtype)
    expected = normalize(*given)
    before = recorder.snapshot()
    found = torch.compile(normalize, backend="dynaxla")(*given)
    assert recorder.snapshot().eager_ops == before.eager_ops
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is theirs.dtype
        assert_close(mine, theirs)


@pytest.mark.parametrize("parameters", ["float32", "the input's"])
def test_as_eager_on_the_device(parameters: str) -> None:
    dynaxla.use("cpu")
    given = operands(torch.bfloat16, torch.float32 if parameters == "float32" else torch.bfloat16)
    expected = normalize(*given)
    found = normalize(*(each.to("dynaxla") for each in given))
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is theirs.dtype
        assert_close(mine.cpu(), theirs)


def test_gradients_read_statistics_in_float32(recorder: Recorder) -> None:
    """Of values far from zero, whose mean and deviation lose most of their digits in 16 bits.

    Eager rounds the terms of the weight's gradient, which is float32; the compiled one is float64's.
    """
    given = operands(torch.bfloat16, torch.float32)
    given = given[0] + 100, *given[1:]
    before = recorder.snapshot()

    def gradients(run: Callable[..., Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        leaves = [each.clone().requires_grad_() for each in given]
        y = run(leaves[0], [4], *leaves[1:])
        (y * torch.arange(4, dtype=y.dtype)).sum().backward()
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    found = gradients(torch.compile(F.layer_norm, backend="dynaxla"), given)
    assert recorder.snapshot().eager_ops == before.eager_ops
    exact = gradients(F.layer_norm, [each.double() for each in given])
    for mine, eager, reference in zip(found, gradients(F.layer_norm, given), exact, strict=True):
        assert mine.dtype is eager.dtype
        assert_close(mine, reference.to(mine.dtype))


def test_of_parameters_that_eager_refuses() -> None:
    x, weight, _ = operands(torch.bfloat16, torch.float32)
    with pytest.raises(RuntimeError):
        torch.compile(aten.native_layer_norm, backend="dynaxla")(x, [4], weight, weight.to(x.dtype), 1e-5)


@pytest.mark.parametrize("device", ["cpu", "dynaxla"])
def test_ldexp_of_whole_numbers_by_a_16_bit_number(device: str, recorder: Recorder) -> None:
    dynaxla.use("cpu")
    whole = [torch.tensor([3, 0, 100]).to(dtype) for dtype in (torch.uint8, torch.int64, torch.bool)]
    powers = [torch.tensor(value, dtype=dtype) for dtype in HALVES for value in (2.5, -3.0, 20.0)]

    def scale(whole: list[Tensor], powers: list[Tensor]) -> list[Tensor]:
        return [torch.ldexp(x, power) for each in whole for x in (each, each[0]) for power in powers]

    run = torch.compile(scale, backend="dynaxla") if device == "cpu" else scale
    before = recorder.snapshot()
    found = run([x.to(device) for x in whole], [power.to(device) for power in powers])
    assert recorder.snapshot().eager_ops == before.eager_ops
    for mine, theirs in zip(found, scale(whole, powers), strict=True):
        assert mine.dtype is theirs.dtype
        assert_close(mine.cpu(), theirs)
