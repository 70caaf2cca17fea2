"""Rules of sampling images at a grid's positions, which span the true image from -1 to 1."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from dynaxla.bucketing.argument_roles import LAYOUT, takes
from dynaxla.bucketing.pad_rules.alignment import most_factored_dim, move_elements
from dynaxla.bucketing.pad_rules.contiguous import move_to_front
from dynaxla.bucketing.padded_value import Dim, PaddedValue, Results, is_full, single_factor
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.custom_ops import internal
from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten


@takes(interpolation_mode=LAYOUT, padding_mode=LAYOUT)
def sample(call: RuleContext) -> PaddedValue:
    """Positions from -1 to 1 span the true image, so that padding is outside of it; padded positions give padding."""
    value, grid = _align_operands(call, call["input"], call["grid"])
    return call.result(_emit_sampling(call, internal.SAMPLE_GRID, value, input=value, grid=grid), _dims(value, grid))


@takes(interpolation_mode=LAYOUT, padding_mode=LAYOUT)
def sample_backward(call: RuleContext) -> Results:
    """Gradients at padded positions are set to zero; positions from -1 to 1 span the true image."""
    value, grid, grad = _align_operands(call, call["input"], call["grid"], call["grad_output"])
    for place, dim in enumerate(_dims(value, grid)):
        grad = move_elements(call, grad, place, dim)
    mask, rank = call.build.mask, len(value.dims)
    real = {"grad_output": mask(grad, range(2, rank), 0), "grid": mask(grid, range(1, rank - 1), 0)}
    node = _emit_sampling(call, internal.SAMPLE_GRID_BACKWARD, value, input=value, **real)
    wanted = (bool(call["output_mask"][0]), True)
    return tuple(
        call.result(call.build.emit(operator.getitem, node, i), given.dims) if wanted[i] else None
        for i, given in enumerate((value, grid))
    )


def _dims(value: PaddedValue, grid: PaddedValue) -> tuple[Dim, ...]:
    return (*value.dims[:2], *grid.dims[1:-1])


def _align_operands(call: RuleContext, value: PaddedValue, *others: PaddedValue) -> tuple[PaddedValue, ...]:
    """Returns the operands with their batch dims aligned, and the image with its real elements in front."""
    for place in range(2, len(value.dims)):
        value = move_to_front(call, value, place)
    dim = most_factored_dim([given.dims[0] for given in (value, *others)])
    return tuple(move_elements(call, given, 0, dim) for given in (value, *others))


def _emit_sampling(call: RuleContext, of_front: OpOverload, value: PaddedValue, **changed: PaddedValue) -> Node:
    """Emits the op; for a padded image, its variant that takes the true image sizes as arguments."""
    if all(map(is_full, value.dims[2:])):
        return call.same(**changed)
    build = call.build
    sizes = build.emit(aten.stack.default, [build.scalar(single_factor(dim).size) for dim in value.dims[2:]])
    names = [name for name in ("grad_output", "input", "grid") if name in changed]
    settings = [call[name] for name in ("interpolation_mode", "padding_mode", "align_corners")]
    return build.emit(of_front, *(changed[name].node for name in names), sizes, *settings)
