"""Findings about torch-mlir's lowering that many ops share."""

from __future__ import annotations

import torch

from dynaxla.ops.dtypes import FLOATS, HALVES, INT32_INT64, REAL, WIDE_FLOATS, WIDE_INEXACT, WIDE_REAL, XLA_DTYPES
from dynaxla.ops.record import right, rounds

MOVED = (right(XLA_DTYPES),)
COMPUTED = (right(REAL),)
COMPUTED_WIDE_ONLY = (right(WIDE_REAL), rounds(HALVES))
COMPUTED_OF_FLOATS = (right(FLOATS),)
COMPUTED_OF_WIDE_FLOATS_ONLY = (right(WIDE_FLOATS), rounds(HALVES))
MOVED_BY_DECOMPOSITION = (right(WIDE_INEXACT | INT32_INT64 | {torch.bool, torch.uint8}),)
