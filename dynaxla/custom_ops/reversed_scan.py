"""`torch.scan` from the last place to the first: the backward of a scan, without copies in reversed order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynaxla.torch_api.overloads import HigherOrderOperator


class ReversedScan(HigherOrderOperator):
    """A scan of which the tensors are read, and the results of each place stand, in the order of the places."""

    def __init__(self) -> None:
        super().__init__("dynaxla_reversed_scan")

    def __call__(
        self, combine: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], more: tuple[Any, ...]
    ) -> list[Tensor]:
        results = torch.ops.higher_order.scan(combine, init, [x.flip(0) for x in xs], more)
        return [*results[: len(init)], *(x.flip(0) for x in results[len(init) :])]


REVERSED_SCAN = ReversedScan()
