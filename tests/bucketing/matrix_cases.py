"""Cases of matrices: diagonals, solves, functions of them, distances and products of vectors."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.bucketing.plain_cases import floats, ints, lengths, numbered
from tests.bucketing.poison import Case, case

aten = torch.ops.aten
SQUARES = (5, 7, 9, 12)


def definite(size: int) -> torch.Tensor:
    """A symmetric positive definite matrix of this size."""
    made = torch.randn(size, size)
    return made @ made.mT / size + 3 * torch.eye(size)


def definites(size: int) -> torch.Tensor:
    """So many matrices of three rows."""
    return torch.stack([definite(3) for _ in range(size)])


def _quarters(x: torch.Tensor, dims: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.rot90(x, k, dims) for k in range(4)]


DIAGONALS = [
    case("diagonal", "diagonal_below", lambda x: (torch.diagonal(x, -2) + 1, torch.diagonal(x, 1, 1, 0) * 2),
         lengths("s", "s+3"), sizes=SQUARES),
    case("diagonal_backward", "diagonal_below_backward",
         lambda g, x: aten.diagonal_backward(g[2:], x.shape, -2, 0, 1).sum(0) + x, lengths("s"), lengths("s", "s+3"),
         sizes=SQUARES),
    case("diagonal_scatter", "diagonal_scatter", lambda x, y: torch.diagonal_scatter(x, y).sum(0),
         floats(None, None), floats(None), sizes=SQUARES),
    case("diagonal_scatter", "diagonal_scatter_below", lambda x, y: torch.diagonal_scatter(x, y, -1, 0, 2),
         lengths("s", "3", "s"), lengths("3", "s-1"), sizes=SQUARES),
    case("diagonal_scatter", "diagonal_scatter_whole", lambda x, y: torch.diagonal_scatter(x, y, 2).cumsum(1),
         ints(None, None), lambda s: torch.arange(s - 2), sizes=SQUARES),
    case("diag_embed", "diag_embed", lambda x: (torch.diag_embed(x) + 1, torch.diag_embed(x, -2, 0, 2).sum(0)),
         floats(3, None)),
    case("diag_embed", "diag_embed_beside", lambda x: torch.diag_embed(x, 1, 2, 0).sum(0), floats(None, 3)),
    case("trace", "trace", lambda x: torch.trace(x), floats(None, None), sizes=SQUARES),
    case("trace", "trace_beside", lambda x: torch.trace(x), ints(None, 4)),
    case("triangle", "triangles_by_size",
         lambda x: (torch.tril(x, x.shape[1] - x.shape[0]), torch.triu(x, x.shape[0] // 2).sum(0)),
         lengths("s", "2*s+3"), sizes=SQUARES),
    case("rot90", "turn", lambda x: [part.cumsum(0) for part in _quarters(x, (0, 1))], floats(None, 3)),
    case("rot90", "turn_both", lambda x: _quarters(x, (1, 2)), lengths("2", "s", "s+1"), sizes=SQUARES),
]  # fmt: skip
SOLVES = [
    case("pad_square_matrix", "cholesky", lambda a: torch.linalg.cholesky_ex(a), definite, sizes=SQUARES),
    case("pad_square_matrix", "cholesky_batch", lambda a: torch.linalg.cholesky_ex(a, upper=True), definites),
    case("pad_square_matrix", "cholesky_inverse", lambda a: torch.cholesky_inverse(a.tril()), definite, sizes=SQUARES),
    case("pad_square_matrix", "inverse", lambda a: torch.linalg.inv_ex(a.flip(0)), definite, sizes=SQUARES),
    case("pad_square_matrix", "inverse_batch", lambda a: torch.linalg.inv_ex(a)[0].sum(0), definites),
    case("pad_square_matrix", "determinant", lambda a: torch.linalg.det(a.flip(0) / 9), definite, sizes=SQUARES),
    case("pad_square_matrix", "log_determinant", lambda a: torch.linalg.slogdet(a), definites),
    case("solve_known_size", "solve", lambda a, b: torch.linalg.solve_ex(a, b)[0], definites, floats(None, 3, 2)),
    case("solve_known_size", "solve_vectors", lambda a, b: torch.linalg.solve_ex(a, b)[0], definites, floats(None, 3)),
    case("solve_known_size", "solve_one_matrix", lambda b: torch.linalg.solve_ex(torch.eye(3) * 2, b)[0], floats(None, 3, 2)),
    case("solve_known_size", "solve_from_the_right", lambda a, b: torch.linalg.solve_ex(a, b, left=False)[0], definites,
         floats(None, 2, 3)),
    case("solve_known_size", "solve_columns", lambda b: torch.linalg.solve_ex(torch.eye(3) * 2, b)[0], floats(3, None)),
    case("solve_known_size", "lu_solve", lambda lu, pivots, b: torch.linalg.lu_solve(lu, pivots, b), definites,
         lambda s: torch.tensor([[2, 2, 3]] * s, dtype=torch.int32), floats(None, 3, 2)),
    case("pad_square_matrix", "matrix_exp", lambda x: torch.matrix_exp(x / 3), floats(None, None), sizes=SQUARES),
    case("pad_square_matrix", "matrix_exp_batch", lambda x: torch.matrix_exp(x).sum(0), floats(None, 3, 3)),
    case("solve", "cholesky_solve", lambda b, a: torch.cholesky_solve(b, a.tril()), floats(None, 2), definite,
         sizes=SQUARES),
    case("solve", "cholesky_solve_batch", lambda b, a: torch.cholesky_solve(b, a.tril()), floats(None, 3, 2), definites),
    case("solve", "cholesky_solve_columns", lambda b: torch.cholesky_solve(b, torch.eye(3) * 2), floats(3, None)),
    case("solve", "solve_triangular", lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False),
         definite, floats(None, 2), sizes=SQUARES),
    case("solve", "solve_triangular_right",
         lambda a, b: torch.linalg.solve_triangular(a.triu(), b, upper=True, left=False, unitriangular=True),
         definite, floats(2, None), sizes=SQUARES),
    case("solve", "solve_triangular_batch",
         lambda a, b: torch.linalg.solve_triangular(a.triu(), b, upper=True).sum(0), definites, floats(3, 2)),
    case("solve", "solve_triangular_merged",
         lambda a, b: torch.linalg.solve_triangular(a.tril(), b.reshape(-1, 2), upper=False),
         lambda s: definite(3 * s), floats(3, None, 2), sizes=(7, 8, 11, 12)),
]  # fmt: skip
FACTORS = [
    *[
        case("factor_with_zeros", f"qr_{mode}", lambda x, mode=mode: torch.linalg.qr(x, mode), floats(None, 6), sizes=SQUARES)
        for mode in ("reduced", "complete", "r")
    ],
    case("factor_with_zeros", "qr_wide", lambda x: torch.linalg.qr(x.mT), floats(2, None, 6), sizes=SQUARES),
    case("factor_with_zeros", "qr_square", lambda x: torch.linalg.qr(x), definite, sizes=SQUARES),
    case("factor_with_zeros", "qr_batch", lambda x: torch.linalg.qr(x)[1].sum(0), floats(None, 4, 3)),
    case("factor_with_zeros", "singular_values", lambda x: torch.linalg.svdvals(x), lengths("2", "s", "s+1"), sizes=SQUARES),
    case("factor_with_zeros", "singular_values_few",
         lambda x: (torch.linalg.svdvals(x), torch.linalg.matrix_norm(x, "nuc"), torch.linalg.matrix_norm(x, 2)),
         floats(4, None), sizes=SQUARES),
    case("eigenvalues", "eigenvalues", lambda x: torch.linalg.eigvalsh(x - 4), definite, sizes=SQUARES),
    case("eigenvalues", "eigenvalues_above", lambda x: torch.linalg.eigvalsh(x.triu() + torch.full_like(x, 1e9).tril(-1), "U"),
         definite, sizes=SQUARES),
    case("eigenvalues", "eigenvalues_batch", lambda x: torch.linalg.eigvalsh(x).cumsum(0), definites),
    case("eigenvalues", "eigenvalues_of_zeros", lambda x: torch.linalg.eigvalsh(x * 0), definite, sizes=SQUARES),
]  # fmt: skip
PRODUCTS = [
    case("cdist_backward", "cdist_backward_left",
         lambda g, x, y: aten._cdist_backward(g, x, y, 2.0, torch.cdist(x, y)), floats(None, 4), floats(None, 3),
         floats(4, 3), sizes=(*SQUARES, 17)),
    *[
        case("cdist_backward", f"cdist_backward_{p}",
             lambda g, x, y, p=p: aten._cdist_backward(g, x, y, p, torch.cdist(x, y, p=p)).sum(0),
             lengths("s", "s+1"), floats(None, 3), lengths("s+1", "3"), sizes=SQUARES)
        for p in (0.5, 1.0, 3.0, float("inf"))
    ],
    case("cdist_backward", "cdist_backward_within",
         lambda g, x, y: aten._cdist_backward(g, x, y, 2.0, torch.cdist(x, y)), floats(2, 4, 6), floats(2, 4, None),
         floats(2, 6, None)),
    case("cross", "cross", lambda x, y: torch.linalg.cross(x, y).sum(0), floats(None, 3), floats(None, 3)),
    case("cross", "cross_of_one", lambda x, y: torch.linalg.cross(x, y, dim=0), floats(3, None), floats(3, 1)),
    case("trilinear", "trilinear", lambda x, y, w, b: F.bilinear(x, y, w, b), floats(None, 4), floats(None, 3),
         floats(6, 4, 3), floats(6)),
    case("trilinear", "trilinear_within", lambda x, y, w: F.bilinear(x, y, w).sum(0), floats(6, None), floats(6, 3),
         floats(6, None, 3)),
    *[
        case("reduction", f"norm_{name}", norm, floats(None, 3))
        for name, norm in {
            "all": lambda x: aten.norm.Scalar(x),
            "dim": lambda x: (aten.norm.ScalarOpt_dim(x, 1, [0], True), aten.norm.ScalarOpt_dim(x, None, [0])),
            "least": lambda x: aten.norm.ScalarOpt_dim(x, -float("inf"), [0]),
            "wide": lambda x: aten.norm.ScalarOpt_dim_dtype(x, 3, [0], False, dtype=torch.float64),
            "all_wide": lambda x: aten.norm.ScalarOpt_dtype(x, 2, dtype=torch.float64),
        }.items()
    ],
    case("product", "batches_apart", lambda x: torch.bmm(x.flatten(0, 1), numbered(2 * x.shape[1], 3, 5)),
         floats(2, None, 4, 3)),
    case("product", "sum_and_batches_apart",
         lambda x: torch.baddbmm(numbered(2 * x.shape[1], 4, 4), numbered(2 * x.shape[1], 4, 3), x.flatten(0, 1).mT),
         floats(2, None, 4, 3)),
    case("product", "column_and_batches_apart",
         lambda x: torch.baddbmm(x.sum((2, 3)).view(-1, 1, 1), numbered(2 * x.shape[1], 4, 3), x.flatten(0, 1).mT).cumsum(1),
         floats(2, None, 4, 3)),
    case("cdist", "cdist_of_batches_apart", lambda x: torch.cdist(x.flatten(0, 1), numbered(2 * x.shape[1], 5, 3)),
         floats(2, None, 4, 3)),
]  # fmt: skip
CASES: list[Case] = [*DIAGONALS, *SOLVES, *FACTORS, *PRODUCTS]
