"""How a value of a program is to be sharded: an op that gives its operand, which programs on a mesh annotate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynaxla.mesh import Spec, parse_dims
from dynaxla.types import DEVICE_TYPE

IN_REGION = "dynaxla.constrain"
"""The target of StableHLO's custom calls that stand for constraints in the bodies of `cond` and loops."""

_DIM, _AXIS = ";", ","


@torch.library.custom_op("dynaxla::constrain", mutates_args=())
def constrain_op(x: Tensor, spec: str) -> Tensor:
    """Gives x; a program on a mesh shards it as the spec says, which `write_spec` wrote."""
    return x.clone()


@constrain_op.register_fake
def _(x: Tensor, spec: str) -> Tensor:
    return torch.empty_like(x)


def _save_spec(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.spec = inputs[1]


def _constrain_gradient(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return CONSTRAIN(gradient, context.spec), None


constrain_op.register_autograd(_constrain_gradient, setup_context=_save_spec)


@torch.library.custom_op("dynaxla::constrain_like", mutates_args=())
def constrain_like(x: Tensor, reference: Tensor) -> Tensor:
    """Gives x; a program on a mesh shards it as its argument `reference`, which has the same shape."""
    return x.clone()


@constrain_like.register_fake
def _(x: Tensor, reference: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("dynaxla::unshard", mutates_args=())
def unshard(x: Tensor, axis: str) -> Tensor:
    """Gives x; a program on a mesh gathers its argument x along an axis over which it is split."""
    return x.clone()


@unshard.register_fake
def _(x: Tensor, axis: str) -> Tensor:
    return torch.empty_like(x)


CONSTRAIN = torch.ops.dynaxla.constrain.default
CONSTRAIN_LIKE = torch.ops.dynaxla.constrain_like.default
UNSHARD = torch.ops.dynaxla.unshard.default


def constrain(tensor: Tensor, spec: Spec) -> Tensor:
    """Says how a value within a model is sharded; its gradient is sharded alike.

    Args:
        tensor: any tensor. Where no operand of the program is on a mesh, and on the host, nothing happens.
        spec: for each dim the axis or axes of the mesh over which it is split, or None; dims left out are not split.

    Raises:
        ShardingError: it is no spec for such a tensor; in the call that compiles: the mesh lacks an axis.
    """
    dims = parse_dims(spec, tensor.dim())
    if tensor.device.type != DEVICE_TYPE:
        return tensor
    made: Tensor = CONSTRAIN(tensor, write_spec(dims))
    return made


def write_spec(dims: tuple[tuple[str, ...], ...]) -> str:
    """The axes of each dim as a text, which can be an argument of an op."""
    return _DIM.join(_AXIS.join(axes) for axes in dims)


def read_spec(text: str, rank: int) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim of what `write_spec` wrote for a tensor of this rank."""
    return tuple(tuple(filter(None, dim.split(_AXIS))) for dim in text.split(_DIM)) if rank else ()
