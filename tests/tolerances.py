"""How close a result must be to eager's: by the table of `dynaxla bench`, one row per dtype."""

from __future__ import annotations

import torch

from dynaxla.bench.answers import RELATIVE


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equal shape and dtype, equal patterns of NaN and infinity, and closeness by the table."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    if expected.dtype not in RELATIVE:
        assert torch.equal(actual, expected), f"{actual} differs from {expected}"
        return
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isfinite(actual), finite), "finite in other places than eager"
    torch.testing.assert_close(actual[~finite], expected[~finite], equal_nan=True)
    if not finite.any():
        return
    wide = torch.complex128 if expected.is_complex() else torch.float64
    difference = (actual[finite].to(wide) - expected[finite].to(wide)).abs().max().item()
    scale = max(expected[finite].to(wide).abs().max().item(), 1e-30)
    assert difference <= RELATIVE[expected.dtype] * scale, f"off by {difference:.3e} at scale {scale:.3e}"
