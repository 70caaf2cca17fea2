"""Plans against brute force over small cases; histograms survive files and threads."""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaxla.bucketing.bucket_planner import Histogram, Plan, plan_buckets
from dynaxla.errors import BucketError, OptionError

SIZES = st.integers(2, 40)
PAIRS = st.tuples(st.integers(2, 12), st.integers(2, 12))
Counts = Counter[tuple[int, ...]]


def _runs(sizes: Sequence[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every way to cut the sizes into runs."""
    for cuts in itertools.product((False, True), repeat=len(sizes) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(cuts) if cut), len(sizes)]
        yield [tuple(sizes[start:end]) for start, end in itertools.pairwise(edges)]


def _least_one_dim(counts: Counts, most: int) -> int:
    return min(work for runs, work in _work_by_runs(counts) if runs <= most)


def _work_by_runs(counts: Counts) -> list[tuple[int, int]]:
    """The number of runs and the work of every way to cut the sizes."""
    return [
        (len(runs), sum(run[-1] * counts[size,] for run in runs for size in run))
        for runs in _runs(sorted(size for (size,) in counts))
    ]


def _least_two_dims(counts: Counts, most: int) -> float:
    return min(_least_of_slabs(slabs, counts, most) for slabs in _runs(sorted({first for first, _ in counts})))


def _least_of_slabs(slabs: list[tuple[int, ...]], counts: Counts, most: int) -> float:
    """The least work over every way to share the cells among the slabs."""
    options: list[dict[int, int]] = []
    for slab in slabs:
        columns: Counts = Counter()
        for (first, second), count in counts.items():
            columns[second,] += count if first in slab else 0
        columns = +columns
        options.append({cells: slab[-1] * _least_one_dim(columns, cells) for cells in range(1, len(columns) + 1)})
    return min(
        (
            sum(option[cells] for option, cells in zip(options, shares, strict=True))
            for shares in itertools.product(*options)
            if sum(shares) <= most
        ),
        default=math.inf,
    )


def _work(plan: Plan, counts: Counts) -> int:
    return sum(math.prod(plan.bucket(*sizes)) * count for sizes, count in counts.items())


def _histogram(counts: Counts) -> Histogram:
    histogram = Histogram()
    for sizes in counts.elements():
        histogram.add(*sizes)
    return histogram


@given(st.lists(SIZES, min_size=1, max_size=30), st.integers(1, 8))
def test_one_dim_is_the_best_there_is(sizes: list[int], most: int) -> None:
    counts: Counts = Counter((size,) for size in sorted(sizes)[:9] + sizes[:2])
    plan = plan_buckets(_histogram(counts), most, above="error")
    assert plan.executables <= most
    assert _work(plan, counts) == _least_one_dim(counts, most)
    assert [plan.policy().bucket(size) for (size,) in counts] == [plan.bucket(size)[0] for (size,) in counts]


@given(st.lists(PAIRS, min_size=1, max_size=40), st.integers(1, 9), st.randoms())
def test_two_dims_cover_all_and_never_pad_more_than_one_cell(pairs: list[Any], most: int, random: Any) -> None:
    counts: Counts = Counter({pair: random.randint(1, 50) for pair in pairs})
    plan = plan_buckets(_histogram(counts), most, above="error")
    assert plan.executables <= most
    largest = math.prod(max(sizes) for sizes in zip(*counts, strict=True))
    assert _work(plan, counts) <= largest * counts.total()


def test_two_dims_are_near_the_best_slabs() -> None:
    """Within three hundredths, in sum over small cases, of the best plan that cuts the first dim and each slab by itself."""
    random = np.random.default_rng(0)
    greedy = best = 0.0
    for _ in range(60):
        pairs = map(tuple, random.integers(2, 13, (7, 2)).tolist())
        counts: Counts = Counter({pair: int(random.integers(1, 50)) for pair in pairs})
        for most in (1, 2, 3, 4):
            greedy += _work(plan_buckets(_histogram(counts), most, above="error"), counts)
            best += _least_two_dims(counts, most)
    assert greedy <= 1.03 * best


def test_a_plan_that_is_full_takes_a_better_cell() -> None:
    counts: Counts = Counter({(2, 2): 100, (9, 9): 1, (8, 8): 90})
    plan = plan_buckets(_histogram(counts), 3, above="error")
    assert plan.cells == ((2, 2), (8, 8), (9, 9))


@given(st.lists(PAIRS, min_size=1, max_size=40), st.integers(1, 9), st.tuples(st.integers(0, 15), st.integers(0, 15)))
def test_a_plan_buckets_any_sizes(pairs: list[Any], most: int, sizes: tuple[int, int]) -> None:
    plan = plan_buckets(pairs, most)
    bucket = plan.bucket(*sizes)
    assert all(padded >= size for padded, size in zip(bucket, sizes))
    assert all(padded == size for padded, size in zip(bucket, sizes) if size <= 1)
    assert plan.bucket(*bucket) == bucket


def test_a_pair_takes_the_smallest_cell_of_any_slab() -> None:
    plan = Plan(((11, 5), (10, 100), (11, 100)))
    assert plan.bucket(10, 3) == (11, 5)
    assert plan.bucket(10, 6) == (10, 100)
    assert plan.bucket(11, 6) == (11, 100)
    assert plan.bucket(1, 6) == (1, 100)
    assert plan.bucket(12, 6) == (12, 6)


def test_sizes_above_every_cell_are_an_error_where_asked() -> None:
    plan = plan_buckets([5, 9], 2, above="error")
    assert plan.bucket(9) == (9,)
    with pytest.raises(BucketError, match="10"):
        plan.bucket(10)
    with pytest.raises(BucketError, match="10"):
        plan.policy().bucket(10)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=14), st.integers(3, 6))
def test_pairs_with_a_size_1_have_cells_of_their_own(pairs: list[tuple[int, int]], most: int) -> None:
    counts: Counts = Counter(pair for pair in pairs if max(pair) >= 2)
    if not counts:
        return
    plan = plan_buckets(_histogram(counts), most, above="error")
    assert plan.executables <= most
    for pair in counts:
        assert [b == 1 for b in plan.bucket(*pair)] == [size == 1 for size in pair]
    kinds = {(first == 1, second == 1) for first, second in counts}
    if most >= len(kinds):
        assert {(first == 1, second == 1) for first, second in plan.cells} == kinds


def test_a_size_1_takes_a_cell_of_its_own_kind() -> None:
    plan = Plan(((1, 4), (2, 8), (1, 64), (4, 64)))
    assert plan.bucket(1, 5) == (1, 64)
    assert plan.bucket(2, 5) == (2, 8)
    assert Plan(((4, 64),)).bucket(1, 5) == (1, 64)


def test_sizes_0_and_1_are_left_out() -> None:
    assert plan_buckets([0, 1, 1, 6, 7], 1).cells == ((7,),)
    assert plan_buckets([(1, 50), (4, 8), (3, 0)], 1).cells == ((4, 8),)
    assert plan_buckets([6], 1, above="error").bucket(1) == (1,)


def test_padded_ratio() -> None:
    plan = Plan(((4, 8), (4, 16)))
    histogram = _histogram(Counter({(2, 8): 3, (4, 12): 1}))
    assert plan.padded_ratio(histogram) == (3 * 32 + 64) / (3 * 16 + 48)
    assert plan.padded_ratio(Histogram()) == 1.0


@given(st.lists(PAIRS, min_size=1), st.integers(1, 9), st.sampled_from(["exact", "error"]))
def test_a_plan_survives_json(pairs: list[Any], most: int, above: Any) -> None:
    plan = plan_buckets(pairs, most, above)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"cells": [[8]]}',
        '{"cells": [8], "above": "exact"}',
        '{"cells": [], "above": "exact"}',
        '{"cells": [[8], [9, 9]], "above": "exact"}',
        '{"cells": [[8, 8, 8]], "above": "exact"}',
        '{"cells": [[8.5]], "above": "exact"}',
        '{"cells": [[1]], "above": "exact"}',
        '{"cells": [[9], [8]], "above": "exact"}',
        '{"cells": [[8], [8]], "above": "exact"}',
        '{"cells": [[8]], "above": "largest"}',
    ],
)
def test_what_is_not_a_plan_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="not a plan of buckets") as caught:
        Plan.from_json(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("sizes", "most", "message"),
    [
        ([], 2, "no observations"),
        ([0, 1], 2, "no observations"),
        ([5], 0, "max_executables=0"),
        ([5], 2.0, "max_executables=2.0"),
        ([5, (5, 6)], 2, r"\[1, 2\] dims"),
        ([(5, 6, 7)], 2, r"\[3\] dims"),
    ],
)
def test_what_cannot_be_planned_is_refused(sizes: Any, most: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        plan_buckets(sizes, most)


def test_a_plan_wants_one_size_per_dim() -> None:
    plan = Plan(((4, 8),))
    with pytest.raises(OptionError, match="3 sizes"):
        plan.bucket(2, 3, 4)
    with pytest.raises(OptionError, match="two dims"):
        plan.policy()


def test_a_histogram_survives_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    histogram = _histogram(Counter({(3, 70): 2, (8,): 1}))
    histogram.save(path)
    histogram.add(8)
    histogram.save(path)
    assert Histogram.load(path).counts() == {(3, 70): 2, (8,): 2}
    assert os.listdir(tmp_path) == ["sizes.json"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sizes.json"
    histogram = _histogram(Counter({(8,): 1}))
    histogram.save(path)

    def fails(written: object, path: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fails)
    histogram.add(9)
    with pytest.raises(OSError, match="no space"):
        histogram.save(path)
    assert Histogram.load(path).counts() == {(8,): 1}
    assert os.listdir(tmp_path) == ["sizes.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b'{"counts": [[[8], 1]',
        b"[]",
        b'{"sizes": []}',
        b'{"counts": 3}',
        b'{"counts": [[8, 1]]}',
        b'{"counts": [[[8], 1, 2]]}',
        b'{"counts": [[[8], -1]]}',
        b'{"counts": [[[8], 1.5]]}',
        b'{"counts": [[[], 1]]}',
        b'{"counts": [[["8"], 1]]}',
    ],
)
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "sizes.json"
    path.write_bytes(content)
    with pytest.raises(OptionError, match=r"sizes\.json is not a histogram") as caught:
        Histogram.load(path)
    assert caught.value.hint


def test_merge_adds() -> None:
    one, other = _histogram(Counter({(8,): 1, (9,): 2})), _histogram(Counter({(9,): 3}))
    one.merge(other)
    one.merge(one)
    assert one.counts() == {(8,): 2, (9,): 10}
    assert other.counts() == {(9,): 3}


class _Interruptible(int):
    """Hashing it runs Python code, where the interpreter may switch threads; within a dict of ints it never does."""

    def __hash__(self) -> int:
        return super().__hash__()


def test_threads_lose_no_observation() -> None:
    histogram, other = Histogram(), Histogram()
    other.add(_Interruptible(3))
    start = threading.Barrier(4)

    def observe() -> None:
        start.wait()
        for i in range(3000):
            histogram.add(_Interruptible(i % 7))
            if i % 10 == 0:
                histogram.merge(other)
                other.counts()

    threads = [threading.Thread(target=observe) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sum(histogram.counts().values()) == 4 * (3000 + 300)
