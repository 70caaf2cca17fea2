"""The gradient of max pooling that finds the maxima itself: no forward has to keep their indices for it."""

from __future__ import annotations

import torch
from torch import Tensor

from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten


def _define(name: str, pool: OpOverload, gradient: OpOverload) -> OpOverload:
    @torch.library.custom_op(f"dynaxla::{name}", mutates_args=())
    def max_pool_gradient(
        grad_output: Tensor,
        self: Tensor,
        kernel_size: list[int],
        stride: list[int],
        padding: list[int],
        dilation: list[int],
        ceil_mode: bool,
    ) -> Tensor:
        """The gradient of images [batch, channels, *sizes], given that of their maxima; the settings are those of the pooling.

        That of a window goes to its first element of equal ones, or its last NaN.
        """
        settings = (kernel_size, stride, padding, dilation, ceil_mode)
        result: Tensor = gradient(grad_output, self, *settings, pool(self, *settings)[1])
        return result

    max_pool_gradient.register_fake(lambda grad_output, self, *settings: torch.empty_like(self))
    made: OpOverload = getattr(torch.ops.dynaxla, name).default
    return made


MAX_POOL2D_GRADIENT = _define(
    "max_pool2d_gradient", aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default
)
MAX_POOL3D_GRADIENT = _define(
    "max_pool3d_gradient", aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default
)
