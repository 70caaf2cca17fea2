"""What is written to tensors that are not row-major: the ops' results lie otherwise than the memory in which they go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import dynaxla
from tests.tolerances import assert_close

DEVICE = "dynaxla"
Write = Callable[[Tensor, Callable[..., Tensor]], Any]

WRITES: Mapping[str, Write] = {
    "tril_": lambda x, on: x.tril_(-1),
    "triu_": lambda x, on: x.triu_(),
    "cumsum_": lambda x, on: x.cumsum_(1),
    "cumprod_": lambda x, on: x.cumprod_(0),
    "index_fill_": lambda x, on: x.index_fill_(0, on([1]), 3.0),
    "index_add_": lambda x, on: x.index_add_(0, on([1]), on([[1.0, 2, 3, 4]])),
    "index_copy_": lambda x, on: x.index_copy_(1, on([1]), on([[1.0], [2], [3], [4]])),
    "index_put_": lambda x, on: x.index_put_((on([1]),), on(7.0)),
    "put_": lambda x, on: x.put_(on([1, 6]), on([7.0, 8])),
    "scatter_": lambda x, on: x.scatter_(0, on([[0, 1, 2, 3]]), 5.0),
    "scatter_reduce_": lambda x, on: x.scatter_reduce_(0, on([[0, 1, 2, 3]]), on([[1.0, 2, 3, 4]]), "sum"),
    "masked_fill_": lambda x, on: x.masked_fill_(x > 0, 1.0),
    "masked_scatter_": lambda x, on: x.masked_scatter_(x > 0, on([float(i) for i in range(16)])),
    "setitem": lambda x, on: x.__setitem__((slice(1, 3), 2), 9.0),
    "fill_diagonal_": lambda x, on: x.fill_diagonal_(2.0),
    "add_": lambda x, on: x.add_(on([[1.0, 2, 3, 4]])),
    "copy_": lambda x, on: x.copy_(on([[1.0, 2, 3, 4]]).expand(4, 4).cumsum(0)),
    "copy_ of itself": lambda x, on: x.copy_(x.flip(0)),
    "renorm_": lambda x, on: x.renorm_(2, 0, 1.0),
    "lerp_": lambda x, on: x.lerp_(on([[1.0, 2, 3, 4]]).expand(4, 4), 0.3),
    "addmm_": lambda x, on: x.addmm_(on([[1.0, 2, 3, 4]]).T, on([[1.0, 2, 3, 4]])),
    "baddbmm_": lambda x, on: x[None].baddbmm_(on([[[1.0, 2, 3, 4]]]).mT, on([[[1.0, 2, 3, 4]]])),
    "addr_": lambda x, on: x.addr_(on([1.0, 2, 3, 4]), on([1.0, 2, 3, 4])),
    "a part's tril_": lambda x, on: x[1:, :3].tril_(),
    "a part's cumsum_": lambda x, on: x[1:, :3].cumsum_(0),
    "mm out": lambda x, on: torch.mm(on([[1.0, 2, 3, 4]]).T, on([[1.0, 2, 3, 4]]), out=x),
    "cumsum out": lambda x, on: torch.cumsum(on([[1.0, 2, 3, 4]]).expand(4, 4), 0, out=x),
    "cat out": lambda x, on: torch.cat([on([[1.0, 2, 3, 4]]), on([[5.0, 6, 7, 8]]).expand(3, 4)], out=x),
    "where out": lambda x, on: torch.where(on([[True], [False], [True], [False]]), on([1.0, 2, 3, 4]), on(0.5), out=x),
    "kron out": lambda x, on: torch.kron(on([[1.0, 2], [3, 4]]), on([[1.0, 2], [3, 4]]), out=x),
    "sort out": lambda x, on: torch.sort(on([[4.0, 2, 3, 1]]).expand(4, 4), out=(x, on([[0] * 4] * 4).t())),
}


def run(write: Write, base: Tensor, device: str) -> tuple[Tensor, Callable[[Tensor], None]]:
    """The tensor that is written to, which is transposed, and what writes to it."""

    def writing(x: Tensor) -> None:
        write(x, lambda data: torch.tensor(data, device=device))

    return base.clone().to(device).t(), writing


def in_eager(write: Callable[[Tensor], None], x: Tensor) -> None:
    write(x)


def in_fused(write: Callable[[Tensor], None], x: Tensor) -> None:
    with dynaxla.device_mode("fused"):
        write(x)


def in_a_graph(write: Callable[[Tensor], None], x: Tensor) -> None:
    torch._dynamo.reset()
    torch.compile(write, backend="dynaxla")(x)


@pytest.mark.parametrize("way", [in_eager, in_fused, in_a_graph])
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_writes_to_a_transposed_tensor(write: Write, way: Callable[[Any, Tensor], None]) -> None:
    torch.manual_seed(0)
    base = torch.randn(4, 4)
    expected, writing = run(write, base, "cpu")
    writing(expected)
    found, writing = run(write, base, DEVICE)
    way(writing, found)
    assert_close(found.cpu(), expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("write", [WRITES["tril_"], WRITES["cumsum_"], WRITES["lerp_"], WRITES["addmm_"]])
def test_writes_to_a_transposed_tensor_of_the_host(write: Write) -> None:
    torch.manual_seed(0)
    base = torch.randn(4, 4)
    expected, writing = run(write, base, "cpu")
    writing(expected)
    found, writing = run(write, base, "cpu")
    torch._dynamo.reset()
    torch.compile(writing, backend="dynaxla", options={"fallback": "error"})(found)
    assert_close(found, expected)
