"""Linear algebra: LU factorizations, solves, inverses, determinants, exponentials.

JAX lowers a factorization to LAPACK on the CPU, to cuSOLVER on CUDA and to XLA's own code on a TPU. All follow LAPACK's
conventions (partial pivoting, the signs of Householder reflectors), as torch does, so that the factors agree, not only
their products. Eigenvectors and singular vectors have no convention: records refuse calls that read them.

For det and slogdet torch factors the transpose of a contiguous real matrix, and its backward pass depends on it; their
records refuse other layouts, so that the dtype decides.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.lax import linalg

from dynaxla.bucketing.pad_rules import linalg as linalg_rules
from dynaxla.custom_ops.schema import argument, tensor_of
from dynaxla.ops.dtypes import WIDE_INEXACT
from dynaxla.ops.eager_errors import check_one_dtype
from dynaxla.ops.promotion import promote
from dynaxla.ops.record import OpFamily
from dynaxla.torch_api.overloads import parameters

aten = torch.ops.aten
OPS = OpFamily()
PIVOTS = "of pivots that differ by rounding only, either may be chosen"
NOT_CONTIGUOUS = "a real matrix must be contiguous; " + PIVOTS


def check_factors(node: torch.fx.Node) -> str | None:
    """Refuses integer factors."""
    return None if tensor_of(node, "LU_data").dtype in WIDE_INEXACT else "factors of integers"


def check_layout(node: torch.fx.Node) -> str | None:
    """Refuses a real matrix that is not contiguous, as torch then factors the matrix instead of its transpose."""
    a = tensor_of(node, "A")
    if not a.is_complex() and not a.is_contiguous():
        return "torch factors a non-contiguous real matrix in another way than a contiguous one"
    return None


def check_no_errors_asked(node: torch.fx.Node) -> str | None:
    """Refuses a factorization with `check_errors`, without pivots, or of integers."""
    names = {parameter.name for parameter in parameters(node.target)}  # type: ignore[arg-type]
    if "A" in names and tensor_of(node, "A").dtype not in WIDE_INEXACT:
        return "a matrix of integers"
    if "check_errors" in names and argument(node, "check_errors"):
        return "check_errors=True raises depending on values"
    if "pivot" in names and not argument(node, "pivot"):
        return "pivot=False: torch has it on CUDA only"
    return None


Arrays = tuple[jax.Array, ...]

_EXP_TERMS = 21
_EXP_HALVINGS = 1024  # the largest exponent of a float64
_EXP_RANGE = {4: 3.01, 8: 1.09}  # itemsize of a real -> largest 1-norm for which the series is exact


def conjugate_transpose(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.matrix_transpose(x))


def product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _same_batch(a: jax.Array, b: jax.Array) -> Arrays:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, (*batch, *a.shape[-2:])), jnp.broadcast_to(b, (*batch, *b.shape[-2:]))


def identity_like(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)


# Triangular


def solve_triangular(
    self: jax.Array, B: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False, adjoint: bool = False
) -> jax.Array:
    a, b = _same_batch(self, B)
    if b.size == 0:
        return b
    return linalg.triangular_solve(
        a,
        b,
        left_side=left,
        lower=not upper,
        transpose_a=adjoint,
        conjugate_a=adjoint,
        unit_diagonal=unitriangular,
    )


OPS.op(aten.linalg_solve_triangular.default, dtypes=WIDE_INEXACT, pad=linalg_rules.solve)(solve_triangular)


@OPS.op(aten.triangular_solve.default, dtypes=WIDE_INEXACT, pad=linalg_rules.solve)
def triangular_solve(
    self: jax.Array, A: jax.Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Arrays:
    a, b = _same_batch(A, self)
    used = jnp.matrix_transpose(a) if transpose else a
    return solve_triangular(used, b, upper=upper != transpose, unitriangular=unitriangular), a


# LU


def _factor_lu(a: jax.Array) -> Arrays:
    """LU, LAPACK's 1-based pivots, and its info: the 1-based index of the first zero on U's diagonal, or 0."""
    if a.size == 0:
        places = (*a.shape[:-2], min(a.shape[-2:]))
        return a, jnp.zeros(places, jnp.int32), jnp.zeros(a.shape[:-2], jnp.int32)
    lu, pivots, _ = linalg.lu(a)
    zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    info = jnp.where(zero.any(-1), jnp.argmax(zero, axis=-1) + 1, 0)
    return lu, pivots + 1, info.astype(jnp.int32)


def _row_permutation(pivots: jax.Array, rows: int) -> jax.Array:
    """The row permutation of pivots: row i of the factored matrix is row `permutation[i]` of the input."""
    return linalg.lu_pivots_to_permutation(pivots - 1, rows)


@OPS.op(
    aten.linalg_lu_factor_ex.default,
    dtypes=WIDE_INEXACT | {torch.int32},
    check=check_no_errors_asked,
    limits=PIVOTS,
)
def lu_factor(A: jax.Array, *, pivot: bool = True, check_errors: bool = False) -> Arrays:
    return _factor_lu(A)


def lu_unpack(LU_data: jax.Array, LU_pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True) -> Arrays:
    rows, columns = LU_data.shape[-2:]
    k = min(rows, columns)
    p = lower = upper = jnp.zeros((0,), LU_data.dtype)
    if unpack_data:
        lower = jnp.tril(LU_data[..., :k], -1) + jnp.eye(rows, k, dtype=LU_data.dtype)
        upper = jnp.triu(LU_data[..., :k, :])
    if unpack_pivots:
        chosen = _row_permutation(LU_pivots, rows)[..., None, :]
        p = (jnp.arange(rows)[:, None] == chosen).astype(LU_data.dtype)
    return p, lower, upper


OPS.op(aten.lu_unpack.default, dtypes=WIDE_INEXACT | {torch.int32}, check=check_factors)(lu_unpack)


@OPS.op(aten.linalg_lu.default, dtypes=WIDE_INEXACT, check=check_no_errors_asked, limits=PIVOTS)
def lu(A: jax.Array, *, pivot: bool = True) -> Arrays:
    factors, pivots, _ = _factor_lu(A)
    return lu_unpack(factors, pivots)


def lu_solve(LU: jax.Array, pivots: jax.Array, B: jax.Array, *, left: bool = True, adjoint: bool = False) -> jax.Array:
    if not left:
        return conjugate_transpose(lu_solve(LU, pivots, conjugate_transpose(B), adjoint=not adjoint))
    factors, b = _same_batch(LU, B)
    if b.size == 0:
        return b
    order = _row_permutation(pivots, LU.shape[-1])
    order = jnp.broadcast_to(order, factors.shape[:-1])[..., None]
    if not adjoint:
        inner = solve_triangular(factors, jnp.take_along_axis(b, order, -2), upper=False, unitriangular=True)
        return solve_triangular(factors, inner, upper=True)
    inner = solve_triangular(factors, b, upper=True, adjoint=True)
    mixed = solve_triangular(factors, inner, upper=False, unitriangular=True, adjoint=True)
    return jnp.take_along_axis(mixed, jnp.argsort(order, axis=-2), -2)


OPS.op(aten.linalg_lu_solve.default, dtypes=WIDE_INEXACT | {torch.int32}, pad=linalg_rules.solve_known_size)(lu_solve)


def solve(A: jax.Array, B: jax.Array, *, left: bool = True, check_errors: bool = False) -> Arrays:
    is_vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    factors, pivots, info = _factor_lu(A)
    result = lu_solve(factors, pivots, B[..., None] if is_vector else B, left=left)
    return result[..., 0] if is_vector else result, factors, pivots, info


OPS.op(
    aten._linalg_solve_ex.default,
    dtypes=WIDE_INEXACT | {torch.int32},
    check=check_no_errors_asked,
    limits=PIVOTS,
    pad=linalg_rules.solve_known_size,
)(solve)


@OPS.op(
    aten.linalg_inv_ex.default,
    dtypes=WIDE_INEXACT | {torch.int32},
    check=check_no_errors_asked,
    limits=PIVOTS,
    pad=linalg_rules.pad_square_matrix,
)
def inv(A: jax.Array, *, check_errors: bool = False) -> Arrays:
    result, _, _, info = solve(A, identity_like(A))
    return result, info


def _parity(pivots: jax.Array) -> jax.Array:
    moved = (pivots != jnp.arange(1, pivots.shape[-1] + 1)).sum(-1)
    return 1 - 2 * (moved % 2)


def _factor_for_det(a: jax.Array) -> Arrays:
    """The factors of `a` (of its transpose if real), their pivots, and U's diagonal."""
    factors, pivots, _ = _factor_lu(a if jnp.iscomplexobj(a) else jnp.matrix_transpose(a))
    return factors, pivots, jnp.diagonal(factors, axis1=-2, axis2=-1)


@OPS.op(
    aten._linalg_det.default,
    dtypes=WIDE_INEXACT | {torch.int32},
    check=check_layout,
    limits=NOT_CONTIGUOUS,
    pad=linalg_rules.pad_square_matrix,
)
def det(A: jax.Array) -> Arrays:
    factors, pivots, diagonal = _factor_for_det(A)
    return diagonal.prod(-1) * _parity(pivots).astype(A.dtype), factors, pivots


@OPS.op(
    aten._linalg_slogdet.default,
    dtypes=WIDE_INEXACT | {torch.int32},
    check=check_layout,
    limits=NOT_CONTIGUOUS,
    pad=linalg_rules.pad_square_matrix,
)
def slogdet(A: jax.Array) -> Arrays:
    factors, pivots, diagonal = _factor_for_det(A)
    sign = jnp.sign(diagonal).prod(-1) * _parity(pivots).astype(A.dtype)
    return sign, jnp.log(jnp.abs(diagonal)).sum(-1), factors, pivots


# Cholesky


# Functions of matrices


@OPS.op(
    aten.linalg_matrix_exp.default,
    dtypes=WIDE_INEXACT | {torch.int32},
    pad=linalg_rules.pad_square_matrix,
    limits="rounding errors grow with the norm, and differ from torch's",
)
def matrix_exp(self: jax.Array) -> jax.Array:
    """The Taylor series of the matrix divided by 2**s, squared s times (scaling and squaring)."""
    if self.size == 0:
        return self
    norm = jnp.abs(self).sum(-2).max(-1)
    halvings = jnp.ceil(jnp.log2(norm / _EXP_RANGE[norm.dtype.itemsize]))
    halvings = jnp.clip(jnp.nan_to_num(halvings), 0, _EXP_HALVINGS).astype(jnp.int32)[..., None, None]
    small = self * jnp.exp2(-halvings.astype(norm.dtype))

    def square(i: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(i < halvings, product(x, x), x)

    result: jax.Array = lax.fori_loop(0, halvings.max(), square, _exp_series(small))
    return result


def _exp_series(x: jax.Array) -> jax.Array:
    """The sum of x^i / i!, in groups of three terms, which saves most products."""
    powers = (jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape), x, product(x, x))
    cube = product(powers[2], x)
    total = jnp.zeros_like(x)
    for first in range(_EXP_TERMS - 3, -1, -3):
        total = product(total, cube) if first < _EXP_TERMS - 3 else total
        for power, degree in zip(powers, range(first, first + 3), strict=True):
            total = total + power * jnp.asarray(1 / math.factorial(degree), x.dtype)
    return total


@OPS.op(aten.linalg_cross.default, check=check_one_dtype, pad=linalg_rules.cross)
def cross(self: jax.Array, other: jax.Array, *, dim: int = -1) -> jax.Array:
    a, b = promote(self, other)
    return jnp.cross(a, b, axis=dim)


# Distances
