"""Rules of factorizations, solves and functions of matrices, and of products of vectors.

A padded square matrix is [[A, 0], [0, I]]: its factors, inverse and exponential begin with those of A.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import LAYOUT, takes
from dynaxla.bucketing.pad_rules.alignment import align_operands, align_values, move_elements
from dynaxla.bucketing.pad_rules.contiguous import broadcast_along, iota, move_to_front
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.padded_value import Dim, Factor, PaddedValue, Results, Unpaddable, is_full, padded_size
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten
_ONE: Dim = (Factor(1, 1),)

# The arguments that are the square matrix and the right-hand side of the equation.
_SIDES: Mapping[OpOverload, tuple[str, str]] = {
    aten.cholesky_solve.default: ("input2", "self"),
    aten.linalg_solve_triangular.default: ("self", "B"),
    aten.triangular_solve.default: ("A", "self"),
    aten._linalg_solve_ex.default: ("A", "B"),
    aten.linalg_lu_solve.default: ("LU", "B"),
}


@takes()
def pad_square_matrix(call: RuleContext) -> Results:
    """cholesky_ex, inverses, determinants, matrix_exp: the matrix continues with the identity in its padding.

    No pivot of the matrix is a row of its padding, where the matrix's columns have zeros. Factors have the matrix's dims,
    pivots those of its rows, and an `info` or a determinant those of the batch.
    """
    name = next(iter(call.given))
    value = _pad_with_identity(call, call[name])
    if padded_size(value.dims[-1]) != padded_size(value.dims[-2]):
        raise Unpaddable("the matrix is not square")
    node = call.same(**{name: value})
    made = node.meta["val"]
    if isinstance(made, torch.Tensor):
        return call.result(node, value.dims)
    return call.results(node, [value.dims[: each.dim()] for each in made])


@takes()
def factor_with_zeros(call: RuleContext) -> Results:
    """QR, singular values: rows and columns of zeros behind the matrix change no reflection, and are singular values of zero,
    which come last."""
    value = call["A"]
    last = len(value.dims) - 1
    for place in (last - 1, last):
        value = move_to_front(call, value, place)
    value = call.build.mask(value, range(last + 1), 0)
    return _factors(call, call.same(A=value), value.dims[:-2])


@takes()
def eigenvalues(call: RuleContext) -> Results:
    """The diagonal continues with more than the sum of a row, so that the eigenvalues of the padding come last."""
    value: PaddedValue = call["A"]
    value = call.build.mask(value, range(len(value.dims) - 2), 0)  # of junk the library's iterations do not end
    value = _pad_square(call, value, partial(_above_eigenvalues, call))
    return _factors(call, call.same(A=value), value.dims[:-2])


def _above_eigenvalues(call: RuleContext, value: PaddedValue) -> Node:
    """A bound of each matrix's eigenvalues, by the triangle that is read: no row sums to more than all sizes of one times the
    largest."""
    build = call.build
    read = build.emit(aten.tril.default if call["UPLO"].upper() == "L" else aten.triu.default, value.node)
    largest = build.emit(aten.amax.default, build.emit(aten.abs.default, read), [-2, -1], True)
    return build.emit(aten.add.Scalar, build.emit(aten.mul.Scalar, largest, padded_size(value.dims[-1])), 1)


def _factors(call: RuleContext, node: Node, batch: tuple[Dim, ...]) -> Results:
    """The results of the factorization, each with the sizes that it has for the true matrix."""
    fakes = enumerate(call.node.meta["val"])
    return tuple(_factor(call, call.build.emit(operator.getitem, node, i), fake, batch) for i, fake in fakes)


def _factor(call: RuleContext, node: Node, fake: torch.Tensor, batch: tuple[Dim, ...]) -> PaddedValue:
    """A result of the factorization: of each matrix, or the empty one in the place of what was not asked for."""
    sizes = call.build.known_sizes(fake)
    if len(sizes) < len(batch) + 1 or sizes == (0,):
        return call.result(node, call.build.dims(sizes))
    dims = (*batch, *call.build.dims(sizes[len(batch) :]))
    return call.first(node, dims, range(len(batch), len(dims)))


@takes()
def solve(call: RuleContext) -> Results:
    """The matrix continues with the identity in its padding, and the right-hand side with zeros."""
    names = _SIDES[call.op]
    matrix, other = align_values(call, [call[name] for name in names], behind=2)
    matrix = _pad_with_identity(call, matrix)
    side = len(other.dims) - (2 if call.get("left", True) else 1)
    other = call.build.mask(move_elements(call, other, side, matrix.dims[-1]), [side], 0)
    node = call.same(**dict(zip(names, (matrix, other), strict=True)))
    batch = broadcast([matrix.dims[:-2], other.dims[:-2]])
    solution = (*batch, *other.dims[-2:])
    if isinstance(node.meta["val"], torch.Tensor):
        return call.result(node, solution)
    return call.results(node, [solution, (*batch, *matrix.dims[-2:])])


@takes()
def solve_known_size(call: RuleContext) -> Results:
    """solve, lu_solve: batches and columns may vary. Beside a matrix that continues, an infinite element would become NaN."""
    names = _SIDES[call.op]
    matrix, other = call[names[0]], call[names[1]]
    if not all(map(is_full, matrix.dims[-2:])):
        raise Unpaddable("the size of the matrix varies")
    if other.dims == matrix.dims[:-1]:  # vectors, without a dim for columns
        solution = other.dims
    elif len(other.dims) < len(matrix.dims):
        raise Unpaddable("by its sizes the right-hand side may be vectors, or be used for every matrix")
    else:
        matrix, other = align_values(call, [matrix, other], behind=2)
        solution = (*broadcast([matrix.dims[:-2], other.dims[:-2]]), *other.dims[-2:])
    changed = dict(zip(names, (matrix, other), strict=True))
    if "pivots" in call.given:
        changed["pivots"] = _fill_pivots(call, call["pivots"], matrix)
    node = call.same(**changed)
    if isinstance(node.meta["val"], torch.Tensor):
        return call.result(node, solution)
    return call.results(node, [solution, *(matrix.dims[:rank] for rank in map(torch.Tensor.dim, node.meta["val"][1:]))])


def _fill_pivots(call: RuleContext, pivots: PaddedValue, factors: PaddedValue) -> PaddedValue:
    """Pivots whose padding names the first row: eager refuses rows that there are not."""
    if pivots.dims != factors.dims[:-1]:
        raise Unpaddable("factors and pivots have their elements at different places")
    return call.build.mask(pivots, range(len(pivots.dims) - 1), 1)


def _pad_with_identity(call: RuleContext, value: PaddedValue) -> PaddedValue:
    """Returns the square matrices with padding set to ones on the diagonal and zeros elsewhere."""
    one = call.build.emit(aten.full.default, [], 1, dtype=value.meta.dtype, device=call.build.device)
    return _pad_square(call, value, lambda _: one)


def _pad_square(call: RuleContext, value: PaddedValue, fill: Callable[[PaddedValue], Node]) -> PaddedValue:
    """Returns the square matrices with padding set to zeros, but for its diagonal.

    Args:
        fill: gives its elements there, from the matrices whose padding is zero.
    """
    last = len(value.dims) - 1
    for place in (last - 1, last):
        value = move_to_front(call, value, place)
    if all(map(is_full, value.dims[-2:])):
        return value
    build, size = call.build, padded_size(value.dims[last])
    if size != padded_size(value.dims[last - 1]):
        raise Unpaddable("rows and columns of a square matrix have different places")
    zeros = build.mask(value, [last - 1, last], 0)
    columns = iota(call, size)
    diagonal = build.emit(aten.eq.Tensor, broadcast_along(call, columns, 2, 0), columns)
    padding = build.emit(aten.logical_not.default, build.valid(value.dims[last]))
    here = build.emit(aten.logical_and.default, diagonal, padding)
    return PaddedValue(build.emit(aten.where.self, here, fill(zeros), zeros.node), value.dims)


@takes(dim=LAYOUT)
def cross(call: RuleContext) -> PaddedValue:
    """Each vector of three elements is computed alone: padded vectors stay padding."""
    call = align_operands(call)
    dims = broadcast([value.dims for value in call.tensors])
    if not is_full(dims[int(call["dim"]) % len(dims)]):
        raise Unpaddable("the length of the vectors varies")
    return call.result(call.same(), dims)


@takes(expand1=LAYOUT, expand2=LAYOUT, expand3=LAYOUT, sumdim=LAYOUT, unroll_dim=LAYOUT)
def trilinear(call: RuleContext) -> PaddedValue:
    """Padding along the summed dims is set to zero in all operands, as zero times NaN is NaN."""
    names, missing = ("i1", "i2", "i3"), [sorted(call[f"expand{i}"]) for i in (1, 2, 3)]
    spread = align_values(
        call, [_expand_operand(call, call[name], dims) for name, dims in zip(names, missing, strict=True)]
    )
    dims = broadcast([value.dims for value in spread])
    summed = [int(d) % len(dims) for d in call["sumdim"]]
    changed = {}
    for name, value, gone in zip(names, spread, missing, strict=True):
        real = call.build.mask(value, [d for d in summed if d not in gone], 0)
        kept = tuple(dim for d, dim in enumerate(real.dims) if d not in gone)
        changed[name] = PaddedValue(
            call.build.emit(aten.view.default, real.node, [padded_size(dim) for dim in kept]), kept
        )
    return call.result(call.same(**changed), tuple(dim for d, dim in enumerate(dims) if d not in summed))


def _expand_operand(call: RuleContext, value: PaddedValue, missing: list[int]) -> PaddedValue:
    """Returns the value with a dim of size 1 for each of the product's dims that it lacks."""
    rest = iter(value.dims)
    dims = tuple(_ONE if d in missing else next(rest) for d in range(len(value.dims) + len(missing)))
    return PaddedValue(
        call.build.emit(aten.view.default, value.node, [padded_size(dim) for dim in dims]), dims, value.fill
    )
