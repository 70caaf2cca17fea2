"""Arguments are read where they lie by buffers that earlier calls made of the same memory: whatever lies there by now."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dynaxla.programs.known_memory import MOST_ADDRESSES, MOST_MISFITS, KnownMemory
from dynaxla.programs.program import Program
from dynaxla.runtime.pjrt_clients import cpu_client
from tests.programs.test_staged_arguments import DTYPES, make
from tests.tolerances import assert_close


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def know(*orders: tuple[int, ...] | None) -> KnownMemory:
    return KnownMemory(cpu_client(), Program(None, tuple((i, order, None) for i, order in enumerate(orders)), ()))


def learn(known: KnownMemory, *args: Tensor) -> Sequence[Any]:
    """The buffers of arguments that come again and again: the first call is compared with, the next two miss."""
    assert [known.find(args) for _ in range(3)] == [None] * 3
    found = known.find(args)
    assert found is not None
    return found


def read(buffer: Any) -> Tensor:
    return cpu_client().to_tensor(buffer).clone()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_there_now_is_read(dtype: torch.dtype) -> None:
    known, x = know(None), make(dtype, 3, 5)
    (buffer,) = learn(known, x)
    for _ in range(3):
        x.copy_(make(dtype, 3, 5))
        assert known.find([x]) == [buffer]
        assert torch.equal(read(buffer), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_in_the_same_memory(dtype: torch.dtype) -> None:
    def model(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.where(x == y, x, y), x.reshape(-1), y

    compiled = torch.compile(model, backend="dynaxla")
    x, y = make(dtype, 3, 5), make(dtype, 3, 5)
    kept = []
    for _ in range(6):
        x.copy_(make(dtype, 3, 5))
        y.copy_(make(dtype, 3, 5))
        kept.append((compiled(x, y)[0], model(x, y)[0]))
    for mine, theirs in kept:  # no result changed with the arguments
        assert_close(mine, theirs)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: x.flatten()[:8:2].view(4),
    "other sizes": lambda x: x.view(2, 8),
    "fewer": lambda x: x[:2],
    "other dtype": lambda x: x.view(torch.int32),
    "negative": lambda x: torch._neg_view(x),
    "with a gradient": lambda x: x.detach().requires_grad_(),
    "of a subclass": lambda x: x.as_subclass(type("Own", (Tensor,), {})),
    "inference": lambda x: _infer(x),
}


def _infer(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.empty(0).set_(x.untyped_storage(), 0, (4, 4), (4, 1))


@pytest.mark.parametrize("other", OTHERS)
def test_another_tensor_of_the_same_memory_is_not_taken_for_it(other: str) -> None:
    known, x = know(None), torch.randn(4, 4)
    learn(known, x)
    made = OTHERS[other](x)
    assert made.data_ptr() == x.data_ptr()
    assert known.find([made]) is None
    assert known.find([x]) is not None


def test_tensors_that_lie_otherwise_are_never_known() -> None:
    parts = torch.randn(4, 8, dtype=torch.complex64)
    for x in (torch.randn(4, 4).t(), parts.conj(), parts.conj().imag, torch.empty(0), torch.ones(4).to_sparse(), 3):
        known = know(None)
        for _ in range(2 * MOST_MISFITS):
            assert known.find([x]) is None


def test_misaligned_memory_is_never_known() -> None:
    known, x = know(None), torch.randn(17)[1:]
    for _ in range(5):
        assert known.find([x]) is None


def test_permuted_arguments_are_read_row_by_row() -> None:
    known, x = know((1, 0)), torch.randn(3, 4).t()
    (buffer,) = learn(known, x)
    assert torch.equal(read(buffer), x.t())


def test_other_tensors_are_expected_if_they_keep_coming() -> None:
    known = know(None)
    learn(known, torch.randn(4))
    x = torch.randn(4, requires_grad=True)
    found = [known.find([x]) for _ in range(MOST_MISFITS + 3)]
    assert found[-1] is not None
    assert known.find([torch.randn(4)]) is None


def test_no_memory_is_kept_and_addresses_are_few() -> None:
    known = know(None)
    held = [torch.randn(4) for _ in range(3 * MOST_ADDRESSES)]
    for x in held:
        assert known.find([x]) is None
    for x in held:
        for _ in range(3):
            known.find([x])
    (addresses,) = known._expected.buffers
    assert 0 < len(addresses) <= MOST_ADDRESSES
    gone = [weakref.ref(x.untyped_storage()) for x in held]
    del held, x
    gc.collect()
    assert not any(ref() for ref in gone)


def test_a_fork_forgets_the_parents_buffers() -> None:
    known, x = know(None), torch.randn(4)
    learn(known, x)
    known.after_fork()
    learn(known, x)


def test_an_argument_may_come_twice_and_move() -> None:
    compiled = torch.compile(lambda x, y, z: (x - 2 * y, y + z), backend="dynaxla")
    a, b, c = torch.randn(5), torch.randn(5), torch.randn(5)
    for x, y, z in [(a, b, c), (a, b, c), (a, b, c), (b, a, c), (c, b, a), (b, a, c), (c, b, a), (a, b, c)] * 2:
        for mine, theirs in zip(compiled(x, y, z), (x - 2 * y, y + z), strict=True):
            assert_close(mine, theirs)
        a, b = b, a
        c = torch.randn(5)


def test_arguments_that_are_written_to() -> None:
    def model(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return x + y

    compiled = torch.compile(model, backend="dynaxla")
    x, y = torch.randn(6), torch.randn(6)
    theirs = x.clone()
    for _ in range(5):
        assert_close(compiled(x, y), model(theirs, y))
        assert_close(x, theirs)


def test_threads_read_their_own_arguments() -> None:
    compiled = torch.compile(lambda x, y: (x * y).sum(1) - y[:, 0], backend="dynaxla")
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(300):
            x, y = torch.full((8, 8), float(number)), torch.full((8, 8), 2.0)
            if not torch.equal(compiled(x, y), torch.full((8,), 16.0 * number - 2)):
                wrong.append(number)

    compiled(torch.ones(8, 8), torch.ones(8, 8))
    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
