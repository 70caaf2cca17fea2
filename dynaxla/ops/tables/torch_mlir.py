"""Which overloads torch-mlir itself lowers right, and in which dtypes.

Written by benchmarks/write_lowered_table.py from the record of benchmarks/mlir_sweep.py (torch-mlir 20261001), which
lowers, runs and compares calls collected from PyTorch's own samples. A dtype is listed when every call with it was right.
Do not edit; write it again:

    python benchmarks/mlir_sweep.py && python benchmarks/write_lowered_table.py
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch._ops import OpOverload

aten = torch.ops.aten

_FLOATS = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.int32, torch.int64, torch.uint8})
_SIGNED = frozenset({torch.int32, torch.int64})

_GROUPS: tuple[tuple[frozenset[torch.dtype], tuple[OpOverload, ...]], ...] = (
    (_FLOATS | _INTEGERS | {torch.bool}, (
        aten.acos.default, aten.acosh.default, aten.add.Scalar, aten.add.Tensor, aten.asin.default, aten.asinh.default,
        aten.atan.default, aten.atan2.default, aten.atanh.default, aten.cos.default, aten.cosh.default,
        aten.deg2rad.default, aten.div.Scalar, aten.div.Tensor, aten.exp.default, aten.exp2.default,
        aten.floor_divide.Scalar, aten.isnan.default, aten.isneginf.default, aten.isposinf.default, aten.ldexp.Tensor,
        aten.log.default, aten.log1p.default, aten.logit.default, aten.maximum.default, aten.minimum.default,
        aten.mul.Scalar, aten.mul.Tensor, aten.pow.Scalar, aten.rsqrt.default, aten.sigmoid.default, aten.sin.default,
        aten.sinh.default, aten.sqrt.default, aten.tan.default, aten.tanh.default,
    )),
    (_FLOATS, (
        aten.addmm.default, aten.celu.default, aten.clamp_max.default, aten.clamp_min.default, aten.elu.default,
        aten.erf.default, aten.frac.default, aten.gelu.default, aten.glu.default, aten.hardshrink.default,
        aten.hardsigmoid.default, aten.hardswish.default, aten.leaky_relu.default, aten.logaddexp.default,
        aten.logaddexp2.default, aten.mish.default, aten.nan_to_num.default, aten.reciprocal.default,
        aten.round.decimals, aten.silu.default, aten.softplus.default,
    )),
    (_FLOATS | _SIGNED, (
        aten.abs.default, aten.copysign.Tensor, aten.eq.Scalar, aten.eq.Tensor, aten.ge.Scalar, aten.ge.Tensor,
        aten.gt.Scalar, aten.gt.Tensor, aten.isinf.default, aten.le.Scalar, aten.le.Tensor, aten.lt.Scalar,
        aten.lt.Tensor, aten.ne.Scalar, aten.ne.Tensor, aten.sgn.default, aten.sign.default, aten.signbit.default,
        aten.threshold.default,
    )),
    (_FLOATS | _INTEGERS, (
        aten.ceil.default, aten.clamp.Tensor, aten.div.Tensor_mode, aten.floor.default, aten.hardtanh.default,
        aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.relu.default, aten.round.default, aten.rsub.Scalar,
        aten.sub.Scalar, aten.sub.Tensor, aten.trunc.default,
    )),
    (_FLOATS | _INTEGERS | {torch.bool, torch.complex64}, (
        aten._to_copy.default, aten.expm1.default, aten.fill.Scalar, aten.log10.default, aten.log2.default,
        aten.logical_and.default, aten.logical_not.default, aten.logical_or.default, aten.logical_xor.default,
    )),
    (_INTEGERS | {torch.bool}, (
        aten.bitwise_and.Scalar, aten.bitwise_and.Tensor, aten.bitwise_not.default, aten.bitwise_or.Tensor,
        aten.bitwise_xor.Tensor,
    )),
    (_FLOATS | _INTEGERS | {torch.complex64}, (
        aten.bmm.default, aten.mm.default, aten.neg.default,
    )),
    (_INTEGERS | {torch.float16, torch.float32, torch.float64}, (
        aten.floor_divide.default, aten.fmod.Tensor,
    )),
    (_FLOATS | _INTEGERS | {torch.bool, torch.complex128, torch.complex64}, (
        aten.clone.default,
    )),
    (_INTEGERS | {torch.bfloat16, torch.bool, torch.float16, torch.float32}, (
        aten.rad2deg.default,
    )),
    (frozenset({torch.float32}), (
        aten.addbmm.default,
    )),
    (_INTEGERS | {torch.float32, torch.float64}, (
        aten.baddbmm.default,
    )),
)  # fmt: skip

LOWERED: Mapping[OpOverload, frozenset[torch.dtype]] = MappingProxyType(
    {target: dtypes for dtypes, targets in _GROUPS for target in targets}
)
