"""Rows of the package's own operators."""

from __future__ import annotations

from dynaxla.ops import internal
from dynaxla.ops.spec import OpSpec, Support

ROWS = (
    OpSpec(internal.LINEAR, Support.JAX),
    OpSpec(internal.KERNEL, Support.JAX),
    OpSpec(internal.CONVOLUTION, Support.JAX),
)
