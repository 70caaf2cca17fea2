"""What came of offering many ops to torch-mlir alike."""

from __future__ import annotations

from dynaxla.ops.dtypes import FLOATS, HALVES, REAL, WIDE_FLOATS, WIDE_REAL, XLA_DTYPES
from dynaxla.ops.record import right, rounds, wrong

MOVED = (right(XLA_DTYPES),)
COMPUTED = (right(REAL),)
COMPUTED_ROUGHLY = (right(WIDE_REAL), rounds(HALVES))
COMPUTED_OF_FLOATS = (right(FLOATS),)
COMPUTED_OF_FLOATS_ROUGHLY = (right(WIDE_FLOATS), rounds(HALVES))

CONSTANTS = (wrong(XLA_DTYPES, "some folds of constants: frac(full_like(x, 3)) is 6"),)
PICKED = (wrong(XLA_DTYPES, "an index out of range reads another element, where the body gives NaN"),)
SCATTERED = (wrong(XLA_DTYPES, "an index out of range is not promised to write nothing, as padding needs"),)
ORDERED = (wrong(XLA_DTYPES, "ties lose their order"),)
OTHER_FORMULA = (wrong(XLA_DTYPES, "another formula than torch's, which the samples do not tell apart"),)
