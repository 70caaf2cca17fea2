"""The autocast lists of ops on accelerators, which torch has only in C++ macros (`ATen/autocast_mode.h`).

These are CUDA's lists: torch registers no autocast for a device in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dynaxla.torch_api.overloads import OpOverload

LOWER_PRECISION = """
_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm
chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell
_scaled_dot_product_flash_attention scaled_dot_product_attention
""".split()
"""Ops computed in autocast's dtype."""

FLOAT32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity
poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss
mse_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d
upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d
upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
""".split()
"""Ops computed in float32."""

FLOAT32_BY_DTYPE = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord
sum sum.dim_IntList
""".split()
"""Ops called with `dtype=torch.float32` if the call names no dtype and its tensor is a 16-bit float."""

WIDEST = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
""".split()
"""Ops computed in the widest dtype among their tensors."""


def overloads_of(names: Sequence[str]) -> Iterator[OpOverload]:
    """Yields the ATen overloads of these names. Relies on their names."""
    for name in names:
        packet, _, overload = name.partition(".")
        yield getattr(getattr(torch.ops.aten, packet), overload or "default")


def autocast_state() -> list[tuple[str, torch.dtype]]:
    """Each type of device for which autocast is on in this thread, and its dtype."""
    devices = torch._C._autocast_supported_devices()
    return [(each, torch.get_autocast_dtype(each)) for each in devices if torch.is_autocast_enabled(each)]


def autocast_dtype(device_type: str) -> torch.dtype:
    """Returns the dtype of autocast that is currently set for a device type."""
    return torch.get_autocast_dtype(device_type)


def call_without_autocast(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Makes a call with autocast excluded. Relies on `torch._C._ExcludeDispatchKeyGuard`."""
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return call(*args, **kwargs)


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
