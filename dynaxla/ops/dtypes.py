"""Sets of dtypes that records refer to."""

from __future__ import annotations

import torch

WORDS = frozenset({torch.int32, torch.int64})
WHOLE_NUMBERS = frozenset({torch.uint8, torch.int8, torch.int16}) | WORDS
INTEGERS = WHOLE_NUMBERS | {torch.bool}
WIDE_FLOATS = frozenset({torch.float32, torch.float64})
HALVES = frozenset({torch.float16, torch.bfloat16})
FLOATS = WIDE_FLOATS | HALVES
COMPLEX = frozenset({torch.complex64, torch.complex128})
INEXACT = FLOATS | COMPLEX
WIDE_INEXACT = WIDE_FLOATS | COMPLEX
REAL_NUMBERS = WHOLE_NUMBERS | FLOATS
REAL = INTEGERS | FLOATS
WIDE_REAL = INTEGERS | WIDE_FLOATS
NUMBERS = WHOLE_NUMBERS | INEXACT
WIDE_NUMBERS = WHOLE_NUMBERS | WIDE_INEXACT
XLA_DTYPES = INTEGERS | INEXACT
"""The dtypes of an executable's inputs and outputs."""
