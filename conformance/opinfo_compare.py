"""Decides whether a compiled op's results agree with eager's, by the table of tolerances and by further rules."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from conformance.opinfo_samples import EAGER_ERRORS, WIDE, Sample, flat_results, inputs_of, run_wide, seed
from tests.ops.rule_check import PLACES, assert_same_elements
from tests.tolerances import assert_close

# The memory behind these is not initialized: only shape and dtype are specified.
UNINITIALIZED = frozenset("empty empty_like empty_permuted empty_strided new_empty new_empty_strided".split())
AS_EXACT = (
    4  # so many times eager's own distance from float64: two roundings of what cancels are no nearer to each other
)
ROUNDINGS = 4  # of what cancels, in the dtype that is computed in
EAGER_IS_OFF: Mapping[tuple[str, torch.dtype], float] = MappingProxyType(
    {
        ("nn.functional.hardsigmoid", torch.float64): 3e-8,  # its gradient's kernel has 1 / 6 in float32
    }
)
"""By op and dtype the relative error of eager's own gradients, where a test shows it; no wider dtype can."""


def difference(info: Any, sample: Sample, leaves: list[Any], same_numbers: bool = False) -> str | None:
    """What differs from eager's, in a line; None if nothing does.

    Args:
        info: the OpInfo.
        sample: a call, with what eager made of it.
        leaves: what the compiled op made of it.
        same_numbers: whether what is random was drawn as in eager; else only its shape, dtype and finiteness are compared.
    """
    if len(leaves) != len(sample.leaves):
        return f"{len(leaves)} results, eager gives {len(sample.leaves)}"
    for place, (actual, expected) in enumerate(zip(leaves, sample.leaves, strict=True)):
        if expected is None and isinstance(actual, torch.Tensor):  # an input without influence: autograd's zeros
            expected = torch.zeros_like(actual)
        if info.name in UNINITIALIZED or (sample.is_random and not same_numbers):
            told = _kind_difference(actual, expected, info.name not in UNINITIALIZED)
        else:
            told = _value_difference(actual, expected)
            told = None if told is None or _is_as_good(info, sample, place, actual) else told
        if told is not None:
            return told
    return None


def tensor_difference(actual: Any, expected: Any, wide: torch.Tensor | None, is_random: bool) -> str | None:
    """What differs of two tensors, in a line; None if nothing does, or if the first is as exact as the other.

    Args:
        wide: the value in a wider dtype, where there is one.
        is_random: whether only kind and finiteness are compared.
    """
    if is_random:
        return _kind_difference(actual, expected, True)
    told = _value_difference(actual, expected)
    if told is None or wide is None or not isinstance(actual, torch.Tensor) or actual.dtype not in WIDE:
        return told
    return None if _is_nearer(_plain(actual), _plain(expected), _plain(wide)) else told


def first_line(error: BaseException) -> str:
    """What the error says first, without Dynamo's own line about the backend."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:200]


def _value_difference(actual: Any, expected: Any) -> str | None:
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return None if actual == expected else f"{actual!r}, eager gives {expected!r}"
    if actual.dtype != expected.dtype:
        return f"dtype {actual.dtype}, eager gives {expected.dtype}"
    try:
        assert_close(_plain(actual), _plain(expected))
    except AssertionError as error:
        return first_line(error)
    return None


def _kind_difference(actual: Any, expected: Any, finite: bool) -> str | None:
    """What differs in type, shape and dtype, and where eager's numbers are finite, in that."""
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return None if type(actual) is type(expected) else f"{actual!r}, eager gives {expected!r}"
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return "another shape or dtype"
    if finite and torch.isfinite(_plain(expected)).all() and not torch.isfinite(_plain(actual)).all():
        return "not finite, eager's is"
    return None


def _is_as_good(info: Any, sample: Sample, place: int, actual: Any) -> bool:
    """Whether a result that is not eager's is nevertheless as good as that."""
    expected = sample.leaves[place]
    if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return False
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return False
    gradients = (_is_as_exact, _is_what_cancels, _is_nearer_to_zero, _moves_among_equals, _is_off_as_eager_is)
    ways = gradients if sample.cotangents else (_is_as_exact, _is_same_place)
    return any(way(info, sample, place, actual) for way in ways)


def _is_as_exact(info: Any, sample: Sample, place: int, actual: torch.Tensor) -> bool:
    """Whether it is as near to what a wider dtype gives as eager's own is."""
    if actual.dtype not in WIDE or sample.is_random:  # a wider dtype draws other numbers
        return False
    try:
        reference = run_wide(info, sample)[place]
        return _is_nearer(_plain(actual), _plain(sample.leaves[place]), _plain(reference))
    except EAGER_ERRORS:
        return False


def _is_nearer(actual: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor) -> bool:
    try:
        assert_close(actual, reference.to(actual.dtype))
    except AssertionError:
        finite = torch.isfinite(reference)
        if not (torch.equal(torch.isfinite(actual), finite) and torch.equal(torch.isfinite(eager), finite)):
            return False
        ours, own = ((x.to(reference.dtype) - reference)[finite].abs().max() for x in (actual, eager))
        return bool(ours <= AS_EXACT * own)
    return True


def _is_what_cancels(info: Any, sample: Sample, place: int, actual: torch.Tensor) -> bool:
    """Whether a gradient is off by no more than roundings of terms that cancel in it.

    The gradient of a norm of one element, for one, is a difference of equal terms, each of them of the size of
    cotangent * result / input. What is left of them in one order of operations may be zero and in another is not.
    """
    pairs = zip(sample.cotangents, _differentiable(info, sample), strict=True)
    sizes = [float(c.abs().max() * r.abs().max()) for c, r in pairs if r.numel()]
    term = sum(sizes) / float(inputs_of(sample.call)[place].detach().abs().max() or torch.inf)
    wide = torch.float64 if actual.dtype in (torch.float64, torch.complex128) else torch.float32
    off = (_plain(actual) - _plain(sample.leaves[place])).abs().max()
    return bool(off <= ROUNDINGS * torch.finfo(wide).eps * term)


def _is_nearer_to_zero(info: Any, sample: Sample, place: int, actual: torch.Tensor) -> bool:
    """Whether the results do not depend on the input at all, so that of two gradients the smaller is the better."""
    if actual.abs().max() > sample.leaves[place].abs().max():
        return False
    moved = inputs_of(sample.call)[place]
    kept, before = moved.detach().clone(), _differentiable(info, sample)
    with torch.no_grad():
        moved *= 1.5
    after = _differentiable(info, sample)
    with torch.no_grad():
        moved.copy_(kept)
    return all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def _differentiable(info: Any, sample: Sample) -> list[torch.Tensor]:
    """The results that have gradients."""
    seed()
    results = flat_results(sample.call, info.op)
    return [x.detach().clone() for x in results if isinstance(x, torch.Tensor) and x.requires_grad]


def _moves_among_equals(info: Any, sample: Sample, place: int, actual: torch.Tensor) -> bool:
    """Whether equal elements of the input got eager's gradients, each of them another's.

    Torch leaves open which of equal elements an index names, and that one gets the gradient.
    """
    call = sample.call
    if place != 0 or call.kwargs.get("stable") or not (info.name == "msort" or info.name in PLACES):
        return False
    x, dim = call.input.detach(), 0 if info.name == "msort" else _dim(info.name, call)
    return torch.equal(*(_ordered(x, gradient, dim) for gradient in (actual, sample.leaves[0])))


def _is_off_as_eager_is(info: Any, sample: Sample, place: int, actual: torch.Tensor) -> bool:
    expected = sample.leaves[place]
    error = EAGER_IS_OFF.get((info.name, actual.dtype), 0.0)
    return bool(((actual - expected).abs() <= error * expected.abs()).all())


def _ordered(x: torch.Tensor, gradient: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient in the order of x, and in its own order where elements of x are equal."""
    order = gradient.argsort(dim=dim, stable=True)
    by_x = x.gather(dim, order).argsort(dim=dim, stable=True)
    return gradient.gather(dim, order).gather(dim, by_x)


def _dim(name: str, call: Any) -> int:
    position = PLACES[name] - 1  # among the arguments behind the input
    dim: int = call.kwargs.get("dim", call.args[position] if len(call.args) > position else -1)
    return dim


def _is_same_place(info: Any, sample: Sample, place: int, actual: torch.Tensor) -> bool:
    """Whether other positions than eager's hold the same elements, where torch leaves open which of equal ones it names."""
    call = sample.call
    name, position = ("sort", 0) if info.name == "argsort" else (info.name, 1)
    if place != position or name not in PLACES or call.kwargs.get("stable"):
        return False
    try:
        assert_same_elements(name, (call.input, *call.args), call.kwargs, actual, sample.leaves[place])
    except (AssertionError, RuntimeError):
        return False
    return True


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.to_dense() if tensor.layout != torch.strided else tensor
    resolved = dense.detach().resolve_conj().resolve_neg()
    # Nothing can be compared in the smallest complex dtype.
    return resolved.to(torch.complex64) if resolved.dtype == torch.complex32 else resolved
