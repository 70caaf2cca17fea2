"""Which overloads torch-mlir itself lowers right, and in which dtypes.

Written by benchmarks/write_lowered_table.py from the record of benchmarks/mlir_sweep.py (torch-mlir 20261001), which
lowers, runs and compares calls collected from PyTorch's own samples. A dtype is listed when every call filed under it
(that of the call's first tensor) was right. No 16-bit floats: XLA may drop the roundings between torch-mlir's steps.
Do not edit; write it again:

    python benchmarks/mlir_sweep.py && python benchmarks/write_lowered_table.py
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

_FLOATS = frozenset({torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int32, torch.int64, torch.uint8})
_SIGNED = frozenset({torch.int32, torch.int64})

_GROUPS: tuple[tuple[frozenset[torch.dtype], tuple[OpOverload, ...]], ...] = (
    (_FLOATS | _INTEGERS | {torch.bool}, (
        aten.acos.default, aten.acosh.default, aten.add.Scalar, aten.add.Tensor, aten.asin.default, aten.asinh.default,
        aten.atan.default, aten.atan2.default, aten.atanh.default, aten.constant_pad_nd.default, aten.cos.default,
        aten.cosh.default, aten.deg2rad.default, aten.div.Scalar, aten.div.Tensor, aten.exp.default, aten.exp2.default,
        aten.expm1.default, aten.isnan.default, aten.isneginf.default, aten.isposinf.default, aten.ldexp.Tensor,
        aten.log.default, aten.log10.default, aten.log1p.default, aten.log2.default, aten.logit.default,
        aten.mul.Tensor, aten.prod.default, aten.rsqrt.default, aten.sigmoid.default, aten.sin.default,
        aten.sinh.default, aten.sqrt.default, aten.sum.default, aten.tan.default, aten.tanh.default, aten.tril.default,
        aten.triu.default,
    )),
    (_FLOATS, (
        aten.addmm.default, aten.celu.default, aten.clamp_max.default, aten.clamp_min.default, aten.elu.default,
        aten.erf.default, aten.frac.default, aten.gelu.default, aten.glu.default, aten.hardsigmoid.default,
        aten.hardswish.default, aten.leaky_relu.default, aten.mean.default, aten.mish.default, aten.nan_to_num.default,
        aten.reciprocal.default, aten.round.decimals, aten.silu.default, aten.softplus.default,
    )),
    (_FLOATS | _INTEGERS | {torch.bool, torch.complex64}, (
        aten._unsafe_view.default, aten.clone.default, aten.expand.default, aten.flip.default,
        aten.lift_fresh_copy.default, aten.logical_and.default, aten.logical_not.default, aten.logical_or.default,
        aten.logical_xor.default, aten.permute.default, aten.repeat.default, aten.select.int, aten.squeeze.default,
        aten.squeeze.dim, aten.stack.default, aten.t.default, aten.unsqueeze.default, aten.view.default,
    )),
    (_FLOATS | _SIGNED, (
        aten.abs.default, aten.copysign.Tensor, aten.eq.Scalar, aten.ge.Scalar, aten.gt.Scalar, aten.isinf.default,
        aten.le.Scalar, aten.lt.Scalar, aten.ne.Scalar, aten.sgn.default, aten.sign.default, aten.signbit.default,
    )),
    (_FLOATS | _INTEGERS, (
        aten.baddbmm.default, aten.ceil.default, aten.clamp.Tensor, aten.floor.default, aten.hardtanh.default,
        aten.relu.default, aten.round.default, aten.rsub.Scalar, aten.sub.Scalar, aten.sub.Tensor, aten.trunc.default,
    )),
    (_INTEGERS | {torch.bool}, (
        aten.bitwise_and.Scalar, aten.bitwise_and.Tensor, aten.bitwise_not.default, aten.bitwise_or.Tensor,
        aten.bitwise_xor.Tensor,
    )),
    (_FLOATS | _INTEGERS | {torch.complex64}, (
        aten.bmm.default, aten.masked_fill.Scalar, aten.mm.default, aten.neg.default,
    )),
    (_FLOATS | _SIGNED | {torch.bool, torch.complex64}, (
        aten.cat.default, aten.where.self,
    )),
    (_FLOATS | _SIGNED | {torch.bool}, (
        aten.all.default, aten.any.default,
    )),
)  # fmt: skip

LOWERED: Mapping[OpOverload, frozenset[torch.dtype]] = MappingProxyType(
    {target: dtypes for dtypes, targets in _GROUPS for target in targets}
)
