"""Every collective of torch.distributed on device tensors gives what gloo gives on the host, in two processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.distributed.children import run_ranks
from tests.tolerances import assert_close

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MOVED = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn)
Ops = dist.ReduceOp
REDUCTIONS = {
    Ops.SUM: (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.complex64),
    Ops.PRODUCT: (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8),
    Ops.MIN: (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8),
    Ops.MAX: (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8),
    Ops.BAND: (torch.int64, torch.int32, torch.int8, torch.uint8),
    Ops.BOR: (torch.int64, torch.int32, torch.int8, torch.uint8),
    Ops.BXOR: (torch.int64, torch.int32, torch.int8, torch.uint8),
}


def make(rank: int, dtype: torch.dtype, *sizes: int) -> Tensor:
    generator = torch.Generator().manual_seed(7 * rank + 1)
    if dtype is torch.bool:
        return torch.randint(0, 2, sizes, generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(*sizes, dtype=dtype, generator=generator)
    if dtype.is_floating_point:
        return torch.randn(*sizes, generator=generator).to(dtype)
    low, high = (0, 100) if dtype is torch.uint8 else (-100, 100)
    return torch.randint(low, high, sizes, generator=generator).to(dtype)


def assert_same(mine: Any, host: Any, what: object) -> None:
    assert mine.device.type == "dynaxla", what
    assert mine.dtype is host.dtype, what
    same = mine.cpu()
    if host.dtype is torch.float8_e4m3fn:
        same, host = same.view(torch.uint8), host.view(torch.uint8)
    if host.dtype.is_floating_point and dist.get_world_size() > 2:  # sums of more than two depend on their order
        assert_close(same, host)
    else:
        assert torch.equal(same, host), f"{what}: {same} {host}"


class Pair:
    """A collective on the host, by gloo, and on the device."""

    def __init__(self) -> None:
        self.gloo: Any = dist.new_group(backend="gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.checked = 0

    def check(self, what: object, call: Callable[..., Any], *tensors: Any, outputs: int | None = None) -> None:
        """Calls `call(group, *tensors)` on both, and compares the tensors afterwards."""
        theirs = _map(lambda x: x.clone(), tensors)
        mine = _map(lambda x: x.to("dynaxla"), tensors)
        for group, given in ((self.gloo, theirs), (None, mine)):
            work = call(group, *given)
            if work is not None:
                work.wait()
        for x, y in zip(_leaves(mine), _leaves(theirs), strict=True):
            assert_same(x, y, what)
        self.checked += 1


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    return function(value) if isinstance(value, Tensor) else [_map(function, each) for each in value]


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for each in value:
            yield from _leaves(each)


def check_reductions(pair: Pair) -> None:
    rank, size = pair.rank, pair.size
    for op, dtypes in REDUCTIONS.items():
        for dtype in dtypes:
            if dtype.is_complex and op != Ops.SUM:
                continue
            x, what = make(rank, dtype, 4, 3), (op, dtype)
            pair.check(what, lambda g, x, op=op: dist.all_reduce(x, op, g), x)
            if dtype in (torch.float32, torch.int32):
                pair.check(what, lambda g, x, op=op: _reduce(g, x, op), x[0])
    for dtype in (torch.float32, torch.int64):
        out, parts = torch.zeros(3, dtype=dtype), make(rank, dtype, size, 3)
        pair.check("reduce_scatter", lambda g, o, p: dist.reduce_scatter(o, list(p), group=g), out, parts)
        pair.check("rs_tensor", lambda g, o, p: dist.reduce_scatter_tensor(o, p.view(-1), group=g), out, parts)


def _reduce(group: Any, x: Tensor, op: Any) -> None:
    dist.reduce(x, 1, op, group)
    if dist.get_rank() != 1:
        x.zero_()  # gloo leaves a part of the sum there


def check_moves(pair: Pair) -> None:
    rank, size = pair.rank, pair.size
    for dtype in MOVED:
        x = make(rank, dtype, 3, 2)
        if dtype is not torch.float8_e4m3fn:  # gloo takes no such dtype
            pair.check(("broadcast", dtype), lambda g, x: dist.broadcast(x, 1, g), x)
            pair.check(("all_gather", dtype), lambda g, o, x: dist.all_gather(list(o), x, g), _outs(x, size), x)
            if not dtype.is_complex:
                pair.check(("gather", dtype), _gather, _outs(x, size), x)
            pair.check(("scatter", dtype), _scatter, x.clone(), [make(rank + i, dtype, 3, 2) for i in range(size)])
        if dtype not in (torch.bool, torch.float8_e4m3fn):
            whole = torch.zeros(size * 3, 2, dtype=dtype)
            pair.check(("into", dtype), lambda g, o, x: dist.all_gather_into_tensor(o, x, g), whole, x)
    short = make(rank, torch.int16, 4).to("dynaxla")  # gloo takes no such dtype
    dist.broadcast(short, 1)
    assert_same(short, make(1, torch.int16, 4), "int16")
    bits = torch.arange(6, dtype=torch.uint8, device="dynaxla").view(torch.float8_e4m3fn)
    dist.broadcast(bits, 0)
    assert bits.view(torch.uint8).tolist() == list(range(6))
    strange = torch.tensor([-0.0, torch.nan, torch.inf], device="dynaxla")
    dist.broadcast(strange, 0)
    assert (
        strange.cpu().view(torch.int32).tolist()
        == torch.tensor([-0.0, torch.nan, torch.inf]).view(torch.int32).tolist()
    )


def _outs(x: Tensor, size: int) -> list[Tensor]:
    return [torch.zeros_like(x) for _ in range(size)]


def _gather(group: Any, outputs: list[Tensor], x: Tensor) -> None:
    dist.gather(x, list(outputs) if dist.get_rank() == 1 else None, 1, group)


def _scatter(group: Any, output: Tensor, parts: list[Tensor]) -> None:
    dist.scatter(output, list(parts) if dist.get_rank() == 0 else None, 0, group)


def check_exchanges(pair: Pair) -> None:
    rank, size = pair.rank, pair.size
    x = make(rank, torch.float32, 2 * size, 3)
    pair.check("all_to_all_single", lambda g, o, x: dist.all_to_all_single(o, x, group=g), torch.zeros_like(x), x)
    sent = [rank + i + 1 for i in range(size)]  # rows from this one to each
    received = [i + rank + 1 for i in range(size)]
    rows, out = make(rank, torch.float32, sum(sent), 2), torch.zeros(sum(received), 2)
    pair.check("splits", lambda g, o, x: dist.all_to_all_single(o, x, received, sent, g), out, rows)
    even = [torch.zeros(2, 3) for _ in range(size)]
    pair.check("all_to_all", lambda g, o, x: dist.all_to_all(list(o), list(x.split(2)), g), even, x)
    outs = [torch.zeros(n, 2, device="dynaxla") for n in received]  # gloo takes lists of equal sizes alone
    dist.all_to_all(outs, list(rows.to("dynaxla").split(sent)))
    for i, out in enumerate(outs):
        counts = [i + j + 1 for j in range(size)]
        assert_same(out, make(i, torch.float32, sum(counts), 2).split(counts)[rank], "all_to_all")


def check_messages(pair: Pair) -> None:
    rank, size = pair.rank, pair.size
    right, left = (rank + 1) % size, (rank - 1) % size
    out = torch.zeros(2, 3, device="dynaxla")
    received = dist.irecv(out, left, tag=3)
    sent = dist.isend(make(rank, torch.float32, 2, 3).to("dynaxla"), right, tag=3)
    assert received is not None
    assert sent is not None
    received.wait()
    sent.wait()
    assert_same(out, make(left, torch.float32, 2, 3), "irecv")
    ops = [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, torch.empty_like(out), left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert_same(ops[1].tensor, make((left - 1) % size, torch.float32, 2, 3), "batch")
    if rank == 0:
        dist.send(torch.ones(3, device="dynaxla"), 1)
    elif rank == 1:
        any_source = torch.zeros(3, device="dynaxla")
        assert dist.recv(any_source) == 0
        assert any_source.tolist() == [1, 1, 1]


def check_objects_and_forms(pair: Pair) -> None:
    rank, size = pair.rank, pair.size
    objects = [{"rank": rank}, None] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0)
    assert objects == [{"rank": 0}, None]
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, ("of", rank))
    assert gathered == [("of", i) for i in range(size)]
    # One program for several tensors; views; works that end later.
    x, y = torch.full((3,), rank + 1.0, device="dynaxla"), torch.arange(4.0, device="dynaxla")
    with dist._coalescing_manager(async_ops=True) as coalesced:
        dist.all_reduce(x)
        dist.all_reduce(y)
    coalesced.wait()
    assert x.tolist() == [size * (size + 1) / 2] * 3
    assert y.tolist() == [size * i for i in range(4)]
    whole = torch.zeros(3, 4, device="dynaxla")
    whole[:, 1:3] = rank + 1.0
    works = [dist.all_reduce(whole[:, i], async_op=True) for i in (1, 2)]
    assert all(work.wait() for work in works)
    assert whole.sum().item() == 6 * size * (size + 1) / 2
    assert whole[:, 0].sum().item() == 0
    future = dist.all_reduce(x, async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] + 1).wait().tolist() == [size * size * (size + 1) / 2 + 1] * 3
    average = torch.full((2,), float(rank), device="dynaxla")
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert average.tolist() == [(size - 1) / 2] * 2
    dist.barrier()
    host = torch.ones(2)
    dist.all_reduce(host)
    assert host.tolist() == [size] * 2


def check_subclasses(pair: Pair) -> None:
    """Of a tensor that is made of two, both are exchanged."""
    host = [torch.full((3,), 1.0 + pair.rank), torch.full((3,), 5.0 * pair.rank)]
    made = TwoTensor(*(each.to("dynaxla") for each in host))
    dist.all_reduce(made)
    for each in host:
        dist.all_reduce(each, group=pair.gloo)
    assert_same(made.a, host[0], "a")
    assert_same(made.b, host[1], "b")


def check_subgroups(pair: Pair) -> None:
    rank, size = pair.rank, pair.size
    groups = [dist.new_group([i, i + 1]) for i in range(0, size, 2)]
    mine: Any = groups[rank // 2]
    x = torch.tensor([float(rank)], device="dynaxla")
    dist.all_reduce(x, group=mine)
    first = rank // 2 * 2
    assert x.tolist() == [2 * first + 1]
    dist.broadcast(x, first + 1, group=mine)
    single = [dist.new_group([i]) for i in range(size)][rank]
    dist.all_reduce(x, group=single)
    assert x.tolist() == [2 * first + 1]


def check_everything(rank: int) -> None:
    pair = Pair()
    for check in (
        check_reductions,
        check_moves,
        check_exchanges,
        check_messages,
        check_objects_and_forms,
        check_subgroups,
    ):
        check(pair)
    assert pair.checked > 90, pair.checked


def test_collectives_are_gloos() -> None:
    run_ranks(check_everything)
