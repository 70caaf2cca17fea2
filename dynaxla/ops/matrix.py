"""Matrix products.

Products of 16-bit floats are accumulated in float32 and rounded once. float32 products have full precision; a TPU would
otherwise multiply in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import Node

from dynaxla.bucketing.pad_rules import linalg as linalg_rules
from dynaxla.bucketing.pad_rules import matmul as matmul_rules
from dynaxla.custom_ops import internal
from dynaxla.custom_ops.schema import arguments_of
from dynaxla.ops import aten_forms
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.dtypes import NUMBERS, REAL_NUMBERS, WIDE_FLOATS, WIDE_INEXACT, WIDE_NUMBERS
from dynaxla.ops.eager_errors import check_all, check_numbers_fit, check_one_dtype, check_scales
from dynaxla.ops.promotion import JNP_DTYPES, Scalar, cast, opmath_dtype, promote, round_to, torch_dtype
from dynaxla.ops.record import OpFamily
from dynaxla.ops.torch_mlir_verdicts import Finding, Verdict

aten = torch.ops.aten
OPS = OpFamily()


def wide_product(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left @ right` in the accumulation dtype (float32 for the 16-bit floats)."""
    wide = JNP_DTYPES[opmath_dtype(torch_dtype(left))]
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST, preferred_element_type=wide)


def _scaled_sum(self: jax.Array, product: jax.Array, beta: Scalar, alpha: Scalar) -> jax.Array:
    """beta * self + alpha * product in the dtype of `self`; beta == 0 ignores `self`, even NaN."""
    wide = torch_dtype(product)
    total = product if alpha == 1 else cast(alpha, wide) * product
    if beta != 0:
        total = total + (cast(self, wide) if beta == 1 else cast(beta, wide) * cast(self, wide))
    return cast(jnp.broadcast_to(total, product.shape), torch_dtype(self))


def _no_product_times_zero(node: Node) -> str | None:
    """Refuses alpha = 0: whether NaN in the factors matters depends on the library that torch chooses by dtype and size."""
    inexact = node.meta["val"].is_floating_point() or node.meta["val"].is_complex()
    return "a product times zero" if inexact and arguments_of(node)["alpha"] == 0 else None


def _ignores_self(call: Node) -> bool:
    return bool(arguments_of(call)["beta"] == 0)


_check_scaled_sum = check_all(check_one_dtype, check_numbers_fit("alpha", "beta"), _no_product_times_zero)
_LIMITS_OF_ALPHA = "no alpha = 0 of floats: whether NaN in the factors matters depends on eager PyTorch's library"
_FINDINGS_OF_SUMS = (Finding(Verdict.WRONG, WIDE_FLOATS, "NaN in self counts although beta is 0", calls=_ignores_self),)


@OPS.op(
    aten.mm.default,
    aten.bmm.default,
    aten.mv.default,
    aten.dot.default,
    internal.BATCHED_PRODUCT,
    check=check_one_dtype,
    dtypes=NUMBERS,
    pad=matmul_rules.product,
)
def mm(self: jax.Array, mat2: jax.Array) -> jax.Array:
    return cast(wide_product(self, mat2), torch_dtype(self))


@OPS.op(aten.vdot.default, check=check_one_dtype, dtypes=NUMBERS, pad=matmul_rules.product, as_aten=decompose)
def vdot(self: jax.Array, other: jax.Array) -> jax.Array:
    return mm(jnp.conj(self), other)


@OPS.op(aten._int_mm.default, pad=matmul_rules.product)
def int_mm(self: jax.Array, mat2: jax.Array) -> jax.Array:
    return jnp.matmul(self, mat2, preferred_element_type=jnp.int32)


@OPS.op(
    aten.addmm.default,
    aten.baddbmm.default,
    check=_check_scaled_sum,
    limits=_LIMITS_OF_ALPHA,
    dtypes=NUMBERS,
    pad=matmul_rules.product,
    torch_mlir=_FINDINGS_OF_SUMS,
)
@OPS.op(
    aten.addmv.default,
    check=_check_scaled_sum,
    limits=_LIMITS_OF_ALPHA,
    dtypes=NUMBERS,
    pad=matmul_rules.product,
    as_aten=decompose,
)
def addmm(self: jax.Array, mat1: jax.Array, mat2: jax.Array, beta: Scalar = 1, alpha: Scalar = 1) -> jax.Array:
    product = wide_product(mat1, mat2)
    return _scaled_sum(self, product, beta, alpha)


@OPS.op(
    aten.addbmm.default,
    check=_check_scaled_sum,
    dtypes=WIDE_NUMBERS,
    limits=f"16-bit floats: torch rounds after every batch, the single contraction here does not; {_LIMITS_OF_ALPHA}",
)
def addbmm(self: jax.Array, batch1: jax.Array, batch2: jax.Array, beta: Scalar = 1, alpha: Scalar = 1) -> jax.Array:
    product = jnp.einsum("bij,bjk->ik", batch1, batch2, precision=lax.Precision.HIGHEST)
    return _scaled_sum(self, product.astype(self.dtype), beta, alpha)


@OPS.op(aten.addr.default, check=check_all(check_one_dtype, check_scales("alpha", "beta")), as_aten=decompose)
def addr(self: jax.Array, vec1: jax.Array, vec2: jax.Array, beta: Scalar = 1, alpha: Scalar = 1) -> jax.Array:
    a, u, v = promote(self, vec1, vec2)
    dtype = torch_dtype(a)
    wide = opmath_dtype(dtype)
    scaled = round_to(cast(u, wide) * cast(cast(alpha, dtype), wide), dtype)
    outer = round_to(scaled[:, None] * cast(v, wide)[None, :], dtype)
    if beta == 0:
        return cast(outer, dtype)
    kept = round_to(cast(a, wide) * cast(cast(beta, dtype), wide), dtype)
    return cast(outer + kept, dtype)


@OPS.op(aten._addmm_activation.default, check=_check_scaled_sum, dtypes=REAL_NUMBERS, limits=_LIMITS_OF_ALPHA)
def addmm_activation(
    self: jax.Array, mat1: jax.Array, mat2: jax.Array, beta: Scalar = 1, alpha: Scalar = 1, use_gelu: bool = False
) -> jax.Array:
    total = addmm(self, mat1, mat2, beta, alpha)
    return jax.nn.gelu(total, approximate=False) if use_gelu else jnp.maximum(total, 0)


@OPS.op(aten._trilinear.default, dtypes=REAL_NUMBERS, pad=linalg_rules.trilinear)
def trilinear(
    i1: jax.Array,
    i2: jax.Array,
    i3: jax.Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> jax.Array:
    """The product of three tensors, summed over `sumdim`; `expand1` to `expand3` are the dims that each tensor lacks.

    A dim that all three lack has size 0 if it is kept; torch's loop over `unroll_dim` then makes no iteration.
    """
    dims = range(i1.ndim + len(expand1))
    in_none = set(expand1) & set(expand2) & set(expand3)
    operands = [
        operand
        for x, missing in ((i1, expand1), (i2, expand2), (i3, expand3))
        for operand in (cast(x, opmath_dtype(torch_dtype(x))), [dim for dim in dims if dim not in missing])
    ]
    kept = [dim for dim in dims if dim not in sumdim]
    product = jnp.einsum(*operands, [dim for dim in kept if dim not in in_none], precision=lax.Precision.HIGHEST)
    if unroll_dim in in_none:
        product = jnp.zeros_like(product)
    empty = [place for place, dim in enumerate(kept) if dim in in_none]
    whole = jnp.expand_dims(product, empty)
    return cast(
        whole[tuple(slice(0) if place in empty else slice(None) for place in range(whole.ndim))], torch_dtype(i1)
    )


def _keeps_rows_apart(call: Node) -> bool:
    return call.args[0].meta["val"].dim() > 2  # type: ignore[union-attr, no-any-return]


_MERGED_ROWS = "torch-mlir's products take matrices alone, and XLA's TPU compiler fuses nothing past the reshapes"


@OPS.op(
    internal.LINEAR,
    check=check_one_dtype,
    pad=matmul_rules.linear,
    as_aten=aten_forms.linear,
    torch_mlir=(Finding(Verdict.SLOWER, WIDE_INEXACT, _MERGED_ROWS, calls=_keeps_rows_apart),),
)
def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., m, k], weight [n, k]."""
    narrow = x.dtype in (jnp.bfloat16, jnp.float16)
    wide = jnp.float32 if narrow else None
    product = lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=wide)
    if bias is not None:
        product = product + bias.astype(product.dtype)
    return product.astype(x.dtype)


@OPS.op(internal.CONTRACT_ROWS, check=check_one_dtype, pad=matmul_rules.contract_rows)
def contract_rows(left: jax.Array, right: jax.Array) -> jax.Array:
    """One product over several dims: merged, rows whose number is no multiple of a TPU's eight sublanes would be copied."""
    rows = tuple(range(left.ndim - 1))
    wide = JNP_DTYPES[opmath_dtype(torch_dtype(left))]
    highest = lax.Precision.HIGHEST
    product = lax.dot_general(left, right, ((rows, rows), ((), ())), precision=highest, preferred_element_type=wide)
    return product.astype(left.dtype)
