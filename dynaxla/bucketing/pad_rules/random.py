"""The rule of random numbers: real elements equal those of a tensor of the true sizes."""

from __future__ import annotations

import torch

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, takes
from dynaxla.bucketing.padded_value import PaddedValue, padded_size
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import is_fixed

aten = torch.ops.aten


@takes(size=BUCKET_SIZE)
def draw(call: RuleContext) -> PaddedValue:
    """Real elements equal those of a tensor of the true sizes; padding is undefined."""
    sizes, build = call.true_sizes, call.build
    dims = build.dims(sizes)
    if all(map(is_fixed, sizes)):
        return call.result(call.same(), dims)
    true_size = build.emit(aten.stack.default, [build.scalar(size) for size in sizes])
    key: PaddedValue = call["key"]
    shape = [padded_size(dim) for dim in dims]
    node = build.emit(call.op, key.node, shape, call["kind"], call["dtype"], true_size)
    return call.result(node, dims)
