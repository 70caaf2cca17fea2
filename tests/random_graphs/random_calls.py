"""The torch calls that random programs are made of: each family draws one line that fits the values at hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

import torch

from tests.random_graphs.random_programs import LAYOUTS, VALUES, Environment, InputSpec, Line, Rounding

T = TypeVar("T")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float32, *FLOATS, torch.int64, torch.int32, torch.bool)
SIZES = (1, 2, 3, 4, 5)
EXACT, RESULT, SUMS, SMOOTH, _ = Rounding

UNARY: Mapping[str, Rounding] = {
    **dict.fromkeys(("torch.neg", "torch.abs", "torch.relu", "torch.sign", "torch.floor", "torch.ceil"), EXACT),
    **dict.fromkeys(("torch.round", "torch.trunc", "torch.isnan", "torch.isfinite", "torch.logical_not"), EXACT),
    **dict.fromkeys(("torch.bitwise_not", "torch.clone", "torch.positive", "torch.nan_to_num"), EXACT),
    **dict.fromkeys(("torch.zeros_like", "torch.ones_like", "F.relu6", "F.hardtanh"), EXACT),
    **dict.fromkeys(("torch.frac", "torch.square"), RESULT),
    **dict.fromkeys(("torch.exp", "torch.expm1", "torch.tanh", "torch.sigmoid", "torch.sin", "torch.cos"), SMOOTH),
    **dict.fromkeys(("torch.sqrt", "torch.rsqrt", "torch.log", "torch.log1p", "torch.reciprocal"), SMOOTH),
    **dict.fromkeys(("torch.erf", "torch.atan", "F.gelu", "F.silu", "F.softplus", "F.elu", "F.leaky_relu"), SMOOTH),
    **dict.fromkeys(("F.mish", "F.hardswish", "F.hardsigmoid", "F.logsigmoid", "torch.sinh", "torch.exp2"), SMOOTH),
}
BINARY: Mapping[str, Rounding] = {
    **dict.fromkeys(("{a} + {b}", "{a} - {b}", "{a} * {b}", "torch.add({a}, {b}, alpha=2)"), RESULT),
    **dict.fromkeys(("torch.rsub({a}, {b})", "torch.sub({a}, {b}, alpha=3)"), RESULT),
    **dict.fromkeys(("torch.maximum({a}, {b})", "torch.minimum({a}, {b})", "torch.copysign({a}, {b})"), EXACT),
    **dict.fromkeys(("{a} == {b}", "{a} != {b}", "{a} < {b}", "{a} <= {b}", "{a} > {b}", "{a} >= {b}"), EXACT),
    **dict.fromkeys(("torch.logical_and({a}, {b})", "torch.logical_xor({a}, {b})", "torch.fmax({a}, {b})"), EXACT),
    **dict.fromkeys(("{a} & {b}", "{a} | {b}", "{a} ^ {b}"), EXACT),
    **dict.fromkeys(("{a} // {b}", "torch.div({a}, {b}, rounding_mode='trunc')"), SUMS),
    **dict.fromkeys(("torch.remainder({a}, {b})", "torch.fmod({a}, {b})"), SUMS),
    **dict.fromkeys(("{a} / {b}", "torch.pow({a}, {b})", "torch.atan2({a}, {b})", "torch.hypot({a}, {b})"), SMOOTH),
}
SCALARS = ("0", "1", "2", "-1", "3", "0.5", "-1.5", "2.0", "0.0", "True", "torch.nan", "torch.inf", "-torch.inf")
REDUCTIONS: Mapping[str, Rounding] = {
    **dict.fromkeys(("amax", "amin", "any", "all", "argmax", "argmin", "count_nonzero"), EXACT),
    **dict.fromkeys(("sum", "nansum"), SUMS),
    **dict.fromkeys(("mean", "prod", "var", "std", "logsumexp"), SMOOTH),
}
ONE_DIM = ("argmax", "argmin", "prod")
MANY_DIMS_NEEDED = ("amax", "amin", "logsumexp")
NO_KEEPDIM = ("count_nonzero",)


class Chooser:
    """Draws choices, and names and values of the program so far."""

    def __init__(self, random: Random, env: Environment) -> None:
        self._random = random
        self.env = env

    def pick(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def maybe(self, one_in: int = 2) -> bool:
        return self._random.randrange(one_in) == 0

    def tensor(self, accept: Callable[[torch.Tensor], bool] = lambda x: True) -> str | None:
        """A name whose value is accepted, more often a new one; None if there is none."""
        names = [name for name, x in self.env.items() if accept(x)]
        return max(self.pick(names), self.pick(names), key=names.index) if names else None

    def dim(self, x: torch.Tensor) -> int:
        return self.integer(-x.dim(), x.dim() - 1)


@dataclass(frozen=True)
class Call:
    """An expression, the tensors it reads, and how it rounds."""

    expression: str
    reads: tuple[str, ...]
    rounding: Rounding = EXACT

    def line(self, result: str) -> Line:
        return Line(f"{result} = {self.expression}", result, self.reads, self.rounding)


Family = Callable[[Chooser], "Call | Line | None"]


def draw_inputs(choose: Chooser) -> tuple[InputSpec, ...]:
    """One to three inputs, whose shapes often broadcast against each other."""
    specs: list[InputSpec] = []
    for _ in range(choose.integer(1, 3)):
        if specs and choose.maybe(one_in=6):
            specs.append(_draw_sharing(choose, specs))
            continue
        shape = _draw_shape(choose) if not specs or choose.maybe() else _broadcastable(choose, specs[0].shape)
        specs.append(
            InputSpec(choose.pick(DTYPES), shape, choose.pick(LAYOUTS), choose.pick(VALUES), choose.integer(0, 9999))
        )
    return tuple(specs)


def _draw_sharing(choose: Chooser, specs: list[InputSpec]) -> InputSpec:
    place = choose.integer(0, len(specs) - 1)
    spec = specs[place]
    layouts = ["plain", "transposed", "strided"] if spec.shape and spec.shares is None else ["plain"]
    return InputSpec(spec.dtype, spec.shape, choose.pick(layouts), spec.values, spec.seed, place)


def _draw_shape(choose: Chooser) -> tuple[int, ...]:
    shape = [choose.pick(SIZES) for _ in range(choose.pick((2, 1, 3, 0, 4, 2, 3)))]
    if shape and choose.maybe(one_in=12):
        shape[choose.integer(0, len(shape) - 1)] = 0
    return tuple(shape)


def _broadcastable(choose: Chooser, shape: tuple[int, ...]) -> tuple[int, ...]:
    kept = shape[choose.integer(0, len(shape)) :] if shape and choose.maybe() else shape
    return tuple(1 if choose.maybe(one_in=5) else n for n in kept)


def unary(choose: Chooser) -> Call | None:
    name = choose.tensor()
    function = choose.pick(list(UNARY))
    return name and Call(f"{function}({name})", (name,), UNARY[function])  # type: ignore[return-value]


def binary(choose: Chooser) -> Call | None:
    a = choose.tensor()
    assert a is not None
    form = choose.pick(list(BINARY))
    other = choose.tensor(lambda x: _broadcasts(x, choose.env[a])) if choose.maybe() else None
    if other is not None:
        return Call(form.format(a=a, b=other), (a, other), BINARY[form])
    scalar = choose.pick(SCALARS)
    if choose.maybe() and not form.startswith("torch."):
        return Call(form.format(a=scalar, b=a), (a,), BINARY[form])
    return Call(form.format(a=a, b=scalar), (a,), BINARY[form])


def _broadcasts(x: torch.Tensor, y: torch.Tensor) -> bool:
    return all(n == m or 1 in (n, m) for n, m in zip(reversed(x.shape), reversed(y.shape)))


def ternary(choose: Chooser) -> Call | None:
    a = choose.tensor()
    assert a is not None
    b = choose.tensor(lambda x: _broadcasts(x, choose.env[a])) or a
    c = choose.tensor(lambda x: _broadcasts(x, choose.env[a]) and _broadcasts(x, choose.env[b])) or a
    scalar, other = choose.pick(SCALARS), choose.pick(SCALARS)
    forms = (
        (f"torch.where({c} > 0, {a}, {b})", EXACT),
        (f"torch.where({c} != 0, {a}, {scalar})", EXACT),
        (f"torch.where({c}, {scalar}, {a})", EXACT),
        (f"torch.clamp({a}, {scalar}, {other})", EXACT),
        (f"torch.clamp({a}, min={b})", EXACT),
        (f"torch.clamp({a}, max={scalar})", EXACT),
        (f"torch.lerp({a}, {b}, {scalar})", SUMS),
        (f"torch.addcmul({a}, {b}, {c}, value=2)", SUMS),
        (f"torch.addcdiv({a}, {b}, {c})", SMOOTH),
        (f"{a}.masked_fill({c} > 0, {scalar})", EXACT),
    )
    expression, rounding = choose.pick(forms)
    return Call(expression, (a, b, c), rounding)


def reduction(choose: Chooser) -> Call | None:
    name = choose.tensor()
    assert name is not None
    x = choose.env[name]
    function = choose.pick(list(REDUCTIONS))
    rounding = REDUCTIONS[function]
    if x.dim() == 0 or (choose.maybe(one_in=4) and function not in MANY_DIMS_NEEDED):
        return None if function in MANY_DIMS_NEEDED else Call(f"{name}.{function}()", (name,), rounding)
    dims = [choose.dim(x)]
    if function not in ONE_DIM and choose.maybe():
        dims.append(choose.dim(x))
    listed = tuple(dict.fromkeys(d % x.dim() for d in dims))
    dim = str(dims[0]) if len(listed) == 1 else str(listed)
    keepdim = "" if function in NO_KEEPDIM else f", keepdim={choose.maybe()}"
    return Call(f"{name}.{function}({dim}{keepdim})", (name,), rounding)


def along_dim(choose: Chooser) -> Call | None:
    name = choose.tensor(lambda x: x.dim() > 0)
    if name is None:
        return None
    x = choose.env[name]
    dim, descending = choose.dim(x), choose.maybe()
    k = choose.integer(0, x.shape[dim])
    # Eager takes a softmax of integers that are empty, where its own meta function refuses it.
    softmaxes = ("torch.softmax", "torch.log_softmax") if x.is_floating_point() else ("torch.cumsum", "torch.flip")
    forms = (
        *(
            (f"{function}({name}, {f'({dim},)' if function == 'torch.flip' else dim})", SMOOTH)
            for function in softmaxes
        ),
        (f"torch.cumsum({name}, {dim})", SUMS),
        (f"torch.cumprod({name}, {dim})", SMOOTH),
        (f"torch.cummax({name}, {dim})[0]", EXACT),
        (f"torch.sort({name}, {dim}, descending={descending})[0]", EXACT),
        (f"torch.sort({name}, stable=True, dim={dim}, descending={descending})[1]", EXACT),
        (f"torch.topk({name}, {k}, {dim}, largest={descending})[0]", EXACT),
        (f"torch.max({name}, {dim})[0]", EXACT),
        (f"torch.max({name}, {dim})[1]", EXACT),
        (f"torch.min({name}, {dim}, keepdim=True)[1]", EXACT),
        (f"F.normalize({name}, dim={dim})", SMOOTH),
        (f"torch.flip({name}, ({dim},))", EXACT),
        (f"torch.roll({name}, {k + 1}, {dim})", EXACT),
        (f"torch.diff({name}, dim={dim})", RESULT),
        (f"torch.repeat_interleave({name}, 2, dim={dim})", EXACT),
        (f"F.layer_norm({name}, {tuple(x.shape[dim % x.dim() :])})", SMOOTH),
        (f"torch.linalg.vector_norm({name}, dim={dim})", SMOOTH),
    )
    expression, rounding = choose.pick(forms)
    return Call(expression, (name,), rounding)


def view(choose: Chooser) -> Call | None:
    name = choose.tensor()
    assert name is not None
    x = choose.env[name]
    if x.dim() == 0:
        return Call(choose.pick((f"{name}.reshape(1)", f"{name}.expand(3)", f"{name}[None]")), (name,))
    dim, other = choose.dim(x), choose.dim(x)
    size = x.shape[dim]
    start, stop = choose.integer(-size - 1, size + 1), choose.integer(-size, size + 1)
    order = tuple(sorted(range(x.dim()), key=lambda d: (choose.integer(0, 3), d)))
    forms = (
        f"{name}.reshape({_factored(choose, x.numel())})",
        f"{name}.permute({order})",
        f"{name}.transpose({dim}, {other})",
        f"{name}[{_slice(dim % x.dim(), f'{start}:{stop}')}]",
        f"{name}[{_slice(dim % x.dim(), f'::{choose.integer(1, 3)}')}]",
        f"{name}.select({dim}, {choose.integer(-size, max(size - 1, -size))})",
        f"{name}.expand({choose.integer(1, 3)}, *{tuple(choose.integer(2, 3) if n == 1 else n for n in x.shape)})",
        f"{name}.split({choose.integer(1, max(size, 1))}, {dim})[-1]",
        f"{name}.chunk(2, {dim})[0]",
        f"{name}.squeeze()",
        f"{name}.squeeze({dim})",
        f"{name}.unsqueeze({dim})",
        f"{name}.flatten({dim % x.dim()})",
        f"{name}.repeat(2, *{(1,) * (x.dim() - 1)})",
        f"{name}.mT",
        f"{name}.tril({choose.integer(-2, 2)})",
        f"{name}.diagonal({choose.integer(-1, 1)})",
        f"{name}.unfold({dim}, {choose.integer(1, max(size, 1))}, {choose.integer(1, 2)})",
        f"F.pad({name}, ({choose.integer(-1, 2)}, {choose.integer(0, 2)}), value=1)",
        f"{name}.contiguous()",
        f"{name}[..., None, :]",
        f"{name}.movedim(0, -1)",
        f"{name}.view({_factored(choose, x.numel())})",
    )
    return Call(choose.pick(forms), (name,))


def _slice(dim: int, text: str) -> str:
    return ", ".join([*[":"] * dim, text])


def _factored(choose: Chooser, count: int) -> tuple[int, ...]:
    factors = [n for n in range(1, count + 1) if count % n == 0]
    if not factors:
        return choose.pick(((0,), (0, 3), (2, 0)))
    first = choose.pick(factors)
    return choose.pick(((first, count // first), (first, -1), (-1,), (1, first, count // first)))


def joined(choose: Chooser) -> Call | None:
    a = choose.tensor()
    assert a is not None
    x = choose.env[a]
    b = choose.tensor(lambda y: y.shape == x.shape) or a
    dim = choose.integer(-x.dim(), x.dim() - 1) if x.dim() else 0
    cat = f"torch.cat(({a}, {b}, {a}), {dim})"
    return Call(choose.pick((cat, f"torch.stack(({a}, {b}), {dim})")), (a, b))


def made_tensor(shape: Sequence[int], dtype: torch.dtype) -> str:
    """An expression for a tensor of mixed small quarters."""
    return f"((torch.arange({math.prod(shape)}) * 5 % 11 - 4) / 4).to({dtype}).reshape({tuple(shape)})"


def product(choose: Chooser) -> Call | None:
    a = choose.tensor(lambda x: x.dim() > 0)
    if a is None:
        return None
    x = choose.env[a]
    width, out = x.shape[-1], choose.integer(1, 4)
    b = choose.tensor(lambda y: y.dtype == x.dtype and y.dim() > 0 and y.shape[max(-2, -y.dim())] == width)
    weight, bias = made_tensor((out, width), x.dtype), made_tensor((out,), x.dtype)
    forms = (
        f"{a} @ {b or made_tensor((width, out), x.dtype)}",
        f"{a} @ {a}.mT" if x.dim() > 1 else f"torch.dot({a}, {a})",
        f"F.linear({a}, {weight}, {choose.pick((bias, 'None'))})",
        f"torch.einsum('...i,ji->...j', {a}, {weight})",
        f"torch.outer({a}.flatten(), {a}.flatten())",
        f"torch.addmm({bias}, {a}, {weight}.t(), beta=2, alpha=3)",
    )
    return Call(choose.pick(forms), (a, b) if b else (a,), SUMS)


def window(choose: Chooser) -> Call | None:
    name = choose.tensor(lambda x: x.dim() in (2, 3, 4) and x.is_floating_point() and x.numel() > 0)
    if name is None:
        return None
    x = choose.env[name]
    image = name if x.dim() > 2 else f"{name}[None]"
    channels, rank = x.shape[-3] if x.dim() == 4 else x.shape[-2], 2 if x.dim() == 4 else 1
    kernel = tuple(choose.integer(1, 3) for _ in range(rank))
    groups = choose.pick((1, channels))
    weight = made_tensor((groups * choose.integer(1, 2), channels // groups, *kernel), x.dtype)
    bias = choose.pick(("None", made_tensor((channels,), x.dtype)))
    settings = f"padding={choose.integer(0, 2)}, stride={choose.integer(1, 2)}"
    dilation = f"dilation={choose.integer(1, 2)}, groups={groups}"
    forms = (
        (f"F.conv{rank}d({image}, {weight}, {bias}, {settings}, {dilation})", SUMS),
        (f"F.conv{rank}d({image}, {weight}, None, {settings}, {dilation})", SUMS),
        (f"F.max_pool{rank}d({image}, 2, {settings})", EXACT),
        (f"F.avg_pool{rank}d({image}, 2, {settings})", SMOOTH),
    )
    expression, rounding = choose.pick(forms)
    return Call(expression, (name,), rounding)


def indexed(choose: Chooser) -> Call | None:
    name = choose.tensor(lambda x: x.dim() > 0)
    if name is None:
        return None
    x = choose.env[name]
    dim = choose.dim(x)
    size = x.shape[dim]
    if size == 0:
        return None
    found = choose.tensor(lambda y: y.dtype == torch.int64 and y.dim() > 0)
    count = choose.integer(1, 4)
    index = f"{found} % {size}" if found and choose.maybe() else f"(torch.arange({count}) * 3 + 1) % {size}"
    shape, expanded = _with_size(torch.Size([1]) * x.dim(), dim, count), _with_size(x.shape, dim, count)
    along = f"((torch.arange({count}) * 3 + 1) % {size}).reshape({shape}).expand({expanded})"
    flat = f"({index}).flatten()"
    forms = (
        (f"torch.gather({name}, {dim}, {along})", EXACT),
        (f"torch.index_select({name}, {dim}, {flat})", EXACT),
        (f"{name}[{_slice(dim % x.dim(), index)}]", EXACT),
        (f"{name}[{_slice(dim % x.dim(), f'({index}) - {size}')}]", EXACT),
        (f"torch.take_along_dim({name}, {along}, {dim})", EXACT),
        (f"F.embedding(({index}), {name}.reshape({size}, -1))" if dim % x.dim() == 0 else "", EXACT),
        (f"torch.scatter({name}, {dim}, {along}[{_slice(dim % x.dim(), ':1')}], 2)", EXACT),
        (f"torch.scatter_add({name}, {dim}, {along}, {name}[{_slice(dim % x.dim(), f':{min(count, size)}')}])", SUMS),
        (f"torch.index_add({name}, {dim}, {flat}[:1], {name}.narrow({dim}, 0, 1))", RESULT),
        (f"torch.index_fill({name}, {dim}, {flat}, 3)", EXACT),
        (f"F.one_hot({index}, {size})", EXACT),
    )
    expression, rounding = choose.pick(forms)
    return Call(expression, (name, found) if found else (name,), rounding) if expression else None


def _with_size(shape: torch.Size, dim: int, size: int) -> tuple[int, ...]:
    return tuple(size if d == dim % len(shape) else n for d, n in enumerate(shape))


def cast(choose: Chooser) -> Call | None:
    dtype = choose.pick(DTYPES)
    to_integer = dtype in (torch.int64, torch.int32)
    name = choose.tensor(lambda x: x.dtype != dtype and (not to_integer or _fits_integer(x)))
    if name is None:
        return None
    other = choose.tensor(lambda x: x.dtype == dtype)
    form = f"{name}.type_as({other})" if other and choose.maybe() else f"{name}.to({dtype})"
    return Call(form, (name,))


def _fits_integer(x: torch.Tensor) -> bool:
    """Whether a rounding gives no other integer: NaN and infinities give the least one."""
    return not x.is_floating_point() or bool(((x.abs() < 2**30) | ~x.isfinite()).all())


def creation(choose: Chooser) -> Call | None:
    shape, dtype = _draw_shape(choose), choose.pick(DTYPES)
    count = choose.integer(0, 6)
    name = choose.tensor()
    assert name is not None
    forms = (
        f"torch.full({shape}, {choose.pick(SCALARS)}, dtype={dtype})",
        f"torch.full({shape}, {choose.pick(SCALARS)})",
        f"torch.arange({count})",
        f"torch.arange(-1, {count}, 2, dtype={dtype})",
        f"torch.arange(0.5, {count} + 0.25, 0.5)",
        f"torch.zeros({shape}, dtype={dtype})",
        f"torch.full_like({name}, {choose.pick(SCALARS)})",
        f"{name}.new_ones({shape})",
        f"torch.eye({count}, 3, dtype={dtype})",
        f"torch.linspace(-1, 1, {count})",
    )
    return Call(choose.pick(forms), ())


def _view_in_place(name: str, x: torch.Tensor) -> str:
    if name.startswith("x"):
        return f"{name}.neg_()"  # Dynamo takes no view in place of an input
    return f"{name}.t_()" if x.dim() == 2 else f"{name}.unsqueeze_(0)"


def written(choose: Chooser) -> Line | None:
    """A statement that changes a tensor in place, an input now and then."""
    name = choose.tensor(_own_places)
    if name is None or (name.startswith("x") and choose.maybe()):
        return None
    x = choose.env[name]
    if x.dim() == 0 and x.dtype == torch.float64:
        return None  # torch's capture may lose such a write: backend="aot_eager" leaves the tensor as it was, too
    other = choose.tensor(lambda y: _broadcasts(y, x) and y.dim() <= x.dim()) or name
    scalar = choose.pick(SCALARS)
    place = _slice(choose.integer(0, max(x.dim() - 1, 0)), choose.pick(("0", ":1", "1:", "::2", "-1")))
    forms = (
        (f"{name}.add_({other})", RESULT),
        (f"{name}.mul_({choose.pick((scalar, other))})", RESULT),
        (f"{name}.sub_({scalar})", RESULT),
        (f"{name}.copy_({other})", EXACT),
        (f"{name}.fill_({scalar})", EXACT),
        (f"{name}.zero_()", EXACT),
        (f"{name}.clamp_(-1, 2)", EXACT),
        (f"{name}.relu_()", EXACT),
        (f"{name}.masked_fill_({other} > 0, {scalar})", EXACT),
        (f"{name}[{place}] = {scalar}", EXACT),
        (f"{name}[{place}] = {other}[{place}]", EXACT),
        (f"{name}[{name} > 0] = {scalar}" if x.dim() else f"{name}.neg_()", EXACT),  # Dynamo takes no mask of one
        (f"{name}[{place}] += 1", RESULT),
        (f"{name}.tanh_()", SMOOTH),
        (_view_in_place(name, x), EXACT),
    )
    text, rounding = choose.pick(forms)
    if not x.is_floating_point() and not _fits_integer(choose.env[other]):
        return None
    return Line(text, name, (name, other), rounding, in_place=True)


def _own_places(x: torch.Tensor) -> bool:
    """Whether no two elements share memory: torch leaves writing to the others undefined."""
    places = torch.zeros(x.shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        places = places + (torch.arange(size) * stride).reshape(_with_size(torch.Size([1]) * x.dim(), dim, size))
    return len(places.unique()) == x.numel()


FAMILIES: tuple[Family, ...] = (
    unary, binary, reduction, view, ternary, cast, along_dim, product, indexed, written, joined, creation, window,
    unary, binary, view, view, reduction, along_dim,
)  # fmt: skip
