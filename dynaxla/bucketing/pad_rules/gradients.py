"""Rules of the gradients of softmax, losses, embeddings, and of views that select a part of a tensor."""

from __future__ import annotations

import torch

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, CONSTANT, LAYOUT, TRUE_SIZE, takes
from dynaxla.bucketing.pad_rules.alignment import align_operands, most_factored_dim, move_elements
from dynaxla.bucketing.pad_rules.elementwise import broadcast
from dynaxla.bucketing.pad_rules.reductions import accumulation_dtype, count_real_elements
from dynaxla.bucketing.pad_rules.scattering import write_position, write_slice
from dynaxla.bucketing.padded_value import Dim, PaddedValue, Unpaddable, is_full, padded_size, single_factor
from dynaxla.bucketing.rule_context import RuleContext

aten = torch.ops.aten
_NONE, _MEAN = 0, 1  # torch's numbers of the reductions


@takes(dim=LAYOUT)
def softmax_backward(call: RuleContext) -> PaddedValue:
    """Padding along the dim is set to zero in the terms that are summed."""
    call = align_operands(call)
    grad, output = call["grad_output"], call["output"]
    place = call.dim("dim", grad)
    summed = {"grad_output": call.build.mask(grad, [place], 0)}
    if call.node.target is aten._softmax_backward_data.default:
        summed["output"] = call.build.mask(output, [place], 0)
    return call.result(call.same(**summed), broadcast([grad.dims, output.dims]))


@takes(reduction=LAYOUT, beta=CONSTANT, delta=CONSTANT)
def loss_backward(call: RuleContext) -> PaddedValue:
    """Elementwise: padding stays padding; for a mean, gradients are divided by the true count."""
    call = align_operands(call)
    dims = broadcast([value.dims for value in call.tensors])
    if call["reduction"] != _MEAN or all(map(is_full, dims)):
        return call.result(call.same(), dims)
    build, dtype = call.build, call.node.meta["val"].dtype
    wide = accumulation_dtype(dtype)
    every = range(len(dims))
    operands = {
        name: PaddedValue(build.emit(aten._to_copy.default, value.node, dtype=wide), value.dims)
        for name, value in call.given.items()
        if isinstance(value, PaddedValue)
    }
    count = build.emit(
        aten._to_copy.default, build.scalar(count_real_elements(PaddedValue(call.node, dims), every)), dtype=wide
    )
    grad = operands["grad_output"]
    operands["grad_output"] = PaddedValue(build.emit(aten.div.Tensor, grad.node, count), grad.dims)
    node = call.same(**operands, reduction=2)
    return call.result(build.emit(aten._to_copy.default, node, dtype=dtype), dims)


@takes(reduction=LAYOUT, ignore_index=CONSTANT)
def nll_loss_backward(call: RuleContext) -> PaddedValue:
    """Padded rows get the label `ignore_index`, so that their gradients are zero.

    An unreduced loss has one gradient per row, a reduced loss has a single one.
    """
    scores, labels, grad = call["self"], call["target"], call["grad_output"]
    rank = len(scores.dims)
    classes = min(rank - 1, 1)
    single_factor(scores.dims[classes])
    rows = [d for d in range(rank) if d != classes]
    by_row = call["reduction"] == _NONE
    for i, d in enumerate(rows):
        dim = most_factored_dim([v.dims[k] for v, k in ((scores, d), (labels, i), *([(grad, i)] if by_row else []))])
        scores, labels = move_elements(call, scores, d, dim), move_elements(call, labels, i, dim)
        grad = move_elements(call, grad, i, dim) if by_row else grad
    known = call.build.mask(labels, range(len(labels.dims)), call["ignore_index"])
    node = call.same(self=scores, target=known, grad_output=grad)
    return call.result(node, scores.dims, 0 if is_full(scores.dims[classes]) else None)


@takes(num_weights=BUCKET_SIZE, padding_idx=CONSTANT)
def embedding_backward(call: RuleContext) -> PaddedValue:
    """Padded indices are set to the row after the last one, which is dropped."""
    grad, indices = call["grad_output"], call["indices"]
    rows = call.build.factor(call["num_weights"])
    for i, dim in enumerate(grad.dims[:-1]):
        indices = move_elements(call, indices, i, dim)
    dropped = call.build.mask(indices, range(len(indices.dims)), rows.padded)
    return call.result(call.same(indices=dropped, num_weights=rows.padded), ((rows,), grad.dims[-1]))


@takes(input_sizes=BUCKET_SIZE, dim=LAYOUT, index=TRUE_SIZE)
def select_backward(call: RuleContext) -> PaddedValue:
    """Zeros except at one position; negative positions count from the true end."""
    grad, place = call["grad_output"], int(call["dim"]) % len(call["input_sizes"])
    dims = (*grad.dims[:place], (call.build.factor(call["input_sizes"][place]),), *grad.dims[place:])
    zeros = _zeros(call, dims)
    return call.result(write_position(call, zeros, grad, place, call["index"]), dims)


@takes(input_sizes=BUCKET_SIZE, dim=LAYOUT, start=TRUE_SIZE, end=TRUE_SIZE, step=TRUE_SIZE)
def slice_backward(call: RuleContext) -> PaddedValue:
    """Elements in the slice of the true size get the gradient; all others, padding included, are zero."""
    grad, place = call["grad_output"], int(call["dim"]) % len(call["input_sizes"])
    dims = (*grad.dims[:place], (call.build.factor(call["input_sizes"][place]),), *grad.dims[place + 1 :])
    zeros = _zeros(call, dims)
    return call.result(write_slice(call, zeros, grad, place, call["start"], call["step"]), dims)


@takes(input_sizes=BUCKET_SIZE, dim=LAYOUT, size=CONSTANT, step=CONSTANT)
def unfold_backward(call: RuleContext) -> PaddedValue:
    """Gradients of padded windows are set to zero, as such windows may overlap real elements."""
    grad, sizes = call["grad_in"], call["input_sizes"]
    place = int(call["dim"]) % len(sizes)
    single_factor(grad.dims[place])
    is_made = lambda i: i == place or (grad.meta.shape[i] == 1 and sizes[i] != 1)  # noqa: E731  # or broadcast
    dims = tuple((call.build.factor(size),) if is_made(i) else grad.dims[i] for i, size in enumerate(sizes))
    real = call.build.mask(grad, [place], 0)
    return call.result(call.same(grad_in=real, input_sizes=[padded_size(d) for d in dims]), dims)


@takes(dim=LAYOUT)
def glu_backward(call: RuleContext) -> PaddedValue:
    """The dim that is halved must have no padding."""
    value, grad = call["self"], call["grad_output"]
    place = call.dim("dim", value)
    if not is_full(value.dims[place]):
        raise Unpaddable("the dim that is halved varies")
    for i, dim in enumerate(value.dims):
        grad = grad if i == place else move_elements(call, grad, i, dim)
    return call.result(call.same(grad_output=grad), value.dims)


def _zeros(call: RuleContext, dims: tuple[Dim, ...]) -> PaddedValue:
    dtype, shape = call.node.meta["val"].dtype, [padded_size(d) for d in dims]
    return PaddedValue(call.build.emit(aten.full.default, shape, 0, dtype=dtype, device=call.build.device), dims, 0)
