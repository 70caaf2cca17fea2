"""Rules of matrix products."""

from __future__ import annotations

import torch

from dynaxla.bucketing.argument_roles import CONSTANT, LAYOUT, takes
from dynaxla.bucketing.pad_rules.alignment import align_to, align_values, most_factored_dim, move_elements
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.padded_value import PaddedValue
from dynaxla.bucketing.rule_context import RuleContext

aten = torch.ops.aten
ROWS_FOR_PRODUCT = 25  # above this, torch computes Euclidean distances by a matrix product
_BY_PRODUCT, _BY_GAPS = 1, 2  # cdist's compute_mode


@takes(beta=CONSTANT, alpha=CONSTANT)
def product(call: RuleContext) -> PaddedValue:
    """mm, bmm, addmm, mv, dot, vdot: padding along the contracted dim is set to zero, as zero times NaN is NaN."""
    names = [name for name, value in call.given.items() if isinstance(value, PaddedValue)]
    left_name, right_name = names[-2:]
    inner, outer = len(call[left_name].dims) - 1, max(len(call[right_name].dims) - 2, 0)
    left, right = align_values(call, [call[left_name], call[right_name]], behind=2)
    left, right = _align_contracted(call, left, inner, right, outer)
    changed = {left_name: call.build.mask(left, [inner], 0), right_name: call.build.mask(right, [outer], 0)}
    dims = (*left.dims[:inner], *right.dims[outer + 1 :])
    if inner >= 2:
        dims = (*broadcast([left.dims[: inner - 1], right.dims[:outer]]), *dims[inner - 1 :])
    if len(names) == 3:
        changed[names[0]] = align_to(call, call[names[0]], dims)
    return call.result(call.same(**changed), dims)


@takes()
def linear(call: RuleContext) -> PaddedValue:
    """Padding along the contracted dim is set to zero in input and weight, as zero times NaN is NaN."""
    names = list(call.given)
    x, weight = _align_contracted(call, call[names[0]], len(call[names[0]].dims) - 1, call[names[1]], 1)
    changed = {names[0]: call.build.mask(x, [len(x.dims) - 1], 0), names[1]: call.build.mask(weight, [1], 0)}
    return call.result(call.same(**changed), (*x.dims[:-1], weight.dims[0]))


@takes()
def contract_rows(call: RuleContext) -> PaddedValue:
    """Padding of the rows is set to zero in both operands, as zero times NaN is NaN."""
    left, right = (call[name] for name in call.given)
    rows = list(range(len(left.dims) - 1))
    for row in rows:
        left, right = _align_contracted(call, left, row, right, row)
    changed = {name: call.build.mask(value, rows, 0) for name, value in zip(call.given, (left, right), strict=True)}
    return call.result(call.same(**changed), (left.dims[-1], right.dims[-1]))


def _align_contracted(
    call: RuleContext, left: PaddedValue, inner: int, right: PaddedValue, outer: int
) -> tuple[PaddedValue, PaddedValue]:
    """Returns two values with their contracted dims aligned."""
    dim = most_factored_dim([left.dims[inner], right.dims[outer]])
    return move_elements(call, left, inner, dim), move_elements(call, right, outer, dim)


@takes(p=CONSTANT, compute_mode=LAYOUT)
def cdist(call: RuleContext) -> PaddedValue:
    """cdist: padding of a point's coordinates is set to zero in both operands, so that it adds nothing to a distance."""
    left, right = align_values(call, [call["x1"], call["x2"]], behind=2)
    left, right = _align_contracted(call, left, len(left.dims) - 1, right, len(right.dims) - 1)
    batch = broadcast([left.dims[:-2], right.dims[:-2]])
    rows = {"x1": call.build.mask(left, [-1], 0), "x2": call.build.mask(right, [-1], 0)}
    sizes = call.true_sizes[-2:]
    if call["p"] != 2 or call["compute_mode"] or max(map(call.build.padded_size_of, sizes)) <= ROWS_FOR_PRODUCT:
        node = call.same(**rows)
    else:  # eager chooses the formula by the true number of rows; results differ by more than rounding
        most = call.build.emit(aten.maximum.default, *map(call.build.scalar, sizes))
        many = call.build.emit(aten.gt.Scalar, most, ROWS_FOR_PRODUCT)
        ways = (call.same(**rows, compute_mode=way) for way in (_BY_PRODUCT, _BY_GAPS))
        node = call.build.emit(aten.where.self, many, *ways)
    return call.result(node, (*batch, left.dims[-2], right.dims[-2]))


@takes(p=CONSTANT)
def cdist_backward(call: RuleContext) -> PaddedValue:
    """Padding of a point's coordinates is set to zero, and so are the padded points that are summed over."""
    left, right = _align_contracted(call, call["x1"], len(call["x1"].dims) - 1, call["x2"], len(call["x2"].dims) - 1)
    values = align_values(call, [left, right, call["grad"], call["cdist"]], behind=2)
    left, right, grad, distance = values
    rows, columns = left.dims[-2], right.dims[-2]
    grad, distance = (
        move_elements(call, move_elements(call, v, len(v.dims) - 2, rows), len(v.dims) - 1, columns)
        for v in (grad, distance)
    )
    mask = call.build.mask
    real = {"x2": mask(right, [-2, -1], 0), "grad": mask(grad, [-1], 0), "cdist": mask(distance, [-1], 0)}
    node = call.same(x1=mask(left, [-1], 0), **real)
    batch = broadcast([value.dims[:-2] for value in values])
    return call.result(node, (*batch, *left.dims[-2:]))
