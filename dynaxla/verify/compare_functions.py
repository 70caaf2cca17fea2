"""`dynaxla.compare`: two functions on the same inputs, beside a run in float64, and the tolerances that it suggests."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynaxla.errors import ComparisonError
from dynaxla.observe.differences import RELATIVE, measure_difference
from dynaxla.torch_api.pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_map
from dynaxla.verify.eager_graph import copy_arguments, repeat_draws
from dynaxla.verify.float64_mode import WIDER, Float64Mode, widen

_MARGIN = 4.0
"""Two results that are each off by as much as f's, to opposite sides, differ by two such errors; twice that is suggested."""

_AS_NEAR = 2.0
"""A result is as near to float64 as another if its error is at most so many times the other's, plus one rounding."""


_HEAD = ("output", "dtype and shape", "f: abs rel ulps", "g: abs rel ulps", "rtol", "atol", "within", "g as near as f")


@dataclass(frozen=True, slots=True)
class ErrorSize:
    """How far a result is from the reference in float64.

    Attributes:
        absolute: the largest difference of two finite elements.
        relative: the same, divided by the largest finite magnitude of the reference.
        ulps: the largest difference of two finite elements in units in the last place: of the result's dtype, at the
            reference's element.
        problem: what else is wrong, such as NaN or infinities in other places; empty if nothing is.
    """

    absolute: float
    relative: float
    ulps: float
    problem: str = ""

    def __str__(self) -> str:
        return self.problem or f"{self.absolute:.1e} {self.relative:.1e} {self.ulps:.3g}"


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """One output of both functions.

    Attributes:
        path: where the output is in the returned value; empty if it is the value.
        what: dtype and shape.
        f, g: how far the outputs of both are from the reference in float64; None: nothing is computed in float64.
        between: how far g's output is from f's, for instance "off by ..."; by the package's table of tolerances.
        is_close: whether g's output is as close to f's as its dtype asks for.
        rtol, atol: suggested for `torch.testing.assert_close(g_output, f_output, rtol=..., atol=...)`. They follow from f's
            error alone, so that a wrong g does not widen them.
        is_within: whether g's output is within these.
        is_as_near: whether g's output is as near to the reference as f's.
    """

    path: str
    what: str
    f: ErrorSize | None
    g: ErrorSize | None
    between: str
    is_close: bool
    rtol: float
    atol: float
    is_within: bool
    is_as_near: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `dynaxla.compare` found; prints as a table.

    Attributes:
        outputs: the outputs, in order.
    """

    outputs: tuple[OutputComparison, ...]

    @property
    def is_close(self) -> bool:
        """Whether all outputs are as close as their dtypes ask for."""
        return all(output.is_close for output in self.outputs)

    @property
    def is_as_near(self) -> bool:
        """Whether all outputs of g are as near to float64 as those of f."""
        return all(output.is_as_near for output in self.outputs)

    def __str__(self) -> str:
        rows = [list(_HEAD), *map(_list_cells, self.outputs)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        apart = [f"{each.path or '(all)'}: {each.between}" for each in self.outputs if not each.is_close]
        return "\n".join([*lines, *(f"not close: {line}" for line in apart)])


def _list_cells(output: OutputComparison) -> list[str]:
    verdicts = ("yes" if verdict else "NO" for verdict in (output.is_within, output.is_as_near))
    errors = (str(error or "exact") for error in (output.f, output.g))
    return [output.path or "(all)", output.what, *errors, f"{output.rtol:.0e}", f"{output.atol:.0e}", *verdicts]


def compare(
    f: Callable[..., Any], g: Callable[..., Any], *args: Any, check_strides: bool = False, **kwargs: Any
) -> Comparison:
    """Runs two functions on the same inputs, and the first one in float64, and compares their outputs.

    Args:
        f: the reference: a function or a module. Where it was made by `torch.compile`, it runs compiled, and in eager
            in float64.
        g: the other, such as `torch.compile(f, backend="dynaxla")`.
        args, kwargs: pytrees of tensors of any shape and dtype, modules, and other values. Each run gets copies of the
            tensors. Modules, also f and g, stay in train or eval mode, and have their parameters and buffers again after
            each run. Random draws begin at the same state of the generators.
        check_strides: whether strides that differ are an error, too.

    Raises:
        ComparisonError: the outputs differ in structure, dtype, shape or, where asked for, strides; or f does not run in
            float64.
    """
    inputs = _Inputs(args, kwargs)
    modules = [x for x in (f, g, *tree_flatten((args, kwargs))[0]) if isinstance(x, nn.Module)]
    with _unchanged(modules):
        mine, spec = _run(f, inputs)
    with _unchanged(modules):
        theirs, other = _run(g, inputs)
    _check_structure(mine, spec, theirs, other, check_strides)
    with _unchanged(modules):
        wide = _run_in_float64(f, inputs)
    if list(map(_read_shape, wide)) != list(map(_read_shape, mine)):
        raise ComparisonError("the first function returns other shapes in float64", "compare functions that do not")
    paths = [keystr(path) for path, _ in tree_flatten_with_path(spec.unflatten(mine))[0]]
    return Comparison(tuple(map(_compare_output, paths, mine, theirs, wide)))


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What both functions are called with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def copy(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_map(change, (self.args, dict(self.kwargs)))  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        found = [x.device for x in tree_flatten((self.args, self.kwargs))[0] if isinstance(x, Tensor)]
        return next((device for device in found if device.type != "cpu"), torch.device("cpu"))


def _run(function: Callable[..., Any], inputs: _Inputs) -> tuple[list[Any], TreeSpec]:
    """The outputs of a function on copies of the inputs, and their structure."""
    args, kwargs = inputs.copy(_copy)
    with repeat_draws(inputs.device):
        outputs, spec = tree_flatten(function(*args, **kwargs))
    return [x.detach() if isinstance(x, Tensor) else x for x in outputs], spec


def _run_in_float64(function: Callable[..., Any], inputs: _Inputs) -> list[Any]:
    """The outputs of a function in eager PyTorch in float64.

    Raises:
        ComparisonError: an op has no kernel in float64, or the function refuses it.
    """
    wide = copy.deepcopy(function).double() if isinstance(function, nn.Module) else function
    args, kwargs = inputs.copy(lambda x: _copy(x, widen))
    try:
        with repeat_draws(inputs.device), torch.compiler.set_stance("force_eager"), Float64Mode():
            outputs = tree_flatten(wide(*args, **kwargs))[0]
    except Exception as error:  # of the user's function, which may refuse float64 in any way
        raise ComparisonError(
            f"the first function does not run in float64: {type(error).__name__}: {error}",
            "compare with a function that does, or use torch.testing.assert_close",
        ) from error
    return [widen(x.detach()) if isinstance(x, Tensor) else x for x in outputs]


def _read_shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _copy(value: Any, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value).double() if isinstance(value, nn.Module) and change is widen else value
    (made,) = copy_arguments([value])
    return change(made).requires_grad_(value.requires_grad)


@contextmanager
def _unchanged(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Gives modules the values of their parameters and buffers back that they had before the block."""
    held = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    before = copy_arguments(held)
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(held, before, strict=True):
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


def _check_structure(mine: list[Any], spec: TreeSpec, theirs: list[Any], other: TreeSpec, check_strides: bool) -> None:
    """Raises ComparisonError if outputs have no common structure."""
    if spec != other:
        raise ComparisonError(f"the functions return other structures: {spec}, and {other}", "return the same ones")
    for place, (x, y) in enumerate(zip(mine, theirs, strict=True)):
        for name, read in _TRAITS.items():
            differs = isinstance(x, Tensor) != isinstance(y, Tensor) or (isinstance(x, Tensor) and read(x) != read(y))
            if differs and (check_strides or name != "strides"):
                told = f"{_describe(x)} and {_describe(y)}" if name != "strides" else f"{read(x)} and {read(y)}"
                raise ComparisonError(f"output {place} has other {name}: {told}", "compare outputs of the same kind")


_TRAITS: dict[str, Callable[[Tensor], Any]] = {
    "shapes": lambda x: tuple(x.shape),
    "dtypes": lambda x: x.dtype,
    "strides": lambda x: tuple(s for size, s in zip(x.shape, x.stride(), strict=True) if size > 1),
}


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def _compare_output(path: str, mine: Any, theirs: Any, wide: Any) -> OutputComparison:
    between = measure_difference(theirs, mine)
    close = between.is_close
    if not isinstance(mine, Tensor) or not (mine.dtype.is_floating_point or mine.is_complex()):
        return OutputComparison(path, _describe(mine), None, None, str(between), close, 0.0, 0.0, close, close)
    f, g = _measure_error(mine, wide), _measure_error(theirs, wide)
    rtol, atol = suggest_tolerances(mine, wide)
    within = torch.isclose(theirs.cpu(), mine.cpu(), rtol=rtol, atol=atol, equal_nan=True).all().item()
    floor = torch.finfo(mine.dtype).eps
    is_judged = mine.dtype in WIDER and not (f.problem or g.problem)
    near = g.relative <= _AS_NEAR * f.relative + floor if is_judged else close
    return OutputComparison(path, _describe(mine), f, g, str(between), close, rtol, atol, bool(within), near)


def suggest_tolerances(result: Tensor, wide: Tensor) -> tuple[float, float]:
    """Suggests `rtol` and `atol` for comparing another computation of the same with this one, from its own error.

    Args:
        result: of any floating dtype and shape.
        wide: the same, in float64 or complex128.

    Returns:
        Four times the largest relative error of elements of at least a tenth of the largest magnitude, and four times the
        error that this leaves to the smaller ones, each rounded up to one digit, and at least what one rounding makes. In
        float64, for which there is no wider reference, the package's table of tolerances.
    """
    difference, magnitude = _errors(result, wide)
    if result.dtype not in WIDER:
        return RELATIVE[result.dtype], RELATIVE[result.dtype] * (magnitude.max().item() if magnitude.numel() else 0.0)
    if not difference.numel():
        return torch.finfo(result.dtype).eps, 0.0
    large = magnitude >= 0.1 * magnitude.max()
    relative = (difference / magnitude.clamp(min=torch.finfo(torch.float64).tiny))[large].max().item()
    rtol = _round_up(max(_MARGIN * relative, torch.finfo(result.dtype).eps))
    left = (_MARGIN * difference - rtol * magnitude).clamp(min=0).max().item()
    least = torch.finfo(result.dtype).eps * magnitude.max().item()
    return rtol, _round_up(max(left, least))


def _measure_error(result: Tensor, wide: Tensor) -> ErrorSize:
    measured = measure_difference(result.to(wide.dtype), wide)
    if measured.problem:
        return ErrorSize(math.nan, math.nan, math.nan, measured.problem)
    difference, magnitude = _errors(result, wide)
    info = torch.finfo(result.dtype)
    unit = info.eps * torch.exp2(torch.floor(torch.log2(magnitude.clamp(min=info.tiny))))
    ulps = (difference / unit).max().item() if difference.numel() else 0.0
    return ErrorSize(measured.absolute, measured.relative, ulps)


def _errors(result: Tensor, wide: Tensor) -> tuple[Tensor, Tensor]:
    """The absolute errors of the elements that are finite in both, and the magnitudes of the reference, in float64 [n]."""
    result, wide = result.detach().cpu().to(wide.dtype), wide.detach().cpu()
    finite = torch.isfinite(result) & torch.isfinite(wide)
    return (result - wide)[finite].abs(), wide[finite].abs()


def _round_up(value: float) -> float:
    if not value:
        return 0.0
    digit = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.ceil(value / digit) * digit:.0e}")
