"""Small random programs of torch calls, built line by line while eager runs them.

A line is kept only if its results are well defined: eager runs the program again with every inexact result moved by a
few units in the last place, and a program whose results then move by more than the tolerance (a comparison of two
values that are nearly equal, a floor of nearly an integer, a cancellation) is not one to compare.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tests.tolerances import RELATIVE

MAX_ELEMENTS = 2000
VALUES = ("normal", "integers", "quarters", "positive", "special")
LAYOUTS = ("plain", "plain", "plain", "transposed", "strided", "offset", "expanded", "channels_last")
NAMESPACE: Mapping[str, Any] = {"torch": torch, "F": torch.nn.functional}

Environment = dict[str, torch.Tensor]


class Rounding(enum.Enum):
    """How far a call's result may differ between two right implementations of it."""

    EXACT = "exact"  # moves, chooses or compares values
    RESULT = "result"  # rounds once; exact on small whole numbers
    SUMS = "sums"  # rounds in an open order; exact on small whole numbers
    SMOOTH = "smooth"  # rounds as the implementation likes
    SPECTRAL = (
        "spectral"  # likewise, at the scale of the largest element: what cancels in one is something in the other
    )


@dataclass(frozen=True)
class InputSpec:
    """One input; `shares` names an earlier input that this one is, or is a view of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    values: str
    seed: int
    shares: int | None = None


@dataclass(frozen=True)
class Line:
    """One statement; `reads` are the tensors it reads, `result` the one it makes or writes."""

    text: str
    result: str
    reads: tuple[str, ...] = ()
    rounding: Rounding = Rounding.EXACT
    in_place: bool = False


@dataclass(frozen=True)
class Program:
    inputs: tuple[InputSpec, ...]
    lines: tuple[Line, ...] = ()
    outputs: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [f"x{i}" for i in range(len(self.inputs))]

    def source(self) -> str:
        head = f"def f({', '.join(self.names)}):"
        body = [f"    {line.text}" for line in self.lines]
        return "\n".join([head, *body, f"    return ({''.join(name + ', ' for name in self.outputs)})"])

    def function(self) -> Callable[..., tuple[torch.Tensor, ...]]:
        scope: dict[str, Any] = dict(NAMESPACE)
        exec(self.source(), scope)
        made: Callable[..., tuple[torch.Tensor, ...]] = scope["f"]
        return made


def make_inputs(specs: Sequence[InputSpec], before: int = 0) -> list[torch.Tensor]:
    """Fresh tensors with the same values, strides and sharing at every call.

    Args:
        before: so many elements lie in front of each in its storage.
    """
    made: list[torch.Tensor] = []
    for spec in specs:
        if spec.shares is None:
            made.append(_move(_make_input(spec), before))
        elif spec.layout == "transposed":
            made.append(made[spec.shares].transpose(0, -1))
        elif spec.layout == "strided":
            made.append(made[spec.shares][..., 1:])
        else:
            made.append(made[spec.shares])
    return made


def _move(x: torch.Tensor, before: int) -> torch.Tensor:
    if not before:
        return x
    elements = x.untyped_storage().nbytes() // x.itemsize
    memory = x.new_zeros(before + elements)
    memory[before:] = x.as_strided((elements,), (1,), 0)
    return memory.as_strided(x.shape, x.stride(), before + x.storage_offset())


def _make_input(spec: InputSpec) -> torch.Tensor:
    shape = spec.shape
    if not shape:
        return _fill(spec, (1,))[0] if spec.layout == "offset" else _fill(spec, ())
    if spec.layout == "transposed":
        return _fill(spec, shape[::-1]).permute(*reversed(range(len(shape))))
    if spec.layout == "strided":
        return _fill(spec, (*shape[:-1], 2 * shape[-1]))[..., ::2]
    if spec.layout == "offset":
        return _fill(spec, (math.prod(shape) + 3,))[3:].view(shape)
    if spec.layout == "expanded":
        return _fill(spec, (1, *shape[1:])).expand(shape)
    if spec.layout == "channels_last" and len(shape) == 4:
        return _fill(spec, shape).to(memory_format=torch.channels_last)
    return _fill(spec, shape)


def _fill(spec: InputSpec, shape: tuple[int, ...]) -> torch.Tensor:
    random = torch.Generator().manual_seed(spec.seed)
    if spec.dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=random, dtype=torch.bool)
    if not spec.dtype.is_floating_point:
        return torch.randint(0 if spec.values == "positive" else -5, 6, shape, generator=random).to(spec.dtype)
    if spec.values == "integers":
        return torch.randint(-4, 5, shape, generator=random).to(spec.dtype)
    if spec.values == "quarters":
        return (torch.randint(-8, 9, shape, generator=random) / 4).to(spec.dtype)
    drawn = torch.randn(shape, generator=random, dtype=torch.float64)
    if spec.values == "positive":
        drawn = drawn.abs() + 0.1
    if spec.values == "special":
        choice = torch.randint(0, 12, shape, generator=random)
        for place, value in enumerate((math.inf, -math.inf, math.nan, 0.0)):
            drawn = torch.where(choice == place, value, drawn)
    return drawn.to(spec.dtype)


def run_lines(program: Program, noise: torch.Generator | None = None) -> Environment:
    """Runs the lines in eager; with `noise`, as another right implementation might."""
    env: Environment = dict(zip(program.names, make_inputs(program.inputs), strict=True))
    for line in program.lines:
        _run_line(line, env, noise)
    return env


def _run_line(line: Line, env: Environment, noise: torch.Generator | None) -> None:
    quiet = noise is None or line.rounding is Rounding.EXACT or _whole(line, env)
    scope: dict[str, Any] = {**NAMESPACE, **env}
    if not quiet and line.rounding is not Rounding.RESULT and not line.in_place:
        scope.update({name: _moved(env[name], noise) for name in line.reads})
    exec(line.text, scope)
    env[line.result] = scope[line.result]
    if not quiet:
        made = env[line.result]
        other = _moved(made, noise)
        if line.rounding is Rounding.SPECTRAL and made.numel():
            other = other + (_moved(torch.ones_like(made), noise) - 1) * made.abs().max().nan_to_num(0, 0)
        env[line.result] = other if torch._debug_has_internal_overlap(made) else made.copy_(other)


def _whole(line: Line, env: Environment) -> bool:
    """Whether a sum or product of these operands is exact in any order: all are small whole numbers."""
    if line.rounding in (Rounding.SMOOTH, Rounding.SPECTRAL):
        return False
    operands = [env[name] for name in (*line.reads, *([line.result] if line.in_place else []))]
    floats = [x.double() for x in operands if x.is_floating_point()]
    return all(bool((x == x.round()).all()) and bool((x.abs() <= 16).all()) for x in floats)


def _moved(x: torch.Tensor, noise: torch.Generator | None) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    units = 4.0 if x.dtype in (torch.float32, torch.float64) else 0.75
    shift = (torch.rand(x.shape, generator=noise, dtype=torch.float64) * 2 - 1) * units * torch.finfo(x.dtype).eps
    return (x.double() * (1 + shift)).to(x.dtype)


def is_defined(program: Program, env: Environment, runs: int = 2) -> bool:
    """Whether every value of the program stays within half the tolerance under noise, and none is subnormal or huge.

    The noisy runs are made without oneDNN: eager uses it or not depending on processor and layout, and the two differ
    (oneDNN's gelu of infinity is NaN).
    """
    if any(_out_of_bounds(x) for x in env.values()):
        return False
    for seed in range(runs):
        with _without_onednn():
            other = run_lines(program, torch.Generator().manual_seed(seed))
        if not all(_near(other[name], x) for name, x in env.items()):
            return False
    return True


@contextmanager
def _without_onednn() -> Iterator[None]:
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _out_of_bounds(x: torch.Tensor) -> bool:
    if x.numel() > MAX_ELEMENTS:
        return True
    if x.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return False
    size = x.abs()  # XLA takes subnormal numbers for zero, as most accelerators do
    return bool(((size > 0) & (size < torch.finfo(x.dtype).tiny * 1e3)).any())


def _near(other: torch.Tensor, x: torch.Tensor) -> bool:
    if x.dtype not in RELATIVE:
        return torch.equal(other, x)
    finite = torch.isfinite(x)
    if not torch.equal(torch.isfinite(other), finite):
        return False
    if not torch.equal(other[~finite].nan_to_num(), x[~finite].nan_to_num()):
        return False
    if not finite.any():
        return True
    allowed = 0.5 * RELATIVE[x.dtype]
    x, other = x[finite].double(), other[finite].double()
    return bool((x - other).abs().max() <= allowed * x.abs().max())
