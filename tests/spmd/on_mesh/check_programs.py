"""A known and bounded set of programs on a mesh: freezing, warm-up, compiling behind calls, limits, the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaxla
from dynaxla.errors import FrozenError, ShardingError
from dynaxla.mesh import Mesh
from dynaxla.observe.recorder import Recorder
from tests.spmd.on_mesh.check_tensors import spec_of
from tests.tolerances import assert_close


@pytest.fixture
def recorder() -> Recorder:
    return dynaxla.recorder()


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="dynaxla", options={"fallback": "error", **options})


def double(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).cumsum(1)


def test_freeze_sees_a_new_sharding(mesh: Mesh, recorder: Recorder) -> None:
    x, w = torch.randn(16, 8), torch.randn(8, 4)
    whole = dynaxla.shard(w, mesh, ())
    f = compiled(double)
    with recorder.expect(compiles=1):
        f(dynaxla.shard(x, mesh, ("data",)), whole)
    dynaxla.freeze(f)
    with recorder.expect(compiles=0, graphs=0):
        assert_close(f(dynaxla.shard(x, mesh, ("data",)), whole).cpu(), double(x, w))
        with pytest.raises(FrozenError) as told:
            f(dynaxla.shard(x, mesh, (None, "model")), whole)
        with pytest.raises(FrozenError, match="arguments on one device"):
            f(x.to("dynaxla"), w.to("dynaxla"))
    text = str(told.value)
    assert "arguments on data=2xmodel=4: 1 (None, 'model'), 1 on every device" in text
    assert "f32[16,8] is (None, 'model'), there ('data', None)" in text


@pytest.mark.parametrize(("on_miss", "compiles", "misses"), [("compile", 1, 0), ("background", 1, 1)])
def test_a_frozen_function_may_compile_for_a_sharding(
    mesh: Mesh, recorder: Recorder, on_miss: Any, compiles: int, misses: int
) -> None:
    x, w = torch.randn(16, 8), torch.randn(8, 4)
    f = compiled(double)
    f(dynaxla.shard(x, mesh, ("data",)), dynaxla.shard(w, mesh, ()))
    dynaxla.freeze(f, on_miss)
    with recorder.expect(compiles=compiles, misses=misses, served_eager=0):
        for _ in range(2):
            made = f(dynaxla.shard(x, mesh, ()), dynaxla.shard(w, mesh, (None, "model")))
            assert_close(made.cpu(), double(x, w))


@pytest.mark.parametrize("on_miss", ["eager", "next_bucket"])
def test_a_frozen_function_runs_op_by_op_for_a_sharding(mesh: Mesh, recorder: Recorder, on_miss: Any) -> None:
    x, w = torch.randn(16, 8), torch.randn(8, 4)
    f = compiled(double)
    f(dynaxla.shard(x, mesh, ("data",)), dynaxla.shard(w, mesh, ()))
    dynaxla.freeze(f, on_miss)
    with recorder.expect(misses=2, served_eager=2, graphs=0):
        for _ in range(2):
            assert_close(f(dynaxla.shard(x, mesh, ()), dynaxla.shard(w, mesh, ())).cpu(), double(x, w))


def test_weights_that_are_sharded_anew_are_new(mesh: Mesh, recorder: Recorder) -> None:
    """Of a convolution and a norm that are folded: the work on weights alone is a program, too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)).eval()
    x = torch.randn(8, 4, 6, 6)
    with torch.no_grad():
        expected = net(x)
        dynaxla.shard(net, mesh, {"0.weight": ("model",)})
        f = compiled(net)
        made = dynaxla.shard(x, mesh, ("data",))
        assert_close(f(made).cpu(), expected)
        dynaxla.freeze(f)
        with recorder.expect(compiles=0, folds=0):
            assert_close(f(made).cpu(), expected)
            dynaxla.shard(net[0].weight, mesh, (None, "model"))
            with pytest.raises(
                FrozenError, match=r"\(None, 'model', None, None\), there \('model', None, None, None\)"
            ):
                f(made)
        dynaxla.freeze(f, "compile")
        assert_close(f(made).cpu(), expected)


def test_a_frozen_backward_sees_a_new_sharding(mesh: Mesh, recorder: Recorder) -> None:
    x, w = torch.randn(16, 8), torch.randn(8, 4)
    there = dynaxla.shard(w, mesh, ()).requires_grad_()
    f = compiled(double)
    made = dynaxla.shard(x, mesh, ("data",))
    f(made, there).backward(dynaxla.shard(torch.ones(16, 4), mesh, ("data",)))
    dynaxla.freeze(f)
    there.grad = None
    with recorder.expect(compiles=0):
        f(made, there).backward(dynaxla.shard(torch.ones(16, 4), mesh, ("data",)))
        with pytest.raises(FrozenError, match="there"):
            f(made, there).backward(dynaxla.shard(torch.ones(16, 4), mesh, (None, "model")))


def test_warmup_compiles_for_the_shardings_of_its_examples(mesh: Mesh, recorder: Recorder) -> None:
    f = compiled(double)
    w = dynaxla.shard(torch.randn(8, 4), mesh, (None, "model"))
    examples = []
    for spec in (("data",), (("data", "model"),)):
        x = dynaxla.shard(torch.randn(16, 8), mesh, spec)
        dynaxla.mark_bucketed(x, 0, policy=dynaxla.Multiples(8), min=8, max=16)
        examples.append((x, w))
    with recorder.expect(compiles=4):
        assert dynaxla.warmup(f, *examples, progress=False) == 4
    dynaxla.freeze(f)
    with recorder.expect(compiles=0, misses=0):
        for rows in (8, 16):
            for spec in (("data",), (("data", "model"),)):
                x = torch.randn(rows, 8)
                made = dynaxla.shard(x, mesh, spec)
                dynaxla.mark_bucketed(made, 0, policy=dynaxla.Multiples(8), min=8, max=16)
                assert_close(f(made, w).cpu(), double(x, w.cpu()))
    whole = dynaxla.shard(torch.randn(16, 8), mesh, ())
    dynaxla.mark_bucketed(whole, 0, policy=dynaxla.Multiples(8), min=8, max=16)
    with pytest.raises(FrozenError, match="on every device"):
        f(whole, w)


def test_a_bucket_that_devices_do_not_divide_is_told(mesh: Mesh) -> None:
    f = compiled(double)
    x = dynaxla.shard(torch.randn(16, 8), mesh, (("data", "model"),))
    dynaxla.mark_bucketed(x, 0, policy=dynaxla.Multiples(4), min=4, max=16)
    with pytest.raises(ShardingError, match="which 8 devices"):
        dynaxla.warmup(f, (x, dynaxla.shard(torch.randn(8, 4), mesh, ())), progress=False)


def test_behind_compiles_at_once_on_a_mesh_and_says_so(mesh: Mesh, recorder: Recorder) -> None:
    def halve(x: Tensor, w: Tensor) -> Tensor:
        return double(x, w) / 2

    x, w = torch.randn(16, 8), torch.randn(8, 4)
    f = compiled(halve, compile="behind")
    with recorder.expect(compiles=2, served_eager=0, jobs_done=0):
        for spec in (("data",), (None, "model")):
            for _ in range(2):
                made = f(dynaxla.shard(x, mesh, spec), dynaxla.shard(w, mesh, ()))
                assert_close(made.cpu(), halve(x, w))
    told = [line for line in dynaxla.report().splitlines() if "halve" in line and "a mesh was made" in line]
    assert len(told) == 1, "once for a part, of a process that made a mesh"


def test_the_report_names_programs_by_their_shardings(mesh: Mesh) -> None:
    def third(x: Tensor) -> Tensor:
        return x * 3

    compiled(third)(dynaxla.shard(torch.randn(16, 8), mesh, ("data",)))
    (line,) = [line for line in dynaxla.report().splitlines() if "third" in line and "arguments on" in line]
    assert line.endswith("(arguments on data=2xmodel=4: 1 ('data', None)): no collective")


def test_many_shardings_are_told_and_bounded_for_the_whole_part(mesh: Mesh, recorder: Recorder) -> None:
    f = compiled(lambda x: x.cumsum(1) + 5, max_executables=9)
    x = torch.randn(8, 8, 8)
    axes = (None, "data", "model")
    specs = [(a, b, c) for a in axes for b in axes for c in axes if not (a and a in (b, c)) and not (b and b == c)]
    assert len(specs) == 13
    before = recorder.snapshot()
    for spec in specs:
        got = f(dynaxla.shard(x, mesh, spec))
        assert spec_of(got) is not None
        assert_close(got.cpu(), x.cumsum(1) + 5)
    after = recorder.snapshot()
    assert after.compiles - before.compiles == 13
    assert after.evictions - before.evictions == 4
    told = after.many_programs[len(before.many_programs) :]
    assert [line.split(": ")[0].split(" has ")[1] for line in told] == ["9 programs", "10 programs"]
    assert "one for each sharding of its arguments" in told[0]
