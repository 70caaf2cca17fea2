"""Makes the device's sweeps run every op call in buckets, with every size varying and junk in all padding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from dynaxla.device import dynamic_op_graphs
from dynaxla.device.dynamic_op_graphs import DynamicDims
from tests.device.junk import junk_in_padding


@contextmanager
def all_bucketed(wanted: bool) -> Iterator[None]:
    """While it lasts, and it is wanted, each call of an op is one whose sizes vary, those that are equal together."""
    if not wanted:
        yield
        return
    with junk_in_padding(), mock.patch.object(dynamic_op_graphs, "find_dynamic_dims", _all_of):
        yield


def _all_of(seen: object, values: tuple[int, ...]) -> DynamicDims | None:
    long = list(dict.fromkeys(value for value in values if value > 1))
    return DynamicDims(values, tuple(long.index(v) if v > 1 else -1 for v in values)) if long else None
