"""Sets of dtypes that records refer to."""

from __future__ import annotations

import torch

INT32_INT64 = frozenset({torch.int32, torch.int64})
INTEGERS_WITHOUT_BOOL = frozenset({torch.uint8, torch.int8, torch.int16}) | INT32_INT64
INTEGERS = INTEGERS_WITHOUT_BOOL | {torch.bool}
WIDE_FLOATS = frozenset({torch.float32, torch.float64})
HALVES = frozenset({torch.float16, torch.bfloat16})
FLOATS = WIDE_FLOATS | HALVES
COMPLEX = frozenset({torch.complex64, torch.complex128})
INEXACT = FLOATS | COMPLEX
WIDE_INEXACT = WIDE_FLOATS | COMPLEX
REAL_NUMBERS = INTEGERS_WITHOUT_BOOL | FLOATS
REAL = INTEGERS | FLOATS
WIDE_REAL = INTEGERS | WIDE_FLOATS
NUMBERS = INTEGERS_WITHOUT_BOOL | INEXACT
WIDE_NUMBERS = INTEGERS_WITHOUT_BOOL | WIDE_INEXACT
XLA_DTYPES = INTEGERS | INEXACT
"""The dtypes of numbers that programs compute with."""
FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
STORED = XLA_DTYPES | FLOAT8
"""The dtypes of an executable's inputs and outputs. Numbers of float8 are moved, chosen and converted, nothing else."""
