"""JAX rules of linear algebra: factorizations, solves, what follows from them, and distances between points.

JAX lowers a factorization to LAPACK on the CPU, to cuSOLVER on CUDA and to XLA's own on a TPU. Each follows LAPACK's
choices (partial pivoting, the signs of Householder reflectors), as torch does, so factors agree and not just products.
Eigenvectors and singular vectors have no such agreement; the rows take only calls whose values alone are read.

For det and slogdet torch factors the transpose of a real matrix that is contiguous, and its backward counts on it;
their rows refuse other layouts, so that a rule can tell from the dtype.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.lax import linalg

from dynaxla.lowering.jax_rules.promotion import promote, torch_dtype
from dynaxla.lowering.jax_rules.rule_set import RuleSet

aten = torch.ops.aten
RULES = RuleSet()

Arrays = tuple[jax.Array, ...]

_ROWS_FOR_PRODUCT = 25  # above this, torch finds Euclidean distances from a matrix product
_EXP_TERMS = 21
_EXP_HALVINGS = 1024  # the largest exponent of a float64
_EXP_RANGE = {4: 3.01, 8: 1.09}  # bytes of a real -> 1-norm up to which so many terms of the series are exact


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(jnp.matrix_transpose(x))


def _product(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def _same_batch(a: jax.Array, b: jax.Array) -> Arrays:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, (*batch, *a.shape[-2:])), jnp.broadcast_to(b, (*batch, *b.shape[-2:]))


def _identity_like(x: jax.Array) -> jax.Array:
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


RULES.rule(aten.linalg_solve_triangular.default)(solve_triangular)


@RULES.rule(aten.triangular_solve.default)
def triangular_solve(
    self: jax.Array, A: jax.Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Arrays:
    a, b = _same_batch(A, self)
    used = jnp.matrix_transpose(a) if transpose else a
    return solve_triangular(used, b, upper=upper != transpose, unitriangular=unitriangular), a


# LU


def _factor_lu(a: jax.Array) -> Arrays:
    """LU, LAPACK's pivots (from 1), and its info: the first zero on U's diagonal, from 1, or 0."""
    if a.size == 0:
        places = (*a.shape[:-2], min(a.shape[-2:]))
        return a, jnp.zeros(places, jnp.int32), jnp.zeros(a.shape[:-2], jnp.int32)
    lu, pivots, _ = linalg.lu(a)
    zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    info = jnp.where(zero.any(-1), jnp.argmax(zero, axis=-1) + 1, 0)
    return lu, pivots + 1, info.astype(jnp.int32)


def _permutation(pivots: jax.Array, rows: int) -> jax.Array:
    """Row i of the factored matrix is row `permutation[i]` of the given one."""
    return linalg.lu_pivots_to_permutation(pivots - 1, rows)


@RULES.rule(aten.linalg_lu_factor_ex.default)
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
        chosen = _permutation(LU_pivots, rows)[..., None, :]
        p = (jnp.arange(rows)[:, None] == chosen).astype(LU_data.dtype)
    return p, lower, upper


RULES.rule(aten.lu_unpack.default)(lu_unpack)


@RULES.rule(aten.linalg_lu.default)
def lu(A: jax.Array, *, pivot: bool = True) -> Arrays:
    factors, pivots, _ = _factor_lu(A)
    return lu_unpack(factors, pivots)


def lu_solve(LU: jax.Array, pivots: jax.Array, B: jax.Array, *, left: bool = True, adjoint: bool = False) -> jax.Array:
    if not left:
        return _adjoint(lu_solve(LU, pivots, _adjoint(B), adjoint=not adjoint))
    factors, b = _same_batch(LU, B)
    if b.size == 0:
        return b
    order = _permutation(pivots, LU.shape[-1])
    order = jnp.broadcast_to(order, factors.shape[:-1])[..., None]
    if not adjoint:
        inner = solve_triangular(factors, jnp.take_along_axis(b, order, -2), upper=False, unitriangular=True)
        return solve_triangular(factors, inner, upper=True)
    inner = solve_triangular(factors, b, upper=True, adjoint=True)
    mixed = solve_triangular(factors, inner, upper=False, unitriangular=True, adjoint=True)
    return jnp.take_along_axis(mixed, jnp.argsort(order, axis=-2), -2)


RULES.rule(aten.linalg_lu_solve.default)(lu_solve)


def solve(A: jax.Array, B: jax.Array, *, left: bool = True, check_errors: bool = False) -> Arrays:
    is_vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    factors, pivots, info = _factor_lu(A)
    result = lu_solve(factors, pivots, B[..., None] if is_vector else B, left=left)
    return result[..., 0] if is_vector else result, factors, pivots, info


RULES.rule(aten._linalg_solve_ex.default)(solve)


@RULES.rule(aten.linalg_inv_ex.default)
def inv(A: jax.Array, *, check_errors: bool = False) -> Arrays:
    result, _, _, info = solve(A, _identity_like(A))
    return result, info


def _parity(pivots: jax.Array) -> jax.Array:
    moved = (pivots != jnp.arange(1, pivots.shape[-1] + 1)).sum(-1)
    return 1 - 2 * (moved % 2)


def _factor_for_det(a: jax.Array) -> Arrays:
    """The factors of `a` (of its transpose if real), their pivots, and U's diagonal."""
    factors, pivots, _ = _factor_lu(a if jnp.iscomplexobj(a) else jnp.matrix_transpose(a))
    return factors, pivots, jnp.diagonal(factors, axis1=-2, axis2=-1)


@RULES.rule(aten._linalg_det.default)
def det(A: jax.Array) -> Arrays:
    factors, pivots, diagonal = _factor_for_det(A)
    return diagonal.prod(-1) * _parity(pivots).astype(A.dtype), factors, pivots


@RULES.rule(aten._linalg_slogdet.default)
def slogdet(A: jax.Array) -> Arrays:
    factors, pivots, diagonal = _factor_for_det(A)
    sign = jnp.sign(diagonal).prod(-1) * _parity(pivots).astype(A.dtype)
    return sign, jnp.log(jnp.abs(diagonal)).sum(-1), factors, pivots


# Cholesky


@RULES.rule(aten.linalg_cholesky_ex.default)
def cholesky(self: jax.Array, *, upper: bool = False, check_errors: bool = False) -> Arrays:
    if self.size == 0:
        return self, jnp.zeros(self.shape[:-2], jnp.int32)
    given = _adjoint(self) if upper else self
    lower = linalg.cholesky(given, symmetrize_input=False)
    # XLA says that a matrix is not positive definite by NaN, LAPACK (and torch) by the place where it stopped.
    info = lax.cond(
        jnp.isnan(lower).any(), _first_bad_minor, lambda a: jnp.zeros(a.shape[:-2], jnp.int32), jnp.tril(given)
    )
    return _adjoint(lower) if upper else lower, info


def _first_bad_minor(lower: jax.Array) -> jax.Array:
    """The order of the first leading minor that is not positive, or 0, by elimination without square roots."""
    n = lower.shape[-1]

    def eliminate(j: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rest, info = state
        column = lax.dynamic_index_in_dim(rest, j, axis=-1, keepdims=False)
        pivot = lax.dynamic_index_in_dim(column, j, axis=-1, keepdims=False).real
        info = jnp.where((info == 0) & ~(pivot > 0), j + 1, info).astype(jnp.int32)
        scaled = column / pivot[..., None].astype(column.dtype)
        return rest - scaled[..., :, None] * jnp.conj(column)[..., None, :], info

    start = (lower, jnp.zeros(lower.shape[:-2], jnp.int32))
    end: tuple[jax.Array, jax.Array] = lax.fori_loop(0, n, eliminate, start)
    return end[1]


def cholesky_solve(self: jax.Array, input2: jax.Array, upper: bool = False) -> jax.Array:
    inner = solve_triangular(input2, self, upper=upper, adjoint=upper)
    return solve_triangular(input2, inner, upper=upper, adjoint=not upper)


RULES.rule(aten.cholesky_solve.default)(cholesky_solve)


@RULES.rule(aten.cholesky_inverse.default)
def cholesky_inverse(self: jax.Array, upper: bool = False) -> jax.Array:
    return cholesky_solve(_identity_like(self), self, upper)


# Householder


@RULES.rule(aten.linalg_qr.default)
def qr(A: jax.Array, mode: str = "reduced") -> Arrays:
    if mode == "r":
        return jnp.zeros((0,), A.dtype), jnp.linalg.qr(A, mode="r")
    return tuple(jnp.linalg.qr(A, mode=mode))


@RULES.rule(aten.geqrf.default)
def geqrf(self: jax.Array) -> Arrays:
    reflectors, scales = jnp.linalg.qr(self, mode="raw")
    return jnp.matrix_transpose(reflectors), scales


@RULES.rule(aten.linalg_householder_product.default)
def householder_product(input: jax.Array, tau: jax.Array) -> jax.Array:
    return linalg.householder_product(input, tau)


@RULES.rule(aten.ormqr.default)
def ormqr(
    self: jax.Array, input2: jax.Array, input3: jax.Array, left: bool = True, transpose: bool = False
) -> jax.Array:
    return linalg.ormqr(self, input2, input3, left=left, transpose=transpose)


# Eigenvalues and singular values


@RULES.rule(aten._linalg_eigh.default)
def eigh(A: jax.Array, UPLO: str = "L", compute_v: bool = True) -> Arrays:
    vectors, values = linalg.eigh(A, lower=UPLO.upper() == "L", symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), A.dtype)


@RULES.rule(aten._linalg_svd.default)
def svd(A: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Arrays:
    if compute_uv:
        return tuple(linalg.svd(A, full_matrices=full_matrices))
    none = jnp.zeros((0,), A.dtype)
    return none, linalg.svd(A, compute_uv=False), none


@RULES.rule(aten.linalg_pinv.atol_rtol_tensor)
def pinv(
    self: jax.Array, *, atol: jax.Array | None = None, rtol: jax.Array | None = None, hermitian: bool = False
) -> jax.Array:
    if self.size == 0:
        return _adjoint(self)
    if hermitian:
        left, values = linalg.eigh(self, symmetrize_input=False)
        right = _adjoint(left)
    else:
        left, values, right = linalg.svd(self, full_matrices=False)
    sizes = jnp.abs(values)
    default = torch.finfo(torch_dtype(self)).eps * max(self.shape[-2:])
    relative = rtol if rtol is not None else default if atol is None else jnp.where(atol > 0, 0, default)
    limit = jnp.maximum(jnp.asarray(0 if atol is None else atol)[..., None], _column(relative) * _largest(sizes))
    kept = sizes > limit
    inverse = jnp.where(kept, 1 / jnp.where(kept, values, 1), 0).astype(self.dtype)
    return _product(_adjoint(right) * inverse[..., None, :], _adjoint(left))


def _column(x: jax.Array | float) -> jax.Array:
    return jnp.asarray(x)[..., None]


def _largest(sizes: jax.Array) -> jax.Array:
    return sizes.max(-1, keepdims=True)


# Functions of matrices


@RULES.rule(aten.linalg_matrix_exp.default)
def matrix_exp(self: jax.Array) -> jax.Array:
    """The Taylor series of the matrix divided by 2**s, squared s times."""
    if self.size == 0:
        return self
    norm = jnp.abs(self).sum(-2).max(-1)
    halvings = jnp.ceil(jnp.log2(norm / _EXP_RANGE[norm.dtype.itemsize]))
    halvings = jnp.clip(jnp.nan_to_num(halvings), 0, _EXP_HALVINGS).astype(jnp.int32)[..., None, None]
    small = self * jnp.exp2(-halvings.astype(norm.dtype))

    def square(i: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(i < halvings, _product(x, x), x)

    result: jax.Array = lax.fori_loop(0, halvings.max(), square, _exp_series(small))
    return result


def _exp_series(x: jax.Array) -> jax.Array:
    """Sum of x^i / i! by threes, so that most products are saved."""
    powers = (jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape), x, _product(x, x))
    cube = _product(powers[2], x)
    total = jnp.zeros_like(x)
    for first in range(_EXP_TERMS - 3, -1, -3):
        total = _product(total, cube) if first < _EXP_TERMS - 3 else total
        for power, degree in zip(powers, range(first, first + 3), strict=True):
            total = total + power * jnp.asarray(1 / math.factorial(degree), x.dtype)
    return total


@RULES.rule(aten.linalg_cross.default)
def cross(self: jax.Array, other: jax.Array, *, dim: int = -1) -> jax.Array:
    a, b = promote(self, other)
    return jnp.cross(a, b, axis=dim)


# Distances


@RULES.rule(aten._cdist_forward.default)
def cdist(x1: jax.Array, x2: jax.Array, p: float, compute_mode: int | None) -> jax.Array:
    many = max(x1.shape[-2], x2.shape[-2]) > _ROWS_FOR_PRODUCT
    if p == 2 and (compute_mode == 1 or (not compute_mode and many)):
        return _distances_from_product(x1, x2)
    return _distances(x1, x2, p)


def _distances_from_product(x1: jax.Array, x2: jax.Array) -> jax.Array:
    """As torch does it, with its loss of digits between near points: |x|^2 - 2 x.y + |y|^2 as one product."""
    squares1, squares2 = (x1 * x1).sum(-1, keepdims=True), (x2 * x2).sum(-1, keepdims=True)
    left = jnp.concatenate([-2 * x1, squares1, jnp.ones_like(squares1)], -1)
    right = jnp.concatenate([x2, jnp.ones_like(squares2), squares2], -1)
    return jnp.sqrt(jnp.maximum(_product(left, jnp.matrix_transpose(right)), 0))


def _distances(x1: jax.Array, x2: jax.Array, p: float) -> jax.Array:
    gaps = jnp.abs(x1[..., :, None, :] - x2[..., None, :, :])
    if p == 0:
        return jnp.minimum(jnp.ceil(gaps), 1).sum(-1)
    if p == 1:
        return gaps.sum(-1)
    if p == 2:
        return jnp.sqrt((gaps * gaps).sum(-1))
    if math.isinf(p):
        return gaps.max(-1, initial=0)
    return (gaps**p).sum(-1) ** (1 / p)


def cdist_backward(grad: jax.Array, x1: jax.Array, x2: jax.Array, p: float, cdist: jax.Array) -> jax.Array:
    if grad.size == 0:
        return jnp.zeros_like(x1)  # not broadcast: so does torch
    gaps = x1[..., :, None, :] - x2[..., None, :, :]
    return (grad[..., None] * _slope(gaps, cdist[..., None], p)).sum(-2)


RULES.rule(aten._cdist_backward.default)(cdist_backward)


def _slope(gaps: jax.Array, distance: jax.Array, p: float) -> jax.Array:
    """The derivative of a p-norm distance by each coordinate; 0 where torch takes it so."""
    if p == 0:
        return jnp.zeros_like(gaps)
    if p == 1:
        return jnp.sign(gaps)
    sizes = jnp.abs(gaps)
    if math.isinf(p):
        return jnp.sign(gaps) * (sizes == distance)
    flat = (distance == 0) | ((gaps == 0) & (p < 1))
    return jnp.where(flat, 0, jnp.sign(gaps) * sizes ** (p - 1) / distance ** (p - 1))


@RULES.rule(aten._pdist_forward.default)
def pdist(self: jax.Array, p: float = 2.0) -> jax.Array:
    rows, columns = np.triu_indices(self.shape[0], 1)
    return _distances(self, self, p)[rows, columns]


@RULES.rule(aten._pdist_backward.default)
def pdist_backward(grad: jax.Array, self: jax.Array, p: float, pdist: jax.Array) -> jax.Array:
    return cdist_backward(_square(grad, self.shape[0]), self, self, p, _square(pdist, self.shape[0]))


def _square(pairs: jax.Array, n: int) -> jax.Array:
    """The symmetric matrix with a zero diagonal whose upper triangle is `pairs`."""
    rows, columns = np.triu_indices(n, 1)
    upper = jnp.zeros((n, n), pairs.dtype).at[rows, columns].set(pairs)
    return upper + upper.T
