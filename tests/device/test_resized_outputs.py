"""A tensor of `out=` that takes other sizes keeps its memory, which operands and views may have, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dynaxla
from tests.device.test_argument_errors import assert_as_on_the_cpu, at, x

D = "dynaxla"
Call = Callable[[str], Any]


def _with(made: tuple[Tensor, ...], write: Callable[..., Any]) -> Tensor:
    """All elements of the tensors that a write may have changed, in one."""
    write(*made)
    return torch.cat([each.reshape(-1) for each in made])


def _then(view: Tensor, given: Tensor) -> Tensor:
    """What a view has after a later write to the tensor that a call gave."""
    given.add_(1)
    return view


GIVES: dict[str, Call] = {
    "a view": lambda d: (lambda v: _with((v, v.view(2, 3)), lambda v, _: torch.add(x(d, 2, 2), 1, out=v)))(x(d, 6)),
    "a part": lambda d: _with((x(d, 6),), lambda x: torch.add(x[:2], 1, out=x[3:4])),
    "over its operand": lambda d: _with((x(d, 6),), lambda x: torch.add(x[:3], 1, out=x[3:4])),
    "more than it has": lambda d: _with((x(d, 2),), lambda v: torch.add(x(d, 2, 2), 1, out=v)),
    "nothing before": lambda d: _with((x(d, 0),), lambda v: torch.add(x(d, 2, 2), 1, out=v)),
    "a sum into its operand": lambda d: (lambda x: torch.sum(x, 0, keepdim=True, out=x))(x(d, 3, 2)),
    "written again": lambda d: (lambda v: _then(v.view(2, 2), torch.neg(x(d, 1, 3), out=v)))(x(d, 4)),
    "a view of nothing": lambda d: (lambda v: torch.stack((v, v), out=v))(x(d, 0)),
}
RAISES: dict[str, Call] = {
    "cat of nothing and a tensor": lambda d: (lambda v: torch.cat((v, x(d, 4, 6)), out=v))(x(d, 0)),
    "cat of a tensor and nothing": lambda d: (lambda v: torch.cat((v, x(d, 0)), out=v[:2]))(x(d, 4, 6)),
    "gather over its index": lambda d: (lambda i: torch.gather(i.clone(), 0, i[1:], out=i[:1]))(at(d, 2, 1, 0)),
    "a broadcast operand": lambda d: (lambda v: torch.add(v, x(d, 3), out=v))(x(d, 1)),
    "too many categories": lambda d: torch.multinomial(torch.ones(2**24 + 1, device=d), 3),
    "too many categories, replaced": lambda d: torch.multinomial(torch.ones(1, 2**24 + 1, device=d), 3, True),
    "a table of no dims": lambda d: F.embedding(at(d, 0, 1), torch.ones((), device=d)),
}


@pytest.mark.parametrize("name", GIVES)
def test_an_output_of_other_sizes(name: str) -> None:
    assert assert_as_on_the_cpu(GIVES[name]) == "gives"


@pytest.mark.parametrize("name", RAISES)
def test_what_eager_refuses(name: str) -> None:
    assert assert_as_on_the_cpu(RAISES[name]) != "gives"


def test_an_output_without_elements_is_made_by_the_device() -> None:
    before = dict(dynaxla.read_metrics().host_ops)
    out = torch.empty(0, device=D)
    torch.add(torch.ones(5, 7, device=D), 1, out=out)
    assert out.tolist() == [[2.0] * 7] * 5
    assert dict(dynaxla.read_metrics().host_ops) == before


def test_lazy_ops_keep_the_memory_too() -> None:
    def written() -> list[float]:
        whole = torch.zeros(6, device=D)
        with pytest.warns(UserWarning, match="was resized"):
            torch.add(torch.ones(2, device=D), 1, out=whole[3:4])
        return whole.tolist()

    with dynaxla.device_mode("fused"):
        assert written() == [0, 0, 0, 2, 2, 0]


def test_a_tensor_that_a_call_has_twice_is_written_once() -> None:
    one = torch.tensor([1.0, 2.0, 3.0], device=D)
    before = dynaxla.read_metrics().host_ops.get("aten.cumsum.out", 0), one._version
    torch.cumsum(one, 0, out=one)
    assert one.tolist() == [1, 3, 6]
    assert (dynaxla.read_metrics().host_ops["aten.cumsum.out"], one._version) == (before[0] + 1, before[1] + 1)
