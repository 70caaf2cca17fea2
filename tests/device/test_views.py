"""Views share memory on the device as they do on the host: chains of views, with writes into any of them, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal import composite_compliance

import dynaxla

Step = Callable[[torch.Tensor], torch.Tensor]


def _views(x: torch.Tensor, data: Any) -> Step | None:
    """A view of a tensor of these sizes, drawn."""
    if x.dim() == 0:
        return lambda t: t.unsqueeze(0)
    dim = data.draw(st.integers(0, x.dim() - 1))
    size = x.shape[dim]
    start = data.draw(st.integers(0, max(size - 1, 0)))
    end = data.draw(st.integers(min(start + 1, size), size))
    step = data.draw(st.integers(1, 3))
    other = data.draw(st.integers(0, x.dim() - 1))
    kinds: list[Step | None] = [
        lambda t: t.narrow(dim, start, end - start),
        lambda t: t[(slice(None),) * dim + (slice(start, end, step),)],
        lambda t: t.transpose(dim, other),
        (lambda t: t.select(dim, start)) if size else None,
        lambda t: t.unsqueeze(dim),
        (lambda t: t.diagonal(0, 0, 1)) if x.dim() > 1 else None,
        (lambda t: t.unfold(dim, 1, 1)) if size else None,
        (lambda t: t.reshape(-1)) if x.is_contiguous() else None,
        (lambda t: t.view(-1, 2)) if x.is_contiguous() and x.numel() and x.numel() % 2 == 0 else None,
        (lambda t: t.view(torch.int32)) if x.dtype is torch.float32 else None,
    ]
    return data.draw(st.sampled_from([kind for kind in kinds if kind is not None]))


def _write(x: torch.Tensor, data: Any) -> Step:
    number, dims, size = data.draw(st.integers(1, 5)), x.dim(), x.dim() and x.shape[-1]
    writes: list[Step] = [
        lambda t: t.fill_(number),
        lambda t: t.mul_(number),
        lambda t: t.add_(t),
        lambda t: t.copy_(torch.arange(t.numel(), device=t.device).view(t.shape)),
        lambda t: t.zero_(),
        lambda t: t.masked_fill_(t > number, number),
        *(
            (lambda t: t.cumsum_(-1), lambda t: t.index_fill_(-1, torch.tensor([0], device=t.device), 7))
            if size
            else ()
        ),
        *((lambda t: t.tril_(), lambda t: t.copy_(t.flip(0))) if dims > 1 else ()),
    ]
    return data.draw(st.sampled_from(writes))


@given(st.data())
def test_chains_of_views_and_writes(data: Any) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    here = torch.arange(1, 1 + torch.Size(sizes).numel(), dtype=torch.float32).view(sizes)
    pairs = [(here, here.to("dynaxla"))]
    for _ in range(data.draw(st.integers(1, 6))):
        mine, other = data.draw(st.sampled_from(pairs))
        if data.draw(st.booleans()):
            step = _views(mine, data)
            assert step is not None
            pairs.append((step(mine), step(other)))
        elif mine.dtype is torch.float32:
            write = _write(mine, data)
            write(mine)
            write(other)
        for expected, actual in pairs:
            assert expected.stride() == actual.stride()
            assert torch.equal(actual.cpu(), expected)


def test_a_write_into_a_view_is_seen_by_all() -> None:
    base = torch.zeros(4, 6, device="dynaxla")
    row, columns, flat = base[1], base[:, ::2], base.view(-1)
    row.fill_(1)
    columns.add_(10)
    assert flat[6:12].tolist() == [11, 1, 11, 1, 11, 1]
    assert base.t()[0].tolist() == [10, 11, 10, 10]
    assert row.sum().item() == 36


def test_places_are_inputs_of_programs() -> None:
    x = torch.arange(60.0, device="dynaxla").view(10, 6)
    (x[0] * 2, x[1:3] + 1)
    x[0].fill_(0)
    with dynaxla.recorder().expect(compiles=0):
        for place in range(1, 8):
            assert (x[place] * 2).tolist() == [12 * place + 2 * i for i in range(6)]
            assert (x[place : place + 2] + 1)[0, 0].item() == 6 * place + 1
        for place in range(1, 8):
            x[place].fill_(place)
    assert x[:, 3].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 51, 57]


def test_columns_and_steps_are_windows_too() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    there = x.to("dynaxla")
    for index in (
        (slice(None), 1),
        (Ellipsis, slice(1, 4, 2)),
        (slice(None), slice(None, None, 2), slice(None, None, 3)),
    ):
        x[index] *= 2
        there[index] *= 2
        assert torch.equal(there.cpu(), x)


def test_strides_with_gaps_and_repeats() -> None:
    x = torch.arange(20.0)
    there = x.to("dynaxla")
    for sizes, strides, offset in (((3, 2), (5, 3), 1), ((3, 3), (1, 1), 2), ((2, 3), (0, 1), 4), ((4,), (3,), 0)):
        assert torch.equal(
            (there.as_strided(sizes, strides, offset) + 1).cpu(), x.as_strided(sizes, strides, offset) + 1
        )
    for sizes, strides, offset in (((3, 2), (5, 3), 1), ((4,), (3,), 0)):
        x.as_strided(sizes, strides, offset).neg_()
        there.as_strided(sizes, strides, offset).neg_()
        assert torch.equal(there.cpu(), x)
    with pytest.raises(RuntimeError, match="out of bounds"):
        there.as_strided((5, 5), (5, 1), 0)
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.ones(1, device="dynaxla").expand(3).add_(1)


def test_other_dtypes_of_the_same_memory() -> None:
    x = torch.tensor([1.0, -2.0, 0.5, 3.25])
    there = x.to("dynaxla")
    assert torch.equal(there.view(torch.int32).cpu(), x.view(torch.int32))
    assert torch.equal((there.view(torch.uint8)[3::4] + 0).cpu(), x.view(torch.uint8)[3::4])
    there.view(torch.int32).bitwise_and_(0x7FFFFFFF)
    assert there.tolist() == [1, 2, 0.5, 3.25]
    z = torch.view_as_complex(there.view(2, 2))
    assert (z * 1j).tolist() == [-2 + 1j, -3.25 + 0.5j]
    z.real.zero_()
    assert there.tolist() == [0, 2, 0, 3.25]


def test_sizes_change_in_place() -> None:
    x = torch.arange(6.0, device="dynaxla")
    y = x[2:4]
    x.resize_(2, 2)
    assert x.tolist() == [[0, 1], [2, 3]]
    assert y.tolist() == [2, 3]
    x.resize_(10)
    assert x[:6].tolist() == [0, 1, 2, 3, 4, 5]
    y.set_(x)
    assert y.is_set_to(x)
    y.set_()
    assert y.shape == (0,)
    x.t_() if x.dim() == 2 else x.unsqueeze_(0)
    assert x.shape == (1, 10)


def test_out_arguments() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    out, columns = torch.empty(0, device="dynaxla"), torch.zeros(3, 8, device="dynaxla")
    assert torch.add(x.to("dynaxla"), y.to("dynaxla"), out=out) is out
    torch.testing.assert_close(out.cpu(), x + y)
    torch.mul(x.to("dynaxla"), y.to("dynaxla"), out=columns[:, ::2])
    torch.testing.assert_close(columns[:, ::2].cpu(), x * y)
    assert columns[:, 1::2].abs().sum().item() == 0
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(x.to("dynaxla"), y.to("dynaxla"), out=torch.empty(3, 4, dtype=torch.int32, device="dynaxla"))


@pytest.mark.parametrize(
    "cut",
    [lambda x: x, lambda x: x[..., 1], lambda x: x[1:, 1:, 0], lambda x: x.permute(2, 0, 1), lambda x: x[2]],
    ids=["itself", "gaps", "an offset", "transposed", "a part"],
)
@pytest.mark.parametrize("offset", [None, 0, 3])
def test_copies_and_writes_of_as_strided_take_the_memory(cut: Step, offset: int | None) -> None:
    x, piece = torch.arange(40.0).view(5, 4, 2), -torch.ones(2, 3)

    def run(device: str) -> list[torch.Tensor]:
        view, there = cut(x.clone().to(device)), piece.to(device)
        return [
            torch.as_strided_copy(view, (2, 3), (3, 2), offset).cpu(),
            torch.as_strided_scatter(view, there, (2, 3), (3, 2), offset).cpu(),
        ]

    for ours, eagers in zip(run("dynaxla"), run("cpu"), strict=True):
        assert torch.equal(ours, eagers)


def test_as_strided_of_a_subclass_around_a_tensor() -> None:
    """torch makes the subclass's view of a storage without memory, too, with the kernel of the device."""
    make, mode = composite_compliance.generate_cct_and_mode()
    found = make(torch.arange(6.0, device="dynaxla"), mode).as_strided((2, 2), (2, 1))
    assert found.elem.tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize("descending", [False, True])
def test_a_sort_may_be_written_over_what_it_sorts(descending: bool) -> None:
    x = torch.randint(9, (4, 50), device="dynaxla")
    values, order = torch.sort(x, descending=descending)
    own, before = torch.empty(0, dtype=torch.int64, device="dynaxla"), dynaxla.read_metrics().host_ops
    torch.sort(x, descending=descending, out=(x, own))
    assert torch.equal(x, values)
    assert torch.equal(own, order)
    assert dynaxla.read_metrics().host_ops == before


def test_in_place_errors_are_eagers() -> None:
    x = torch.ones(3, dtype=torch.int64, device="dynaxla")
    with pytest.raises(RuntimeError, match="result type Float can't be cast"):
        x.add_(0.5)
    with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
        x.add_(torch.ones(2, 3, dtype=torch.int64, device="dynaxla"))
    with pytest.raises(RuntimeError, match="must match"):
        x + torch.ones(4, device="dynaxla")
