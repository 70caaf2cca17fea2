"""Small arguments of the host are copied into memory that lasts: no call may see another's, and none may be changed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dynaxla.programs.program import Program
from dynaxla.programs.staged_arguments import MOST_BYTES, StagedArguments
from dynaxla.runtime.host_padding import PaddedShape
from dynaxla.runtime.pjrt_clients import cpu_client
from tests.tolerances import assert_close

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.complex128 if dtype.is_complex else torch.float64).mul(3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_see_their_own_arguments(dtype: torch.dtype) -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.where(x == y, x, y), x.reshape(-1)

    compiled = torch.compile(model, backend="dynaxla")
    given = [(make(dtype, 3, 5), make(dtype, 3, 5)) for _ in range(4)]
    kept = [(x.clone(), y.clone()) for x, y in given]
    results = [compiled(x, y) for x, y in given]
    for found, (x, y), (was_x, was_y) in zip(results, given, kept, strict=True):
        assert torch.equal(x, was_x)
        assert torch.equal(y, was_y)
        for mine, theirs in zip(found, model(was_x, was_y), strict=True):
            assert_close(mine, theirs)


LAYOUTS = {
    "transposed": lambda: torch.randn(5, 3).t(),
    "every second": lambda: torch.randn(3, 10)[:, ::2],
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "conjugate": lambda: torch.randn(3, 5, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, 5, dtype=torch.complex64).conj().imag,
    "misaligned": lambda: torch.randn(16)[1:].reshape(3, 5),
    "empty": lambda: torch.randn(0, 5),
    "scalar": lambda: torch.randn(()),
    "large": lambda: torch.randn(MOST_BYTES // 4 + 1),
    "as large as can be": lambda: torch.randn(MOST_BYTES // 4),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
def test_layouts_of_arguments(layout: str, dynamic: bool, is_kept: bool) -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, y + 1

    compiled = torch.compile(model, backend="dynaxla", dynamic=dynamic)
    x, y = LAYOUTS[layout](), torch.randn(2, 2)
    for _ in range(5):
        x, y = (x, y.add_(1)) if is_kept else (LAYOUTS[layout](), y)
        for mine, theirs in zip(compiled(x, y), model(x, y), strict=True):
            assert_close(mine, theirs)
            assert mine.stride() == theirs.stride()


def test_padding_has_what_earlier_calls_left() -> None:
    compiled = torch.compile(lambda x, w: (x.softmax(0), x.amax(0) + w, x.cumsum(0)), backend="dynaxla", dynamic=True)
    for size in (7, 3, 5, 2, 7, 6):
        x, w = torch.randn(size, 4), torch.randn(4)
        found = compiled(x, w)
        for mine, theirs in zip(found, (x.softmax(0), x.amax(0) + w, x.cumsum(0)), strict=True):
            assert_close(mine, theirs)
        compiled(torch.full((size, 4), torch.nan), w)  # NaN is in the memory of what is padding next


def test_threads_have_memory_of_their_own() -> None:
    compiled = torch.compile(lambda x, y: (x * y).sum(1) - y[:, 0], backend="dynaxla")
    compiled(torch.randn(8, 8), torch.randn(8, 8))
    wrong: list[int] = []

    def work(number: int) -> None:
        x, y = torch.full((8, 8), float(number)), torch.full((8, 8), 2.0)
        for _ in range(300):
            if not torch.equal(compiled(x, y), torch.full((8,), 16.0 * number - 2)):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


def test_gradients_and_inference_mode_share_memory() -> None:
    weight = torch.randn(4, requires_grad=True)
    compiled = torch.compile(lambda x, w: x * w.exp(), backend="dynaxla")
    for _ in range(2):
        with torch.inference_mode():
            x = torch.randn(4)
            assert_close(compiled(x, weight), x * weight.exp())
        with torch.no_grad():
            x = torch.randn(4)
            assert_close(compiled(x, weight), x * weight.exp())
        x = torch.randn(4, requires_grad=True)
        compiled(x, weight).sum().backward()
        assert x.grad is not None
        assert_close(x.grad, weight.detach().exp())


def stage(inputs: Any, args: list[Tensor]) -> tuple[StagedArguments, Program]:
    program = Program(None, inputs, ())
    return StagedArguments(cpu_client(), program, args, ()), program


def test_other_shapes_and_dtypes_are_not_copied() -> None:
    staged, program = stage(((0, None, None),), [torch.zeros(3, 4)])
    assert staged.fill(program, [torch.randn(3, 4)], ())
    for other in (
        torch.randn(1, 4),
        torch.randn(4),
        torch.randn(()),
        torch.randn(3, 4).double(),
        torch.ones(3, 4).int(),
    ):
        assert not staged.fill(program, [other], ())


def test_permuted_and_padded_arguments_lie_in_the_corner() -> None:
    tensor = torch.randn(2, 3).t()  # [3, 2], row-major as [2, 3]
    staged, program = stage(((0, (1, 0), PaddedShape.of((4, 8))),), [tensor])
    (buffer,) = staged.buffers
    for size in (2, 3):
        tensor = torch.randn(size, 3).t()
        assert staged.fill(program, [tensor], ())
        assert torch.equal(cpu_client().to_tensor(buffer)[:size, :3], tensor.t())


def test_a_result_is_not_changed_by_the_next_call() -> None:
    compiled = torch.compile(lambda x: (x.clone(), x, x[1:], x.view(2, 2)), backend="dynaxla")
    x = torch.arange(4.0)
    first = compiled(x)
    compiled(torch.full((4,), 9.0))
    for mine, theirs in zip(first, (x, x, x[1:], x.view(2, 2)), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(x, torch.arange(4.0))
