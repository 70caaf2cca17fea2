"""Factorizations of matrices except LU: Cholesky, QR, eigenvalues, singular values, and solves with them.

Unsupported, so in eager PyTorch: eigenvectors and singular vectors, whose sign (or phase) depends on the library;
`linalg_eig`, `linalg_lstsq`, `linalg_ldl_*`, which JAX does not have on every platform.
"""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.lax import linalg

from dynaxla.bucketing.pad_rules import linalg as linalg_rules
from dynaxla.ops.dtypes import WIDE_INEXACT
from dynaxla.ops.linalg import (
    Arrays,
    check_no_errors_asked,
    conjugate_transpose,
    identity_like,
    product,
    solve_triangular,
)
from dynaxla.ops.promotion import torch_dtype
from dynaxla.ops.record import OpFamily

aten = torch.ops.aten
OPS = OpFamily()
NOT_FINITE = "only the values, not the vectors; NaN for infinities and NaN, for which torch raises"


def check_values_only(node: torch.fx.Node) -> str | None:
    """Refuses calls whose singular vectors or eigenvectors are read."""
    place = {aten._linalg_svd.default: 1, aten._linalg_eigh.default: 0}[node.target]  # type: ignore[index]
    if all(user.target is operator.getitem and user.args[1] == place for user in node.users if user.users):
        return None
    return "the sign of each vector depends on the library"


@OPS.op(
    aten.linalg_cholesky_ex.default,
    dtypes=WIDE_INEXACT | {torch.int32},
    check=check_no_errors_asked,
    pad=linalg_rules.pad_square_matrix,
    limits="if a matrix is not positive definite, the factor is NaN, torch's is incomplete; info agrees",
)
def cholesky(self: jax.Array, *, upper: bool = False, check_errors: bool = False) -> Arrays:
    if self.size == 0:
        return self, jnp.zeros(self.shape[:-2], jnp.int32)
    given = conjugate_transpose(self) if upper else self
    lower = linalg.cholesky(given, symmetrize_input=False)
    # For a matrix that is not positive definite XLA returns NaN, LAPACK (and torch) the index where it stopped.
    info = lax.cond(
        jnp.isnan(lower).any(), _first_bad_minor, lambda a: jnp.zeros(a.shape[:-2], jnp.int32), jnp.tril(given)
    )
    return conjugate_transpose(lower) if upper else lower, info


def _first_bad_minor(lower: jax.Array) -> jax.Array:
    """The order of the first leading minor that is not positive, or 0; by elimination without square roots."""
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


OPS.op(aten.cholesky_solve.default, dtypes=WIDE_INEXACT, pad=linalg_rules.solve)(cholesky_solve)


@OPS.op(
    aten.cholesky_inverse.default,
    dtypes=WIDE_INEXACT,
    pad=linalg_rules.pad_square_matrix,
    limits="a zero on the diagonal, for which torch raises, gives infinities",
)
def cholesky_inverse(self: jax.Array, upper: bool = False) -> jax.Array:
    return cholesky_solve(identity_like(self), self, upper)


# Householder


@OPS.op(
    aten.linalg_qr.default,
    dtypes=WIDE_INEXACT | {torch.int32},
    pad=linalg_rules.factor_with_zeros,
    limits="for a linearly dependent column the column of Q is undefined, as in torch",
)
def qr(A: jax.Array, mode: str = "reduced") -> Arrays:
    if mode == "r":
        return jnp.zeros((0,), A.dtype), jnp.linalg.qr(A, mode="r")
    return tuple(jnp.linalg.qr(A, mode=mode))


@OPS.op(
    aten.geqrf.default,
    dtypes=WIDE_INEXACT | {torch.int32},
    limits="for a linearly dependent column the column of Q is undefined, as in torch",
)
def geqrf(self: jax.Array) -> Arrays:
    reflectors, scales = jnp.linalg.qr(self, mode="raw")
    return jnp.matrix_transpose(reflectors), scales


@OPS.op(aten.linalg_householder_product.default, dtypes=WIDE_INEXACT)
def householder_product(input: jax.Array, tau: jax.Array) -> jax.Array:
    return linalg.householder_product(input, tau)


@OPS.op(aten.ormqr.default, dtypes=WIDE_INEXACT)
def ormqr(
    self: jax.Array, input2: jax.Array, input3: jax.Array, left: bool = True, transpose: bool = False
) -> jax.Array:
    return linalg.ormqr(self, input2, input3, left=left, transpose=transpose)


# Eigenvalues and singular values


@OPS.op(
    aten._linalg_eigh.default,
    dtypes=WIDE_INEXACT,
    check=check_values_only,
    pad=linalg_rules.eigenvalues,
    limits=NOT_FINITE,
)
def eigh(A: jax.Array, UPLO: str = "L", compute_v: bool = True) -> Arrays:
    vectors, values = linalg.eigh(A, lower=UPLO.upper() == "L", symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), A.dtype)


@OPS.op(
    aten._linalg_svd.default,
    dtypes=WIDE_INEXACT,
    check=check_values_only,
    pad=linalg_rules.factor_with_zeros,
    limits=NOT_FINITE,
)
def svd(A: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> Arrays:
    if compute_uv:
        return tuple(linalg.svd(A, full_matrices=full_matrices))
    none = jnp.zeros((0,), A.dtype)
    return none, linalg.svd(A, full_matrices=False, compute_uv=False), none


@OPS.op(
    aten.linalg_pinv.atol_rtol_tensor,
    dtypes=WIDE_INEXACT | {torch.int32},
    limits="infinities and NaN, for which torch raises, give NaN",
)
def pinv(
    self: jax.Array, *, atol: jax.Array | None = None, rtol: jax.Array | None = None, hermitian: bool = False
) -> jax.Array:
    if self.size == 0:
        return conjugate_transpose(self)
    if hermitian:
        left, values = linalg.eigh(self, symmetrize_input=False)
        right = conjugate_transpose(left)
    else:
        left, values, right = linalg.svd(self, full_matrices=False)
    sizes = jnp.abs(values)
    default = torch.finfo(torch_dtype(self)).eps * max(self.shape[-2:])
    relative = rtol if rtol is not None else default if atol is None else jnp.where(atol > 0, 0, default)
    limit = jnp.maximum(jnp.asarray(0 if atol is None else atol)[..., None], _column(relative) * _largest(sizes))
    kept = sizes > limit
    inverse = jnp.where(kept, 1 / jnp.where(kept, values, 1), 0).astype(self.dtype)
    return product(conjugate_transpose(right) * inverse[..., None, :], conjugate_transpose(left))


def _column(x: jax.Array | float) -> jax.Array:
    return jnp.asarray(x)[..., None]


def _largest(sizes: jax.Array) -> jax.Array:
    return sizes.max(-1, keepdims=True)
