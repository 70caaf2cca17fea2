"""The steps of optimizers that are one op for all parameters, with the arithmetic of torch's own kernels.

Each takes an op's arguments and gives, as lists, what the op writes, in the order of its parameters. Tensors of 16 bits are
computed in float32, what depends on the count of steps in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dynaxla.torch_api.mutation_schema import find_written_parameters
from dynaxla.torch_api.overloads import OpOverload

aten = torch.ops.aten

_NARROW = (torch.bfloat16, torch.float16)

Lists = tuple[list[Tensor], ...]
Tensors = Sequence[Tensor]


def _adam(
    is_decoupled: bool,
    parameters: Tensors,
    gradients: Tensors,
    averages: Tensors,
    squares: Tensors,
    greatest: Tensors,
    steps: Tensors,
    *,
    lr: Any,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Lists:
    """Adam, and AdamW where weights decay by themselves."""

    def one(step: Tensor, w: Tensor, gradient: Tensor, average: Tensor, square: Tensor, most: Tensor | None) -> Any:
        g = -gradient if maximize else gradient
        if is_decoupled:
            w = w - _as(lr, w) * weight_decay * w
        elif weight_decay:
            g = g + w * weight_decay
        average = average + (1 - beta1) * (g - average)
        square = square * beta2 + (1 - beta2) * g * g
        most = None if most is None else torch.maximum(most, square)
        count = step.to(torch.float64)
        size = _as(lr / (1 - beta1**count), w)
        below = (square if most is None else most).sqrt() / _as((1 - beta2**count).sqrt(), w) + eps
        return w - size * average / below, average, square, most

    unscaled = _unscaled(gradients, grad_scale)
    most = list(greatest) if amsgrad else [None] * len(parameters)
    made = [
        one(step, *_all_wide(each))
        for *each, step in zip(parameters, unscaled, averages, squares, most, steps, strict=True)
    ]
    new = [list(each) for each in zip(*made, strict=True)]
    kept = _kept(found_inf, (parameters, averages, squares), new[:3])
    return kept[0], unscaled, kept[1], kept[2], _kept(found_inf, (greatest,), new[3:])[0] if amsgrad else list(greatest)


def _sgd(
    parameters: Tensors,
    gradients: Tensors,
    buffers: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: Any,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Lists:
    def one(w: Tensor, gradient: Tensor, buffer: Tensor | None) -> Any:
        g = -gradient if maximize else gradient
        g = g + w * weight_decay if weight_decay else g
        if buffer is not None:
            buffer = g if is_first_step else buffer * momentum + g * (1 - dampening)
            g = g + buffer * momentum if nesterov else buffer
        return w - _as(lr, w) * g, buffer

    unscaled = _unscaled(gradients, grad_scale)
    moving = bool(buffers) and momentum != 0
    rest = list(buffers) if moving else [None] * len(parameters)
    made = [one(*_all_wide(each)) for each in zip(parameters, unscaled, rest, strict=True)]
    new = [list(each) for each in zip(*made, strict=True)]
    kept = _kept(found_inf, (parameters,), new[:1])
    return kept[0], unscaled, _kept(found_inf, (buffers,), new[1:])[0] if moving else list(buffers)


def _adagrad(
    parameters: Tensors,
    gradients: Tensors,
    sums: Tensors,
    steps: Tensors,
    *,
    lr: Any,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> Lists:
    def one(step: Tensor, w: Tensor, gradient: Tensor, total: Tensor) -> Any:
        g = -gradient if maximize else gradient
        g = g + w * weight_decay if weight_decay else g
        total = total + g * g
        size = _as(lr / (1 + (step.to(torch.float64) - 1) * lr_decay), w)
        return w - size * g / (total.sqrt() + eps), total

    unscaled = _unscaled(gradients, grad_scale)
    made = [one(step, *_all_wide(each)) for *each, step in zip(parameters, unscaled, sums, steps, strict=True)]
    kept = _kept(found_inf, (parameters, sums), [list(each) for each in zip(*made, strict=True)])
    return kept[0], unscaled, kept[1], list(steps)


def _wide(x: Tensor | None) -> Any:
    return x.to(torch.float32) if x is not None and x.dtype in _NARROW else x


def _all_wide(given: Sequence[Tensor | None]) -> list[Any]:
    return [_wide(x) for x in given]


def _as(number: Any, x: Tensor) -> Any:
    return number.to(x.dtype) if isinstance(number, Tensor) else number


def _unscaled(gradients: Tensors, scale: Tensor | None) -> list[Tensor]:
    return [g if scale is None else (_wide(g) / _as(scale, _wide(g))).to(g.dtype) for g in gradients]


def _kept(found_inf: Tensor | None, old: Sequence[Tensors], new: Sequence[Tensors]) -> list[list[Tensor]]:
    """What a step gives, in the dtypes that were; what was, where a gradient is not finite."""

    def one(before: Tensor, after: Tensor) -> Tensor:
        cast = after.to(before.dtype)
        return cast if found_inf is None else torch.where(found_inf.reshape(()) == 1, before, cast)

    return [[one(*pair) for pair in zip(*lists, strict=True)] for lists in zip(old, new, strict=True)]


_STEPS: Mapping[str, Callable[..., Lists]] = {
    "_fused_adam_": partial(_adam, False),
    "_fused_adamw_": partial(_adam, True),
    "_fused_sgd_": _sgd,
    "_fused_adagrad_": _adagrad,
}


def _that_writes(step: Callable[..., Lists], written: int) -> Callable[..., Lists]:
    """The step without what an op, of all that its kind may write, does not write: torch's schemas differ in that."""
    return lambda *args, **kwargs: step(*args, **kwargs)[:written]


FUSED: Mapping[OpOverload, Callable[..., Lists]] = {
    op: _that_writes(step, len(find_written_parameters(op)))
    for name, step in _STEPS.items()
    for op in (getattr(aten, name).default, getattr(aten, name).tensor_lr)
}
"""By op what computes it; the rate may be a tensor in each."""


def step_at_rate(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A step's call, whose rate may be one of the host's numbers in a tensor of any shape, as on CUDA."""
    rate = kwargs["lr"]
    if isinstance(rate, torch.Tensor) and rate.device.type == "cpu" and rate.numel() == 1:
        kwargs["lr"] = rate.reshape(())
    return call(*args, **kwargs)


def give_nothing(*args: Any, **kwargs: Any) -> None:
    """The results of a step, which only writes."""
