"""Rows of the elementwise ops and of the matrix products.

A dtype that eager PyTorch's own kernel refuses is not in a row, so that the user gets eager's own error.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload

from dynaxla.ops.spec import OpSpec, Support

aten = torch.ops.aten
prims = torch.ops.prims

_WHOLE_NUMBERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_INTEGERS = _WHOLE_NUMBERS | {torch.bool}
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_INEXACT = _FLOATS | _COMPLEX
_REAL_NUMBERS = _WHOLE_NUMBERS | _FLOATS
_REAL = _INTEGERS | _FLOATS
_NUMBERS = _WHOLE_NUMBERS | _INEXACT
_WIDE_FLOATS = frozenset({torch.float32, torch.float64})
_WIDE_REAL = _INTEGERS | _WIDE_FLOATS
_WIDE = _WHOLE_NUMBERS | _WIDE_FLOATS | _COMPLEX
_PARTS = _WIDE_FLOATS | _COMPLEX  # real numbers in, complex numbers out


def _ruled(*targets: OpOverload, dtypes: frozenset[torch.dtype] | None = None) -> tuple[OpSpec, ...]:
    return tuple(OpSpec(target, Support.JAX, dtypes=dtypes) for target in targets)


_ARITHMETIC = (
    *_ruled(
        aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.rsub.Tensor, aten.mul.Tensor, aten.mul.Scalar,
        aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode, aten.floor_divide.default,
        aten.floor_divide.Scalar, aten.pow.Scalar, aten.pow.Tensor_Scalar, aten.neg.default, aten.sgn.default,
        aten.reciprocal.default, aten.ldexp.Tensor, aten.clamp.default, aten.clamp.Tensor,
        aten.nan_to_num.default, aten.round.decimals, aten.deg2rad.default, aten.rad2deg.default,
        aten._conj_physical.default, aten.angle.default,
    ),
    *_ruled(
        aten.sub.Scalar, aten.rsub.Scalar, aten.pow.Tensor_Tensor, aten.abs.default, aten.addcmul.default,
        aten.addcdiv.default,
        dtypes=_NUMBERS,
    ),
    *_ruled(
        aten.remainder.Tensor, aten.fmod.Tensor, aten.trunc.default, aten.floor.default, aten.ceil.default,
        aten.round.default,
        dtypes=_REAL_NUMBERS,
    ),
    *_ruled(
        aten.remainder.Scalar, aten.remainder.Scalar_Tensor, aten.fmod.Scalar, aten.sign.default,
        aten.maximum.default, aten.minimum.default, aten.fmax.default, aten.fmin.default, aten.atan2.default,
        aten.copysign.Tensor, aten.copysign.Scalar, aten.heaviside.default, aten.clamp_min.default,
        aten.clamp_min.Tensor, aten.clamp_max.default, aten.clamp_max.Tensor,
        dtypes=_REAL,
    ),
    *_ruled(
        aten.lerp.Scalar, aten.lerp.Tensor,
        dtypes=_INEXACT,
    ),
    *_ruled(
        aten.hypot.default, aten.nextafter.default, aten.frac.default, aten.logaddexp.default,
        aten.logaddexp2.default,
        dtypes=_FLOATS,
    ),
    *_ruled(
        aten.frexp.Tensor,
        dtypes=_FLOATS | {torch.int32},  # the exponents
    ),
    *_ruled(
        aten.gcd.default,
        dtypes=_WHOLE_NUMBERS,
    ),
    *_ruled(
        aten.lcm.default,
        dtypes=_INTEGERS,
    ),
    *_ruled(
        aten.complex.default, aten.polar.default,
        dtypes=_PARTS,
    ),
)  # fmt: skip

_LOGIC = (
    *_ruled(
        aten.eq.Tensor, aten.eq.Scalar, aten.ne.Tensor, aten.ne.Scalar, aten.logical_and.default,
        aten.logical_or.default, aten.logical_xor.default, aten.logical_not.default, aten.__lshift__.Tensor,
        aten.__lshift__.Scalar, aten.__rshift__.Tensor, aten.__rshift__.Scalar, aten.where.self,
        aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar, aten.isnan.default,
        aten.isinf.default, aten.isposinf.default, aten.isneginf.default,
    ),
    *_ruled(
        aten.lt.Tensor, aten.lt.Scalar, aten.le.Tensor, aten.le.Scalar, aten.gt.Tensor, aten.gt.Scalar,
        aten.ge.Tensor, aten.ge.Scalar, aten.signbit.default,
        dtypes=_REAL,
    ),
    *_ruled(
        aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.bitwise_and.Scalar_Tensor,
        aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.bitwise_or.Scalar_Tensor, aten.bitwise_xor.Tensor,
        aten.bitwise_xor.Scalar, aten.bitwise_xor.Scalar_Tensor, aten.bitwise_not.default,
        aten.bitwise_left_shift.Tensor_Scalar, aten.bitwise_left_shift.Scalar_Tensor,
        aten.bitwise_right_shift.Tensor_Scalar, aten.bitwise_right_shift.Scalar_Tensor,
        dtypes=_INTEGERS,
    ),
    *_ruled(
        aten.bitwise_left_shift.Tensor, aten.bitwise_right_shift.Tensor,
        dtypes=_WHOLE_NUMBERS,
    ),
)  # fmt: skip

_CASTING = (
    *_ruled(
        aten.clone.default, aten.copy.default, aten.fill.Scalar, aten.fill.Tensor,
        prims.convert_element_type.default, aten._to_copy.default,
    ),
)  # fmt: skip

_TRANSCENDENTAL = (
    *_ruled(
        aten.exp.default, aten.exp2.default, aten.expm1.default, aten.log.default, aten.log2.default,
        aten.log10.default, aten.log1p.default, aten.sqrt.default, aten.rsqrt.default, aten.sin.default,
        aten.cos.default, aten.tan.default, aten.asin.default, aten.acos.default, aten.atan.default,
        aten.sinh.default, aten.cosh.default, aten.tanh.default, aten.asinh.default, aten.acosh.default,
        aten.atanh.default, aten.sinc.default, aten.polygamma.default,
    ),
    *_ruled(
        aten.erf.default, aten.erfc.default, aten.erfinv.default, aten.lgamma.default,
        aten.special_entr.default, aten.i0.default, aten.special_i0e.default, aten.special_i1.default,
        aten.special_i1e.default, aten.digamma.default, aten.xlogy.Tensor, aten.xlogy.Scalar_Self,
        aten.xlogy.Scalar_Other, aten.special_xlog1py.default, aten.special_xlog1py.self_scalar,
        aten.special_xlog1py.other_scalar, aten.logit.default,
        dtypes=_REAL,
    ),
    *_ruled(
        aten.special_erfcx.default, aten.special_ndtri.default, aten.special_log_ndtr.default,
        aten.special_modified_bessel_i0.default, aten.special_modified_bessel_i1.default,
        aten.special_zeta.default, aten.special_zeta.other_scalar, aten.special_zeta.self_scalar,
        aten.special_bessel_j0.default, aten.special_bessel_j1.default, aten.special_bessel_y0.default,
        aten.special_bessel_y1.default, aten.special_modified_bessel_k0.default,
        aten.special_modified_bessel_k1.default, aten.special_scaled_modified_bessel_k0.default,
        aten.special_scaled_modified_bessel_k1.default, aten.special_spherical_bessel_j0.default,
        aten.special_airy_ai.default,
        dtypes=_WIDE_REAL,
    ),
    *_ruled(
        aten.igamma.default, aten.igammac.default, aten.logit_backward.default,
        dtypes=_FLOATS,
    ),
)  # fmt: skip

_POLYNOMIALS = _ruled(
    *(
        overload
        for packet in (
            aten.special_chebyshev_polynomial_t, aten.special_chebyshev_polynomial_u,
            aten.special_chebyshev_polynomial_v, aten.special_chebyshev_polynomial_w,
            aten.special_shifted_chebyshev_polynomial_t, aten.special_shifted_chebyshev_polynomial_u,
            aten.special_shifted_chebyshev_polynomial_v, aten.special_shifted_chebyshev_polynomial_w,
            aten.special_hermite_polynomial_h, aten.special_hermite_polynomial_he,
            aten.special_laguerre_polynomial_l, aten.special_legendre_polynomial_p,
        )
        for overload in (packet.default, packet.x_scalar, packet.n_scalar)
    ),
    dtypes=_WIDE_REAL,
)  # fmt: skip

_ACTIVATIONS = (
    *_ruled(
        aten.sigmoid.default,
    ),
    *_ruled(
        aten.relu.default, aten.threshold.default, aten.threshold_backward.default,
        dtypes=_REAL_NUMBERS,
    ),
    *_ruled(
        aten.gelu.default, aten.gelu_backward.default, aten.hardtanh_backward.default, aten.hardswish.default,
        aten.hardswish_backward.default, aten.hardsigmoid.default, aten.hardsigmoid_backward.default,
        aten.leaky_relu_backward.default, aten.elu_backward.default, aten.celu.default, aten.softplus.default,
        aten.softplus_backward.default, aten.hardshrink.default, aten.hardshrink_backward.default,
        aten.softshrink_backward.default, aten.mish.default, aten.mish_backward.default,
        aten.log_sigmoid_forward.default, aten.log_sigmoid_backward.default, aten._prelu_kernel.default,
        aten._prelu_kernel_backward.default, aten.glu.default, aten.glu_backward.default,
        aten.rrelu_with_noise_backward.default,
        dtypes=_FLOATS,
    ),
    *_ruled(
        aten.silu.default, aten.silu_backward.default, aten.sigmoid_backward.default,
        aten.tanh_backward.default,
        dtypes=_INEXACT,
    ),
    *_ruled(
        aten.hardtanh.default, aten.leaky_relu.default, aten.elu.default, aten.softshrink.default,
        dtypes=_REAL,
    ),
)  # fmt: skip

_MATRIX = (
    *_ruled(
        aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.vdot.default,
        aten.addmm.default, aten.baddbmm.default, aten.addmv.default,
        dtypes=_NUMBERS,
    ),
    *_ruled(
        aten._int_mm.default, aten.addr.default,
    ),
    *_ruled(
        aten._addmm_activation.default, aten._trilinear.default,
        dtypes=_REAL_NUMBERS,
    ),
    OpSpec(
        aten.addbmm.default,
        Support.JAX,
        dtypes=_WIDE,
        limits="16-bit floats: torch rounds after every batch, which one contraction does not",
    ),
)  # fmt: skip

ROWS: tuple[OpSpec, ...] = (*_ARITHMETIC, *_LOGIC, *_CASTING, *_TRANSCENDENTAL, *_POLYNOMIALS, *_ACTIVATIONS, *_MATRIX)
