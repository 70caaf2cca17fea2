"""What `torch._check` says of numbers that a graph reads out of tensors holds at every call, or the call raises an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.tolerances import assert_close


def _check_found(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    found = x.nonzero()
    torch._check(found.size(0) == 4)
    return found + 3


def _check_least(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    found = x[x > 0]
    torch._check(found.size(0) > 2)
    return found * 2


def _check_number(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    least = n[0].item()
    torch._check(least == 3)
    return x + least


def _check_equal(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    one, other = n.tolist()
    torch._check(one == other)
    return x.new_ones(one) + other


def _check_product(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    rows = n[0].item()
    torch._check(rows * 2 == 6)
    return x[:6].view(rows, 2) * rows


def _check_length(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    length = n[0].item()
    torch._check(length == x.size(0) - 4)
    return x * length


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "model", [_check_found, _check_least, _check_number, _check_equal, _check_product, _check_length]
)
def test_what_a_check_of_torch_fixes_is_checked_at_every_call(
    model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dynamic: bool
) -> None:
    """Capture takes the condition for true, and may write the number for its symbol."""
    right = torch.tensor([0, 1, 3, 4, 2, 0, 0]), torch.tensor([3, 3])
    wrong = torch.tensor([0, 0, 1, 0, 0, 0, 0]), torch.tensor([4, 2])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(model, backend="dynaxla", dynamic=dynamic)
        for _ in range(2):
            assert_close(compiled(*right), model(*right))
            with pytest.raises(RuntimeError, match="Runtime assertion failed"):
                compiled(*wrong)
