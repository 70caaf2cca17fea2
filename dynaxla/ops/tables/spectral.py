"""Rows of the Fourier transforms, linear algebra and distances; their bodies are in jax_rules/fft.py and linalg.py.

Not here, so in eager: eigenvectors and singular vectors, whose sign (or phase) is as the library has it; `linalg_eig`,
`linalg_lstsq`, `linalg_ldl_*`, for which JAX has no body on every platform; and the check behind `inv`, `solve` and
`cholesky`, which raises from values.
"""

from __future__ import annotations

import operator

import torch

from dynaxla.ops.spec import Check, OpSpec, Support
from dynaxla.ops.tables.data import argument, tensor_of

aten = torch.ops.aten

REAL_DTYPES = frozenset({torch.float32, torch.float64})
INEXACT_DTYPES = REAL_DTYPES | {torch.complex64, torch.complex128}
MATRIX_DTYPES = INEXACT_DTYPES | {torch.int32}  # int32: pivots and error codes


def check_values_only(node: torch.fx.Node) -> str | None:
    """Refuse singular vectors and eigenvectors that something reads."""
    place = {aten._linalg_svd.default: 1, aten._linalg_eigh.default: 0}[node.target]  # type: ignore[index]
    if all(user.target is operator.getitem and user.args[1] == place for user in node.users if user.users):
        return None
    return "the sign of each vector is as the library has it, and not the same in two libraries"


def check_no_errors_asked(node: torch.fx.Node) -> str | None:
    """Refuse a factorization that is to raise by itself, or to go without pivots, or of integers."""
    names = {parameter.name for parameter in node.target._schema.arguments}  # type: ignore[union-attr]
    if "A" in names and tensor_of(node, "A").dtype not in INEXACT_DTYPES:
        return "a matrix of integers"
    if "check_errors" in names and argument(node, "check_errors"):
        return "check_errors=True raises from the values"
    if "pivot" in names and not argument(node, "pivot"):
        return "pivot=False: torch has it on CUDA alone"
    return None


def check_factors(node: torch.fx.Node) -> str | None:
    """Refuse factors that are integers."""
    return None if tensor_of(node, "LU_data").dtype in INEXACT_DTYPES else "factors of integers"


def check_layout(node: torch.fx.Node) -> str | None:
    """Refuse a real matrix that is not contiguous: torch then factors it and not its transpose."""
    a = tensor_of(node, "A")
    if not a.is_complex() and not a.is_contiguous():
        return "a real matrix that is not contiguous is factored otherwise than its contiguous copy"
    return None


def _rows(
    *targets: torch._ops.OpOverload,
    limits: str = "",
    check: Check | None = None,
    dtypes: frozenset[torch.dtype] | None = MATRIX_DTYPES,
) -> tuple[OpSpec, ...]:
    return tuple(OpSpec(target, Support.JAX, check=check, dtypes=dtypes, limits=limits) for target in targets)


PIVOTS = "of pivots equal but for rounding either may be taken"
NOT_CONTIGUOUS = "a real matrix must be contiguous; " + PIVOTS
NOT_FINITE = "only the values, not the vectors; for infinities and NaN, where torch raises, they are NaN"

FOURIER = _rows(
    aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default, aten.fft_fftfreq.default,
    aten.fft_rfftfreq.default,
    dtypes=None,
)  # fmt: skip

FACTORIZATIONS = (
    *_rows(
        aten.linalg_lu_factor_ex.default, aten._linalg_solve_ex.default,
        aten.linalg_inv_ex.default,
        check=check_no_errors_asked,
        limits=PIVOTS,
    ),
    *_rows(aten.linalg_lu.default, check=check_no_errors_asked, dtypes=INEXACT_DTYPES, limits=PIVOTS),
    *_rows(aten._linalg_det.default, aten._linalg_slogdet.default, check=check_layout, limits=NOT_CONTIGUOUS),
    *_rows(aten.linalg_lu_solve.default),
    *_rows(aten.lu_unpack.default, check=check_factors),
    *_rows(
        aten.linalg_cholesky_ex.default,
        check=check_no_errors_asked,
        limits="where a matrix is not positive definite, the factor is NaN and torch's is half done; info agrees",
    ),
    *_rows(
        aten.cholesky_inverse.default,
        dtypes=INEXACT_DTYPES,
        limits="a zero on the diagonal, for which torch raises, gives infinities",
    ),
    *_rows(
        aten.linalg_solve_triangular.default, aten.triangular_solve.default, aten.cholesky_solve.default,
        aten.linalg_householder_product.default, aten.ormqr.default,
        dtypes=INEXACT_DTYPES,
    ),
    *_rows(
        aten.linalg_qr.default, aten.geqrf.default,
        limits="a column that depends on those before it gives any column of Q, as in torch",
    ),
    *_rows(
        aten._linalg_svd.default, aten._linalg_eigh.default,
        check=check_values_only,
        dtypes=INEXACT_DTYPES,
        limits=NOT_FINITE,
    ),
    *_rows(aten.linalg_pinv.atol_rtol_tensor, limits="infinities and NaN, for which torch raises, give NaN"),
)  # fmt: skip

DISTANCES = _rows(
    aten._cdist_forward.default, aten._cdist_backward.default, aten._pdist_forward.default,
    aten._pdist_backward.default,
    dtypes=REAL_DTYPES,
)  # fmt: skip

FUNCTIONS = (
    *_rows(aten.linalg_matrix_exp.default, limits="rounding grows with the norm, in torch as here, not alike"),
    *_rows(aten.linalg_cross.default, dtypes=None),
)

ROWS: tuple[OpSpec, ...] = (*FOURIER, *FACTORIZATIONS, *DISTANCES, *FUNCTIONS)
