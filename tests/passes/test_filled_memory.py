"""Memory that nobody wrote, where torch is to be deterministic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint8, torch.int64]


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return (
        torch.empty(x.shape[0], dtype=dtype),
        torch.empty_like(x, dtype=dtype),
        x.new_empty(2, x.shape[1], dtype=dtype),
        x.new_empty_strided((2, 3), (1, 2), dtype=dtype),
        torch.empty_strided((2, 3), (8, 2), dtype=dtype),
        torch.empty_permuted((2, 3), (1, 0), dtype=dtype),
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_new_memory_is_filled_as_in_eager(dtype: torch.dtype, dynamic: bool, deterministic: None) -> None:
    x = torch.randn(4, 6).t()
    results = torch.compile(make, backend="dynaxla", dynamic=dynamic)(x, dtype)
    for result, expected in zip(results, make(x, dtype), strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)
        assert result.stride() == expected.stride()


def test_elements_that_are_written_are_not_filled(deterministic: None) -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(4, 3)
        out[1:3] = x
        return out

    x = torch.randn(2, 3)
    result = torch.compile(write, backend="dynaxla")(x)
    assert torch.equal(result[1:3], x)
    assert result[0].isnan().all()
    assert result[3].isnan().all()


def test_a_function_is_captured_again_when_torch_becomes_deterministic() -> None:
    compiled = torch.compile(lambda x: torch.empty_like(x), backend="dynaxla")
    x = torch.randn(3)
    assert not compiled(x).isnan().any()
    torch.use_deterministic_algorithms(True)
    try:
        assert compiled(x).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
