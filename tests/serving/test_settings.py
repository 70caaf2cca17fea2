"""Settings say what a batch can be, and refuse what cannot be meant."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaxla.bucket_policy import DEFAULT, Explicit, Multiples, PowersOfTwo
from dynaxla.errors import OptionError
from dynaxla.serving import Settings

POLICIES = st.sampled_from([DEFAULT, PowersOfTwo(), PowersOfTwo(min=8), Multiples(16), Explicit((3, 10, 50))])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"max_size": 0}, "max_size=0"),
        ({"max_size": 2.0}, "max_size=2.0"),
        ({"min_size": 129}, "min_size=129"),
        ({"max_batch": True}, "max_batch=True"),
        ({"max_batch": 12}, "max_batch=16"),
        ({"max_queue": 8}, "max_queue=16"),
        ({"max_padded": -1}, "max_padded=-1"),
        ({"max_wait_s": -0.1}, "max_wait_s=-0.1"),
        ({"max_wait_s": float("nan")}, "max_wait_s=nan"),
        ({"max_wait_s": 5000}, "seconds"),
        ({"sizes": (16, 32)}, "sizes=(16, 32)"),
        ({"rows": None}, "rows=None"),
    ],
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(OptionError) as caught:
        Settings(**{"max_size": 128, **wrong})
    assert named in str(caught.value)
    assert caught.value.hint


def test_long_requests_run_in_smaller_batches() -> None:
    settings = Settings(max_size=256, sizes=Explicit((32, 128, 256)), max_batch=16, max_padded=1000)
    assert [settings.max_rows(bucket) for bucket in (32, 128, 256)] == [16, 4, 2]
    assert settings.padded_rows(3, 128) == 4
    assert Settings(max_size=256, max_padded=100).max_rows(256) == 1


def test_shapes_are_every_batch_that_can_be() -> None:
    settings = Settings(max_size=50, min_size=2, sizes=Explicit((16, 32, 64)), max_batch=4, max_padded=128)
    assert settings.shapes() == ((4, 32), (2, 50), (4, 16), (2, 32), (1, 50), (2, 16), (1, 32), (1, 16))


def test_a_batch_is_not_mostly_padding() -> None:
    settings = Settings(max_size=64, max_batch=16)
    assert [settings.rows_to_run(waiting, 64) for waiting in (1, 2, 3, 5, 6, 9, 12, 16, 40)] == [
        1,
        2,
        3,
        4,
        6,
        8,
        12,
        16,
        16,
    ]
    coarse = Settings(max_size=64, max_batch=16, rows=Explicit((1, 16)))
    assert [coarse.rows_to_run(waiting, 64) for waiting in (1, 2, 5, 17)] == [1, 1, 5, 16]


@given(
    sizes=POLICIES,
    rows=st.sampled_from([PowersOfTwo(), DEFAULT, Explicit((1, 3, 8))]),
    max_size=st.integers(1, 70),
    max_batch=st.sampled_from([1, 3, 8]),
    max_padded=st.none() | st.integers(1, 500),
    data=st.data(),
)
def test_no_batch_has_another_shape(
    sizes: Any, rows: Any, max_size: int, max_batch: int, max_padded: int | None, data: st.DataObject
) -> None:
    if rows.bucket(max_batch) != max_batch:
        return
    settings = Settings(max_size=max_size, sizes=sizes, rows=rows, max_batch=max_batch, max_padded=max_padded)
    bucket = settings.bucket(data.draw(st.integers(1, max_size)))
    count = data.draw(st.integers(1, settings.max_rows(bucket)))
    shape = (settings.padded_rows(count, bucket), bucket)
    assert shape in settings.shapes()
    assert shape[0] >= count
    assert max_padded is None or shape[0] == 1 or shape[0] * bucket <= max_padded
