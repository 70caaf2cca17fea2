"""What is rewritten for torch's CUDA tensors alone, by its arithmetic: tests/cuda runs it on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynaxla.decompositions.decomposition_table import GPU_DECOMPOSITIONS
from dynaxla.decompositions.fused_attention import efficient_attention_backward
from tests.tolerances import assert_close

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class OnGpu(Tensor):
    """Says that it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.as_subclass(Tensor) if isinstance(a, Tensor) else a for a in args), **(kwargs or {}))


def test_tensors_of_the_cpu_are_left_alone() -> None:
    x, one = torch.randn(3, 2), torch.ones(2)
    assert GPU_DECOMPOSITIONS[aten.log_sigmoid_forward.default](x) is NotImplemented
    given = (x, one, one, one, one, 0.1, 1e-5)
    assert GPU_DECOMPOSITIONS[aten._native_batch_norm_legit_no_training.default](*given) is NotImplemented


def test_gelu_of_a_product_is_approximated() -> None:
    x, left, right = torch.randn(2, 3), torch.randn(2, 4), torch.randn(4, 3)
    rewrite = GPU_DECOMPOSITIONS[aten._addmm_activation.default]
    assert rewrite(x, left, right, use_gelu=True) is NotImplemented
    expected = F.gelu(x + 2 * left @ right, approximate="tanh")
    assert_close(rewrite(x.as_subclass(OnGpu), left, right, alpha=2, use_gelu=True), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logsigmoid(dtype: torch.dtype) -> None:
    x = torch.tensor([-100.0, -3, -1e-3, 0, 0.5, 20, 90, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    y, buffer = GPU_DECOMPOSITIONS[aten.log_sigmoid_forward.default](x.as_subclass(OnGpu))
    assert_close(y, F.logsigmoid(x))
    assert buffer.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 2, 2, 2)])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_in_evaluation(dtype: torch.dtype, shape: tuple[int, ...], affine: bool) -> None:
    x, mean, var = torch.randn(shape).to(dtype), torch.randn(3), torch.rand(3) + 0.5
    weight, bias = (torch.randn(3).to(dtype), torch.randn(3).to(dtype)) if affine else (None, None)
    rewritten = GPU_DECOMPOSITIONS[aten._native_batch_norm_legit_no_training.default]
    y, saved, rstd = rewritten(x.as_subclass(OnGpu), weight, bias, mean, var, 0.1, 1e-5)
    exact = F.batch_norm(x.double(), mean.double(), var.double(), *(v and v.double() for v in ()), eps=1e-5)
    if weight is not None and bias is not None:
        channels = [1, -1, *[1] * (x.dim() - 2)]
        exact = exact * weight.double().view(channels) + bias.double().view(channels)
    assert_close(y, exact.to(dtype))
    assert torch.equal(saved, mean)
    assert_close(rstd, (var + 1e-5).rsqrt())


@pytest.mark.parametrize("bias_shape", [(4, 6), (2, 1, 4, 6), (1, 3, 1, 6), (2, 3, 4, 6)], ids=str)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_of_a_mask_of_numbers(bias_shape: tuple[int, ...], scale: float | None, masked: bool) -> None:
    query, key, value = (torch.randn(2, 3, size, 8, dtype=torch.float64) for size in (4, 6, 6))
    bias = torch.randn(bias_shape, dtype=torch.float64)
    if masked:
        bias[..., 2:] = -torch.inf
    given = [tensor.requires_grad_() for tensor in (query, key, value, bias)]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * factor + bias
    out = scores.softmax(-1) @ value
    grad_out = torch.randn_like(out)
    expected = torch.autograd.grad(out, given, grad_out)
    seeds = torch.zeros(2, dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    mask = [True, True, True, True]
    with torch.no_grad():
        actual = efficient_attention_backward(
            grad_out, *given, out, scores.logsumexp(-1), *seeds, 0.0, mask, False, scale=scale
        )
    for mine, exact in zip(actual, expected, strict=True):
        assert mine.shape == exact.shape
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-9)
