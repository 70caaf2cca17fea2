"""What a compiled graph writes to: the executable takes its memory, and nothing else that had the buffer sees it."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from dynaxla import pipeline
from dynaxla.device.storage import DeviceStorage, storage_of
from dynaxla.errors import ExecutionError
from dynaxla.lowering.link import LinkedModule, link
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Options
from dynaxla.targets.registry import find_target
from tests.device.junk import junk_in_padding
from tests.device.test_compiled import DEVICE, compiled, there
from tests.interrupts import interrupts_behind_donating_runs
from tests.precompile.test_compile_for_target import needs_libtpu
from tests.tolerances import assert_close


@pytest.fixture(autouse=True)
def _anew() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def decode(cache: Tensor, new: Tensor, position: Tensor) -> Tensor:
    cache.index_copy_(1, position, new)
    return (new @ cache.transpose(-1, -2)).softmax(-1)


def is_taken(memory: DeviceStorage, run: Callable[[], Any]) -> bool:
    """Whether a run takes a memory's buffer."""
    before: Any = memory.buffer
    run()
    assert memory.buffer is not before
    return bool(before.is_deleted())


@torch.no_grad()
def test_a_cache_is_written_where_it_lies(recorder: Recorder) -> None:
    on_device, cache = compiled(decode, dynamic=False), torch.randn(2, 640, 16)
    mine = cache.to(DEVICE)
    memory = storage_of(mine)
    address = None
    for step in range(5):
        new, position = torch.randn(2, 1, 16), torch.tensor([step * 7])
        given = there(new), there(position)
        with recorder.expect(compiles=int(step == 0)):
            before: Any = memory.buffer
            found = on_device(mine, *given)
        now: Any = memory.buffer
        assert before.is_deleted() or step == 0  # the first lies in memory of torch's
        assert address in (None, now.unsafe_buffer_pointer())
        address = now.unsafe_buffer_pointer()
        assert_close(found.cpu(), decode(cache, new, position))
        assert_close(mine.cpu(), cache)


@torch.no_grad()
def test_a_cache_of_a_bucket_is_written_where_it_lies(recorder: Recorder) -> None:
    """Caches of several lengths have one program, and none is copied; what lies around them is junk."""
    on_device = compiled(decode, dynamic=True)
    caches = [torch.randn(2, length, 16) for length in (38, 41, 47)]
    mine = [cache.to(DEVICE) for cache in caches]
    with junk_in_padding():
        for step in range(4):
            for place, (cache, own) in enumerate(zip(caches, mine, strict=True)):
                new, position = torch.randn(2, 1, 16), torch.tensor([step * 7])
                with recorder.expect(compiles=int(step == place == 0)):
                    corner = storage_of(own).corner
                    found = on_device(own, there(new), there(position))
                now = storage_of(own).corner
                assert now is not None
                assert now.sizes == (2, 48, 16)
                assert corner is None or corner.buffer.is_deleted()  # type: ignore[attr-defined]
                assert_close(found.cpu(), decode(cache, new, position))
                assert_close(own.cpu(), cache)


@torch.no_grad()
def test_who_else_has_a_bucket_s_cache_keeps_it() -> None:
    on_device, cache = compiled(decode, dynamic=True), torch.randn(2, 41, 16)
    mine, new, position = cache.to(DEVICE), torch.randn(2, 1, 16), torch.tensor([3])
    for _ in range(2):
        decode(cache, new, position)
        on_device(mine, there(new), there(position))
        other, view, before = mine.clone(), mine[:, 2:5], cache.clone()
        decode(cache, new * 2, position)
        on_device(mine, there(new * 2), there(position))
        assert_close(other.cpu(), before)
        assert_close(view.cpu(), cache[:, 2:5])
        assert_close(mine.cpu(), cache)


@torch.no_grad()
def test_a_part_of_a_larger_tensor_is_written_in_a_bucket() -> None:
    """What lies around it is padding to the program, and others' to the caller."""
    on_device, whole = compiled(decode, dynamic=True), torch.randn(2, 48, 16)
    mine = whole.to(DEVICE)
    for length in (41, 43):
        new, position = torch.randn(2, 1, 16), torch.tensor([length - 2])
        for begin in (0, 3):
            here, away = whole[:, begin : begin + length], mine[:, begin : begin + length]
            assert_close(on_device(away, there(new), there(position)).cpu(), decode(here, new, position))
            assert_close(mine.cpu(), whole)
    one = torch.randn(1, 48, 16)
    mine = one.to(DEVICE)
    for length in (41, 43):
        new, position = torch.randn(1, 1, 16), torch.tensor([length - 2])
        on_device(mine[:, :length], there(new), there(position))
        decode(one[:, :length], new, position)
        assert_close(mine.cpu(), one)


@torch.no_grad()
def test_what_shares_a_buffer_keeps_it() -> None:
    on_device, new, position = compiled(decode), torch.randn(2, 1, 16).to(DEVICE), torch.tensor([3]).to(DEVICE)
    mine = torch.zeros(2, 64, 16, device=DEVICE) + 1
    other, read = mine.clone(), mine.cpu()
    copied = torch.empty_like(mine).copy_(mine)
    on_device(mine, new, position)
    for kept in (other.cpu(), read, copied.cpu()):
        assert kept.eq(1).all()
    assert mine[:, 3].eq(new[:, 0]).all()
    memory = storage_of(mine)
    assert not memory.is_shared
    assert is_taken(memory, lambda: on_device(mine, new, position + 1))
    assert storage_of(other).is_shared  # with `copied`
    del copied
    assert not storage_of(other).is_shared
    on_device(other, new, position)
    assert other[:, 4].eq(1).all()


@torch.no_grad()
def test_a_part_of_a_tensor_is_written() -> None:
    on_device, caches = compiled(decode), torch.randn(3, 2, 64, 16)
    mine = caches.to(DEVICE)
    for layer in (1, 2, 1):
        new, position = torch.randn(2, 1, 16), torch.tensor([layer])
        assert_close(on_device(mine[layer], there(new), there(position)).cpu(), decode(caches[layer], new, position))
        assert_close(mine.cpu(), caches)
    turned = caches[0].transpose(0, 1).contiguous().transpose(0, 1)
    there_too = turned.to(DEVICE)
    assert there_too.stride() == turned.stride()
    for _ in range(2):
        assert_close(on_device(there_too, there(new), there(position)).cpu(), decode(turned, new, position))
        assert_close(there_too.cpu(), turned)


def new_value_is_returned(x: Tensor) -> Any:
    y = x + 1
    x.copy_(y)
    return y, y.view(-1), x, x.view(-1)


def old_value_is_returned(x: Tensor) -> Any:
    old, part = x.clone(), x[1:].clone()
    x.mul_(2)
    return old, part, x.sum()


def two_have_one_value(x: Tensor, y: Tensor) -> Any:
    new = x * y
    x.copy_(new)
    y.copy_(new)
    return new.sum()


def swapped(x: Tensor, y: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def of_another_dtype(x: Tensor) -> Tensor:
    x.copy_((x * 3).to(torch.int32))
    return x + 1


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function", [new_value_is_returned, old_value_is_returned, two_have_one_value, swapped, of_another_dtype]
)
def test_results_are_no_part_of_what_is_written(function: Callable[..., Any], dynamic: bool) -> None:
    on_device = compiled(function, dynamic=dynamic)
    given = [torch.randn(3, 4) for _ in range(function.__code__.co_argcount)]
    mine = [there(x) for x in given]
    for _ in range(3):
        wanted, found = function(*given), on_device(*mine)
        results = (
            [*(wanted if isinstance(wanted, tuple) else (wanted,))],
            [*(found if isinstance(found, tuple) else (found,))],
        )
        for one, other in zip(*results, strict=True):
            if one is not None:
                one.add_(5)  # nobody else sees it but who would in eager
                other.add_(5)
                assert_close(other.cpu(), one)
        for x, y in zip(given, mine, strict=True):
            assert_close(y.cpu(), x)


OPS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, y: x.add_(y.sum(0)),
    lambda x, y: x[2].mul_(0.5),
    lambda x, y: x[:, 1:3].copy_(y[:, :2].clone()),
    lambda x, y: x.copy_(y.clone()),
    lambda x, y: x.t().tanh_(),
    lambda x, y: x.view(-1)[::2].fill_(0.25),
]
RETURNED: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x[1:],
    lambda x: x.t(),
    lambda x: x.clone(),
    lambda x: x * 2,
]


def drawn(seed: int) -> Callable[..., Any]:
    draw = random.Random(seed)
    steps = [(draw.choice(OPS), draw.randrange(3), draw.randrange(3)) for _ in range(draw.randrange(2, 6))]
    returned = [(draw.choice(RETURNED), draw.randrange(3)) if draw.random() < 0.4 else None for _ in steps]

    def function(*xs: Tensor) -> list[Tensor]:
        found = []
        for (op, one, other), result in zip(steps, returned, strict=True):
            op(xs[one], xs[other])
            if result is not None:
                found.append(result[0](xs[result[1]]))
        return found

    return function


@torch.no_grad()
@pytest.mark.parametrize("seed", range(16))
def test_programs_drawn_at_random(seed: int) -> None:
    function = drawn(seed)
    on_device, given = compiled(function), [torch.randn(4, 4) for _ in range(3)]
    mine = [there(x) for x in given]
    if seed % 3 == 1:
        given[1], mine[1] = given[0].t(), mine[0].t()
    for _ in range(2):
        for one, other in zip(function(*given), on_device(*mine), strict=True):
            assert_close(other.cpu(), one)
        for x, y in zip(given, mine, strict=True):
            assert_close(y.cpu(), x)


def test_training_writes_statistics_where_they_lie() -> None:
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 3))
    mine = copy.deepcopy(model).to(DEVICE)
    on_device = compiled(mine)
    statistics: Any = mine[1].running_mean
    for step in range(3):
        x = torch.randn(6, 8)
        memory = storage_of(statistics)

        def train(x: Tensor = x) -> None:
            on_device(x.to(DEVICE)).square().sum().backward()

        assert is_taken(memory, train) or step == 0
        model(x).square().sum().backward()
        for one, other in zip(model.buffers(), mine.buffers(), strict=True):
            assert_close(other.cpu(), one)
        for one, other in zip(model.parameters(), mine.parameters(), strict=True):
            assert_close(other.grad.cpu(), one.grad)  # type: ignore[union-attr, arg-type]


def test_an_input_that_autograd_follows() -> None:
    def function(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.exp()

    given = [torch.randn(4, requires_grad=True) for _ in range(2)]
    mine = [x.detach().to(DEVICE).requires_grad_() for x in given]
    for leaf, run in ((given[0], function), (mine[0], compiled(function))):
        x = leaf * 1
        (run(x).sum() + x.sum()).backward()
    assert_close(mine[0].grad.cpu(), given[0].grad)  # type: ignore[union-attr, arg-type]


@torch.no_grad()
def test_a_compiled_optimizer_step() -> None:
    model = nn.Linear(6, 4)
    mine = copy.deepcopy(model).to(DEVICE)
    steps = []
    for each in (model, mine):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        steps.append(compiled(optimizer.step, fallback="eager") if each is mine else optimizer.step)
    memory = storage_of(mine.weight)
    for step in range(4):
        for one, other in zip(model.parameters(), mine.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.to(DEVICE)
        steps[0]()
        assert is_taken(memory, steps[1]) or step == 0
        for one, other in zip(model.parameters(), mine.parameters(), strict=True):
            assert_close(other.cpu(), one)


@torch.no_grad()
def test_nothing_is_written_where_an_assertion_fails() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.add_(1)
        torch._assert_async(y.sum() > 0)
        return y * 2

    on_device, x = compiled(function), torch.ones(3, device=DEVICE)
    assert on_device(x).tolist() == [4.0] * 3
    x.fill_(-5)
    with pytest.raises(RuntimeError):
        on_device(x)
    assert x.tolist() == [-5.0] * 3


@torch.no_grad()
def test_a_graph_that_is_cut() -> None:
    def function(x: Tensor, y: Tensor) -> Any:
        x[1].add_(y[0])
        places = torch.bincount(y[0].abs().long(), minlength=3)[:3]
        y.mul_(places.sum())
        return x.sum() + y.sum(), places

    on_device = torch.compile(function, backend="dynaxla")
    given = torch.randn(3, 4), torch.randn(3, 4).abs()
    mine = [there(x) for x in given]
    for _ in range(3):
        for one, other in zip(function(*given), on_device(*mine), strict=True):
            assert_close(other.cpu(), one)
        for x, y in zip(given, mine, strict=True):
            assert_close(y.cpu(), x)


@torch.no_grad()
def test_a_lost_buffer_is_told() -> None:
    x = torch.ones(3, device=DEVICE)
    buffer: Any = storage_of(x).buffer
    buffer.delete()  # as a run does that takes it and fails
    torch.dynaxla.synchronize()  # nothing is under way
    with pytest.raises(ExecutionError, match=r"failed on the device"):
        x.cpu()
    with pytest.raises(ExecutionError):
        (x + 1).cpu()
    with pytest.raises(ExecutionError):
        compiled(lambda x: x + 1)(x)


@torch.no_grad()
def test_ops_that_are_not_compiled_write_where_a_tensor_lies() -> None:
    given, mine = torch.zeros(64, 16), torch.zeros(64, 16, device=DEVICE)
    memory, view = storage_of(mine), mine[3:5]

    def write(row: int) -> Callable[[], None]:
        def run() -> None:
            mine[row] = row
            given[row] = row

        return run

    assert all(is_taken(memory, write(row)) for row in (3, 4, 5))
    assert is_taken(memory, lambda: view.add_(mine[5:7]))
    given[3:5].add_(given[5:7])
    kept = mine.clone()
    assert not is_taken(memory, lambda: mine.mul_(kept))
    assert_close(kept.cpu(), given)
    assert_close(mine.cpu(), given * given)
    saved = mine.clone().requires_grad_()
    with torch.enable_grad():
        y = saved.exp()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            (y.add_(1)).sum().backward()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["an op", "a graph"])
def test_an_interrupt_leaves_no_tensor_without_its_new_value(kind: str) -> None:
    """Ctrl-C behind a run that took the tensor's memory: weights would be lost in the middle of training."""
    cache, position = torch.zeros(2, 640, 16, device=DEVICE), torch.tensor([3], device=DEVICE)

    def write(value: float) -> None:
        new = torch.full((2, 1, 16), value, device=DEVICE)
        cache.index_copy_(1, position, new) if kind == "an op" else decode_there(cache, new, position)

    decode_there = compiled(decode, dynamic=False)
    for value in (1.0, 2.0):  # the second is met by programs that are compiled
        write(value)
        cache.cpu()
    with interrupts_behind_donating_runs() as interrupted, pytest.raises(KeyboardInterrupt):
        write(3.0)
    assert len(interrupted) == 1
    assert_close(cache[:, 3].cpu(), torch.full((2, 16), 3.0))


@needs_libtpu
def test_programs_that_donate_compile_for_a_tpu() -> None:
    modules: list[LinkedModule] = []

    def recorded(*args: Any) -> LinkedModule:
        modules.append(link(*args))
        return modules[-1]

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)).to(DEVICE)
    with mock.patch.object(pipeline, "link", recorded):
        with torch.no_grad():
            given = torch.randn(2, 64, 16), torch.randn(2, 1, 16), torch.tensor([3])
            compiled(decode, dynamic=False, cache=False)(*map(there, given))
        compiled(model, cache=False)(torch.randn(4, 8).to(DEVICE)).sum().backward()
    donating = [module.module for module in modules if "tf.aliasing_output" in module.text]
    assert len(donating) >= 2
    compiler: Any = find_target("tpu:v5e:1x1").compiler
    for module in donating:
        assert "input_output_alias" in compiler().compile(module, Options().compile_limits).hlo_text()
