"""How close a result must be to eager's: by the package's own table."""

from __future__ import annotations

import torch

from dynaxla.observe.differences import RELATIVE as RELATIVE
from dynaxla.observe.differences import measure_difference


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equal shape and dtype, equal patterns of NaN and infinity, and closeness by the table."""
    difference = measure_difference(actual, expected)
    assert difference.is_close, f"{difference}: {actual}, expected {expected}"
