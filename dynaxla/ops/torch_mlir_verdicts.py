"""Findings about torch-mlir's lowering that many ops share."""

from __future__ import annotations

import torch

from dynaxla.ops.dtypes import FLOATS, HALVES, REAL, WIDE_FLOATS, WIDE_INEXACT, WIDE_REAL, WORDS, XLA_DTYPES
from dynaxla.ops.record import right, rounds

MOVED = (right(XLA_DTYPES),)
COMPUTED = (right(REAL),)
COMPUTED_ROUGHLY = (right(WIDE_REAL), rounds(HALVES))
COMPUTED_OF_FLOATS = (right(FLOATS),)
COMPUTED_OF_FLOATS_ROUGHLY = (right(WIDE_FLOATS), rounds(HALVES))
MOVED_BY_DECOMPOSITION = (right(WIDE_INEXACT | WORDS | {torch.bool, torch.uint8}),)
