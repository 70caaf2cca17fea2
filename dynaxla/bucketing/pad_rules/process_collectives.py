"""Rules of collectives: all processes have the same buckets, so padding meets padding."""

from __future__ import annotations

import torch

from dynaxla.bucketing.argument_roles import LAYOUT, takes
from dynaxla.bucketing.pad_rules.views import gather_to, merge_full_factors, regroup
from dynaxla.bucketing.padded_value import Dim, Factor, PaddedValue, Unpaddable, padded_size
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import Size

aten = torch.ops.aten


@takes(root=LAYOUT, targets=LAYOUT, groups=LAYOUT, size=LAYOUT, ranks=LAYOUT)
def collective(call: RuleContext) -> PaddedValue:
    """Padding of one process meets that of the others, and stays padding."""
    value: PaddedValue = call.tensors[0]
    return call.result(call.same(), value.dims)


@takes(groups=LAYOUT, size=LAYOUT, ranks=LAYOUT)
def all_gather(call: RuleContext) -> PaddedValue:
    """The processes' pieces follow each other with their padding, as a dim of several runs."""
    value: PaddedValue = call.tensors[0]
    first = merge_full_factors([Factor(call["size"], call["size"]), *(value.dims[0] if value.dims else ())])
    return call.result(call.same(), (first, *value.dims[1:]))


@takes(groups=LAYOUT, size=LAYOUT, ranks=LAYOUT)
def reduce_scatter(call: RuleContext) -> PaddedValue:
    """Each process's piece begins at a place of its own, to which elements move where padding is in between."""
    value, piece = _in_pieces(call, call.true_sizes[0])
    return call.result(call.same(x=value), (piece, *value.dims[1:]))


@takes(groups=LAYOUT, size=LAYOUT, ranks=LAYOUT)
def all_to_all(call: RuleContext) -> PaddedValue:
    """As `reduce_scatter`; the pieces that arrive follow each other with their padding."""
    value, _ = _in_pieces(call, call.true_sizes[0] // call["size"])
    return call.result(call.same(x=value), value.dims)


def _in_pieces(call: RuleContext, rows: Size) -> tuple[PaddedValue, Dim]:
    """The operand, whose dim 0 is one run of rows for each process, and that run."""
    value: PaddedValue = call.tensors[0]
    sizes = (call["size"], rows, *call.true_sizes[1:])
    try:
        dims = regroup(value.dims, sizes)
    except Unpaddable:
        value, dims = gather_to(call, value, sizes)
    merged = (merge_full_factors([*dims[0], *dims[1]]), *dims[2:])
    node = call.build.emit(aten.view.default, value.node, [padded_size(dim) for dim in merged])
    return PaddedValue(node, merged), dims[1]
