"""Several sizes together: the default, plans of two dims, policies by dim in the options, and ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.dynamic_spec import ParamsSpec, ShapeVar, TensorSpec

import dynaxla
from dynaxla.bucket_policy import DEFAULT, Bounded, BucketPolicy, JointPolicy
from dynaxla.bucketing.joint_policy import JOINT, JOINT_UNKNOWN, SMALL_WORK, DimUsage, JointPolicies, SharedBuckets
from dynaxla.bucketing.padded_graph import CannotPad
from dynaxla.bucketing.size_buckets import PartBucket
from dynaxla.diagnostics import ExactShape
from dynaxla.errors import BucketError, OptionError
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Options
from dynaxla.programs import argument_binder
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.runtime.host_padding import PaddedShape
from dynaxla.targets.tpu import JOINT_LANE_FRIENDLY
from tests.tolerances import assert_close

SIZES = st.integers(0, 3000)
FILLINGS = st.builds(DimUsage, st.tuples(*[st.integers(1, 3)] * 2), st.integers(1, 1000))


DEFAULTS = st.builds(JointPolicies.of, st.sampled_from([JOINT, JOINT_UNKNOWN, JOINT_LANE_FRIENDLY]), FILLINGS)
PLANS = st.just(dynaxla.Plan(((1, 64), (4, 64), (8, 256), (16, 4096))))
POLICIES: st.SearchStrategy[JointPolicy] = DEFAULTS | PLANS
"""Joint policies of two sizes."""


@given(policy=POLICIES | POLICIES.map(lambda policy: SharedBuckets(policy, (1, 1))), a=SIZES, b=SIZES)
def test_a_joint_bucket_holds_its_sizes_and_is_its_own(policy: JointPolicy, a: int, b: int) -> None:
    bucket = policy.bucket(a, b)
    assert policy.bucket(*bucket) == bucket
    for size, padded in zip((a, b), bucket, strict=True):
        assert padded >= size
        assert size > 1 or padded == size


@given(policy=POLICIES, sizes=st.tuples(SIZES, SIZES), more=st.integers(0, 100), place=st.integers(0, 1))
def test_a_larger_size_has_no_smaller_joint_bucket(
    policy: JointPolicy, sizes: tuple[int, int], more: int, place: int
) -> None:
    """Where the other size stays."""
    larger = tuple(size + more * (place == number) for number, size in enumerate(sizes))
    assert policy.bucket(*sizes)[place] <= policy.bucket(*larger)[place]


@given(filling=FILLINGS, sizes=st.tuples(*[st.integers(2, 3000)] * 2))
def test_small_programs_grow_and_large_ones_waste_little(filling: DimUsage, sizes: tuple[int, int]) -> None:
    bucket = JOINT.of(filling).bucket(*sizes)
    if filling.work(bucket) > 2 * SMALL_WORK ** (1 + max(filling.exponents)):
        assert all(padded <= max(2 * size, 4) for size, padded in zip(sizes, bucket, strict=True))
    assert filling.work(bucket) >= min(SMALL_WORK, filling.work(bucket) + 1)


def test_how_sizes_fill_tensors() -> None:
    b, n = sympy.symbols("b n")
    assert DimUsage.of([b, n], [(b, 3, n, n), (b, 5), (7, 9)]) == DimUsage((1, 2), 5, 3)
    assert DimUsage.of([b, n], [(b, 2 * n, 16)]) == DimUsage((1, 1), 32, 2)
    assert DimUsage.of([b], []) == DimUsage((1,), 1, 0)


def test_prompts_go_to_the_buckets_of_caches() -> None:
    b, n = sympy.symbols("b n")
    prompt = DimUsage.of([n], [(1, n)], [(1, n, 99), (1, 8, n, 64), (1, 8, n, 64)])
    assert prompt.prompts == (0,)
    assert [JOINT.of(prompt).bucket(size) for size in (1, 5, 60, 130)] == [(1,), (64,), (64,), (192,)]
    assert not DimUsage.of([b, n], [(b, n, n, 3)], [(b, 8, n, n), (b, 8, n, n)]).prompts  # images
    assert not DimUsage.of([n], [(1, n)], [(1, 8, n + 1, 64), (1, 8, n + 1, 64)]).prompts


def test_prompts_of_caches_of_a_fixed_size_have_the_same_buckets() -> None:
    n = sympy.Symbol("n")
    prompt = DimUsage.of([n], [(4, n), (4, n)], [(4, 8, 99, 64), (4, 8, 99, 64)])
    assert prompt.prompts == (0,)
    assert [JOINT.of(prompt).bucket(size) for size in (5, 130)] == [(64,), (192,)]
    assert not DimUsage.of([n], [(4, n)], [(3, 8, 99, 64), (3, 8, 99, 64)]).prompts


def test_caches_and_their_masks_go_to_powers_of_two_together() -> None:
    n, m = sympy.symbols("n m")
    decoding = DimUsage.of([n, m], [(4, m), (4, 2, n, 64), (4, 2, n, 64)])
    assert (decoding.cached, decoding.masks) == ((0,), (1,))
    buckets = {JOINT.of(decoding).bucket(size, size + 1) for size in range(2, 300)}
    assert buckets == {(64, 65), (128, 129), (256, 257), (512, 513)}
    assert all(JOINT.of(decoding).bucket(*bucket) == bucket for bucket in buckets)


def test_tokens_behind_a_cache_go_to_few_small_buckets() -> None:
    """Drafts to verify, or what a user says next: the mask of the cache is as long as the cache, they are not."""
    s, q, m, kept = sympy.symbols("s q m kept")
    filling = DimUsage.of(
        [s, q, m, kept], [[1, q], [1, m], [1, 2, s, 8], [1, 2, s, 8]], [[1, 2, s + q, 8], [1, kept, 99]]
    )
    assert (filling.cached, filling.masks, filling.chunks) == ((0,), (2,), (1, 3))
    policy = JOINT.of(filling)
    assert policy.bucket(60, 3, 63, 2) == (64, 4, 65, 4)
    assert policy.bucket(100, 5, 105, 1) == (128, 16, 129, 1)
    assert policy.bucket(100, 60, 160, 60) == (128, 64, 257, 64)
    assert policy.bucket(100, 90, 190, 90) == (128, 128, 257, 128)


def test_an_encoders_lengths_go_to_powers_of_two() -> None:
    n = sympy.Symbol("n")
    first = DimUsage.of([n], [(1, n, 16), (1, n)], [(1, 8, n, 64), (1, 8, n, 64), (1, 8, 1, 64)])
    assert (first.cached, first.prompts) == ((0,), ())
    assert JOINT.of(first).bucket(130) == (256,)


def test_the_sides_of_an_image_are_bucketed_alike_whether_they_are_one_size_or_two() -> None:
    b, h, w = sympy.symbols("b h w")
    square = JOINT.of(DimUsage.of([b, h], [(b, 3, h, h)]))
    sides = JOINT.of(DimUsage.of([b, h, w], [(b, 3, h, w)]))
    for batch, side in ((3, 17), (8, 40), (5, 96), (30, 65)):
        bucket, padded = square.bucket(batch, side)
        assert sides.bucket(batch, side, side) == (bucket, padded, padded)


@given(low=st.integers(0, 50), more=st.integers(0, 500), size=st.integers(0, 700))
def test_a_range_holds_the_buckets_between(low: int, more: int, size: int) -> None:
    bounded = Bounded(DEFAULT, low, low + more)
    bucket = bounded.bucket(size)
    assert bucket >= size
    if 2 <= size <= low + more:
        assert min(DEFAULT.bucket(low), low + more) <= bucket <= low + more
        assert bounded.bucket(bucket) == bucket
    if size > low + more:
        assert bucket == size


@pytest.mark.parametrize("above", ["exact", "error"])
def test_a_size_above_the_declared_maximum(above: Any, recorder: Recorder) -> None:
    compiled = torch.compile(lambda x: x.softmax(0), backend="dynaxla")
    x, y = torch.randn(20), torch.randn(33)
    dynaxla.mark_bucketed(x, 0, max=32, above=above)
    compiled(x)
    if above == "error":
        with pytest.raises(BucketError, match="size 33 is above the declared maximum, 32"):
            compiled(y)
        assert_close(compiled(x), x.softmax(0))
    else:
        with recorder.expect(graphs=0, compiles=1):
            assert_close(compiled(y), y.softmax(0))


@dataclass(frozen=True)
class Smaller(BucketPolicy):
    """Breaks the first promise of a policy."""

    def _bucket(self, size: int) -> int:
        return size - 1


@dataclass(frozen=True)
class OneBucket(JointPolicy):
    """Gives two sizes one bucket."""

    def bucket(self, *sizes: int) -> tuple[int, ...]:
        return (max(sizes),)


@pytest.mark.parametrize("buckets", [Smaller(), {(0, 1): OneBucket()}], ids=str)
def test_a_policy_of_the_users_that_gives_no_bucket_is_an_error(buckets: Any) -> None:
    compiled = torch.compile(total, backend="dynaxla", dynamic=True, options={"buckets": buckets})
    with pytest.raises(BucketError, match=r"gives the sizes .* the buckets"):
        compiled(torch.randn(6, 9))


def total(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).softmax(1).sum(0)


@pytest.mark.parametrize(
    ("buckets", "sizes", "compiles"),
    [
        (dynaxla.Exact(), ((3, 5), (3, 6), (4, 6)), 3),
        (dynaxla.Multiples(10), ((3, 5), (9, 10), (2, 2)), 1),
        ({0: dynaxla.Multiples(10), 1: dynaxla.Explicit((6, 12))}, ((3, 5), (9, 6), (10, 12), (4, 7)), 2),
        ({(0, 1): dynaxla.Plan(((4, 16), (8, 32)))}, ((3, 5), (4, 16), (2, 31), (5, 8)), 2),
        ({(1, 0): dynaxla.Plan(((4, 16), (8, 32)))}, ((16, 4), (32, 8), (5, 3)), 2),
    ],
    ids=lambda value: str(value)[:50] if not isinstance(value, tuple) else "",
)
def test_policies_in_the_options(
    buckets: Any, sizes: tuple[tuple[int, int], ...], compiles: int, recorder: Recorder
) -> None:
    compiled = torch.compile(total, backend="dynaxla", dynamic=True, options={"buckets": buckets})
    with recorder.expect(graphs=1, compiles=compiles):
        for size in sizes:
            x = torch.randn(*size)
            assert_close(compiled(x), total(x))


@pytest.mark.parametrize("dynamic", [None, True])
@torch.no_grad()
def test_dims_that_take_one_bucket(dynamic: bool | None, recorder: Recorder) -> None:
    """Images that are not square take the bucket of the longer side."""
    plan = dynaxla.plan_buckets([(3, 9), (4, 12), (7, 20), (8, 16), (6, 18)], max_executables=3)
    net = torch.nn.Conv2d(3, 4, 3, padding=1)

    def f(x: torch.Tensor) -> torch.Tensor:
        return net(x).relu().mean((2, 3))

    compiled = torch.compile(f, backend="dynaxla", dynamic=dynamic, options={"buckets": {(0, (2, 3)): plan}})
    sizes = ((4, 11, 12), (3, 9, 10), (4, 12, 12), (2, 12, 5), (7, 20, 20), (8, 16, 16), (6, 11, 18), (7, 20, 3))
    buckets = {plan.bucket(batch, max(high, wide)) for batch, high, wide in sizes}
    with recorder.expect(
        compiles=len(buckets) + (dynamic is None)
    ):  # one more for the first call, whose sizes are fixed
        for batch, high, wide in sizes:
            x = torch.randn(batch, 3, high, wide)
            assert_close(compiled(x), f(x))
    assert len(buckets) == 3


def test_a_plan_serves_a_size_that_does_not_vary(recorder: Recorder) -> None:
    plan = dynaxla.Plan(((4, 16), (4, 64)))
    compiled = torch.compile(total, backend="dynaxla", options={"buckets": {(0, 1): plan}})
    x = torch.randn(1, 9)
    dynaxla.mark_bucketed(x, 1)
    with recorder.expect(graphs=1, compiles=2):
        for y in (x, torch.randn(1, 16), torch.randn(1, 17)):
            assert_close(compiled(y), total(y))


def test_a_batch_of_one_in_the_graph_of_all_batches(recorder: Recorder) -> None:
    """Under torch's switch, sizes 0 and 1 are no graphs of their own, and neither are they padded."""
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU())

    def f(x: torch.Tensor) -> torch.Tensor:
        return net(x).softmax(1).mean(0)

    compiled = torch.compile(f, backend="dynaxla", dynamic=True)
    with torch.fx.experimental._config.patch(backed_size_oblivious=True), recorder.expect(graphs=1):
        for batch, length in ((5, 9), (1, 12), (6, 16), (1, 9), (3, 1), (7, 1), (1, 1)):
            x = torch.randn(batch, length, 8)
            with torch.no_grad():
                assert_close(compiled(x), f(x))


def test_a_mark_goes_before_the_options(recorder: Recorder) -> None:
    compiled = torch.compile(total, backend="dynaxla", options={"buckets": dynaxla.Exact()})
    x = torch.randn(7, 9)
    dynaxla.mark_bucketed(x, 0, policy=dynaxla.Multiples(10))
    with recorder.expect(graphs=1, compiles=1):
        compiled(x), compiled(torch.randn(9, 9))


def test_one_size_with_two_policies() -> None:
    buckets = {0: dynaxla.Exact(), 1: dynaxla.Multiples(4)}
    compiled = torch.compile(total, backend="dynaxla", dynamic=True, options={"buckets": buckets})
    with pytest.raises(OptionError, match="dims 0 and 1 are the same size"):
        compiled(torch.randn(6, 6))


@pytest.mark.parametrize(
    "buckets",
    [7, "Exact", {0: 5}, {"0": dynaxla.Exact()}, {-1: dynaxla.Exact()}, {(0, 1): dynaxla.Exact()},
     {0: dynaxla.Plan(((4, 16),))}, {True: dynaxla.Exact()}, {((0, 1), ()): dynaxla.Plan(((4, 16),))},
     {(0,): dynaxla.Plan(((4, 16),))}, {(0, (1, "2")): dynaxla.Plan(((4, 16),))}],
)  # fmt: skip
def test_buckets_that_are_none(buckets: object) -> None:
    with pytest.raises(OptionError, match="'buckets'"):
        Options.from_mapping({"buckets": buckets}, {})


def test_buckets_without_bucketing() -> None:
    with pytest.raises(OptionError, match="contradict"):
        Options.from_mapping({"buckets": dynaxla.Exact(), "bucketing": "off"}, {})


def test_the_default_of_two_sizes_needs_few_programs(recorder: Recorder) -> None:
    """dynamic=None: the second size of each dim makes it symbolic, and nothing grows afterwards but the buckets."""
    compiled = torch.compile(total, backend="dynaxla")
    sizes = [(b, n) for b in (5, 3, 8, 2, 7) for n in (33, 64, 40, 62)]
    with recorder.expect(graphs=3):
        for size in sizes:
            x = torch.randn(*size)
            assert_close(compiled(x), total(x))
    with recorder.expect(graphs=0, compiles=0):
        for size in sizes:
            compiled(torch.randn(*size))


def test_a_plan_pads_less_than_the_default_with_as_many_programs() -> None:
    draw = torch.Generator().manual_seed(0)
    batches = torch.randint(2, 9, (2000,), generator=draw).tolist()
    lengths = (torch.randn(2000, generator=draw) * 0.9 + math.log(60)).exp().clamp(4, 512).int().tolist()
    sizes = list(zip(batches, lengths, strict=True))
    policy = JOINT.of(DimUsage((1, 1)))
    cells = {policy.bucket(*size) for size in sizes}
    ratio = sum(math.prod(policy.bucket(*s)) for s in sizes) / sum(map(math.prod, sizes))
    plan = dynaxla.plan_buckets(sizes, max_executables=len(cells))
    seen = dynaxla.Histogram()
    for size in sizes:
        seen.add(*size)
    assert len(cells) <= 16
    assert ratio < 1.7
    assert plan.padded_ratio(seen) < ratio - 0.1


def test_a_bucket_that_cannot_be_padded_leaves_the_others(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    pad = PartGraphs.pad

    def unpaddable(self: PartGraphs, buckets: PartBucket, order: Sequence[sympy.Symbol]) -> Any:
        if tuple(buckets.padded.values()) == (8,):
            raise CannotPad(ExactShape("aten.some", "the bucket is too small"), of_bucket=True)
        return pad(self, buckets, order)

    monkeypatch.setattr(PartGraphs, "pad", unpaddable)
    compiled = torch.compile(lambda x: x.softmax(0), backend="dynaxla", dynamic=True)
    told = len(recorder.snapshot().exact_shapes)
    with recorder.expect(graphs=1, compiles=4):
        for size in (6, 12, 7, 16, 6, 17, 7):  # 6 and 7 exactly, the others at 16 and 32
            x = torch.randn(size)
            assert_close(compiled(x), x.softmax(0))
    assert len(recorder.snapshot().exact_shapes) > told


def test_a_padded_batch_is_handed_on_as_it_is() -> None:
    whole = torch.arange(24.0).view(6, 4)
    assert argument_binder.pad(whole[:3], PaddedShape.of((4, 4))).data_ptr() == whole.data_ptr()
    assert argument_binder.pad(whole[:3, :2], PaddedShape.of((4, 4))).data_ptr() == whole.data_ptr()
    for shape in ((7, 4), (4, 5)):
        padded = argument_binder.pad(whole[:3], PaddedShape.of(shape))
        assert padded.shape == shape
        assert padded.data_ptr() != whole.data_ptr()
        assert torch.equal(padded[:3, :4], whole[:3])
    assert argument_binder.pad(whole[:, :2], PaddedShape.of((8, 2))).is_contiguous()


@torch.no_grad()
def test_graphs_hand_padded_batches_on(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    pad = argument_binder.pad
    monkeypatch.setattr(
        argument_binder,
        "pad",
        lambda x, shape: copies.append(pad(x, shape).data_ptr() != x.data_ptr()) or pad(x, shape),
    )

    @torch.compile(backend="dynaxla")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    for size in (5, 6, 7):
        copies.clear()
        x = torch.randn(size, 4096)  # smaller ones are copied in any case
        assert_close(compiled(x), x * 2 + 1)
    assert copies == [True, False], "the caller's tensor ends where it ends; the graph's own result goes on"


@torch.no_grad()
def test_sizes_that_torch_is_told_of(recorder: Recorder) -> None:
    """`shapes_spec` gives sizes that torch does not look at, 0 and 1 included; `mark_dynamic` a range."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2).softmax(0), x.mean(), x[-1]

    spec = ParamsSpec({"x": TensorSpec([ShapeVar("n"), None])})
    options = {"fallback": "error", "bucketing": "require"}
    compiled = torch.compile(function, backend="dynaxla", shapes_spec=spec, options=options)
    with recorder.expect(graphs=1, compiles=4):
        for size in (40, 33, 48, 1, 50, 59, 2, 1):  # 48, 1, 64 and 2
            x = torch.randn(size, 3)
            for mine, eager in zip(compiled(x), function(x), strict=True):
                assert_close(mine, eager)

    other = torch.compile(lambda x: x.softmax(0), backend="dynaxla")
    x = torch.randn(40, 3)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=45)
    with recorder.expect(graphs=1, compiles=2):
        for y in (x, torch.randn(45, 3), torch.randn(39, 3), torch.randn(30, 3)):  # 45, which is the most, and 32
            assert_close(other(y), y.softmax(0))


def test_sizes_that_depend_on_values(recorder: Recorder) -> None:
    """The graph breaks there, and what comes behind is bucketed like any other."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        some = x[(x > 0).nonzero().squeeze(1)]
        return (some * 2).softmax(0), some.sum() / some.shape[0], torch.unique(some.round()).cumsum(0)

    compiled = torch.compile(function, backend="dynaxla")
    lengths = [40, 41, 55, 60, 33, 70, 80, 90, 100, 37, 45, 66, 77, 88, 99]
    for length in lengths:
        x = torch.randn(length)
        for mine, eager in zip(compiled(x), function(x), strict=True):
            assert_close(mine, eager)
    with recorder.expect(graphs=0):
        for length in lengths:
            compiled(torch.randn(length))


@torch.no_grad()
def test_a_size_that_leaves_its_graph_fixed(recorder: Recorder) -> None:
    """Nothing varies in a graph of one size, though the compiled function's sizes do."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1)[2:]

    compiled = torch.compile(function, backend="dynaxla", dynamic=True)
    for size in (5, 9, 2, 1, 0, 3):
        x = torch.randn(size)
        assert_close(compiled(x), function(x))
