"""Small random programs over tensors whose sizes vary: their text names dims, never sizes, so they run at every size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

import torch

from tests.bucketing import size_lines
from tests.random_graphs.random_programs import (
    LAYOUTS,
    Environment,
    InputSpec,
    Line,
    Program,
    Rounding,
    is_defined,
    run_lines,
)

EXACT, RESULT, SUMS, SMOOTH, SPECTRAL = Rounding
Sizes = Mapping[str, int]
Family = Callable[[Random, Environment], "tuple[str, tuple[str, ...], Rounding] | None"]
ERRORS = (ArithmeticError, RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)
DIMS = ("s", "s", "t", "2", "3", "4", "6")
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.bool)
VALUES = ("normal", "integers", "quarters", "special")


@dataclass(frozen=True)
class SizedProgram:
    """A program and the dims of its inputs: names of sizes, or numbers."""

    shapes: tuple[tuple[str, ...], ...]
    program: Program

    def at(self, sizes: Sizes) -> Program:
        shapes = [tuple(sizes[d] if d in sizes else int(d) for d in dims) for dims in self.shapes]
        inputs = tuple(replace(spec, shape=shape) for spec, shape in zip(self.program.inputs, shapes, strict=True))
        return replace(self.program, inputs=inputs)


def draw(random: Random, trials: list[Sizes]) -> SizedProgram:
    """A program whose results are well defined at all these sizes."""
    shapes, specs = [], []
    for _ in range(random.randint(1, 3)):
        again = shapes and random.random() < 0.5
        shapes.append(random.choice(shapes) if again else tuple(random.choices(DIMS, k=random.choice((1, 2, 2, 3, 3)))))
        layout = random.choice(LAYOUTS)
        specs.append(InputSpec(random.choice(DTYPES), (), layout, random.choice(VALUES), random.randint(0, 9999)))
    if not any(d in ("s", "t") for dims in shapes for d in dims):
        shapes[0] = ("s", *shapes[0][1:])
    drawn = SizedProgram(tuple(shapes), Program(tuple(specs)))
    length = random.randint(2, 6)
    for _ in range(8 * length):
        if len(drawn.program.lines) == length:
            break
        drawn = _longer(random, drawn, trials)
    names = [*drawn.program.names, *(line.result for line in drawn.program.lines)]
    read = {name for line in drawn.program.lines for name in line.reads}
    outputs = tuple(n for n in names if n.startswith("v") and (n not in read or random.random() < 0.3))
    return replace(drawn, program=replace(drawn.program, outputs=outputs))


def _longer(random: Random, drawn: SizedProgram, trials: list[Sizes]) -> SizedProgram:
    """The program with one more line, if one was found that eager runs at all the sizes."""
    env = run_lines(drawn.at(trials[0]))
    families = size_lines.FAMILIES if random.random() < 0.6 else FAMILIES
    found = random.choice(families)(random, env)
    if found is None:
        return drawn
    text, reads, rounding = found
    name = f"v{len(drawn.program.lines)}"
    line = Line(f"{name} = {text.replace(size_lines.OUT, name)}", name, reads, rounding)
    longer = replace(drawn, program=replace(drawn.program, lines=(*drawn.program.lines, line)))
    for sizes in trials:
        program = longer.at(sizes)
        try:
            made = run_lines(program)
        except ERRORS:
            return drawn
        result = made[name]
        if not isinstance(result, torch.Tensor) or not result.numel() or not is_defined(program, made):
            return drawn
    return longer


def _of(random: Random, env: Environment, accept: Callable[[torch.Tensor], bool] = lambda x: True) -> str | None:
    names = [name for name, x in env.items() if accept(x)]
    return max(random.choice(names), random.choice(names), key=names.index) if names else None


def _templates(options: Mapping[str, Rounding], least_rank: int = 1) -> Family:
    """Expressions of one tensor {a}, a dim {d}, another dim {e}."""

    def family(random: Random, env: Environment) -> tuple[str, tuple[str, ...], Rounding] | None:
        name = _of(random, env, lambda x: x.dim() >= least_rank)
        if name is None:
            return None
        text, rounding = random.choice(list(options.items()))
        rank = env[name].dim()
        d, e = random.randrange(-rank, rank) if rank else 0, random.randrange(rank) if rank else 0
        return text.format(a=name, d=d, e=e, c=rank), (name,), rounding

    return family


def _pairs(options: Mapping[str, Rounding]) -> Family:
    """Expressions of two tensors {a} and {b}, a dim {d} of the first."""

    def family(random: Random, env: Environment) -> tuple[str, tuple[str, ...], Rounding] | None:
        a, b = _of(random, env, lambda x: x.dim() > 0), _of(random, env)
        if a is None or b is None:
            return None
        text, rounding = random.choice(list(options.items()))
        return text.format(a=a, b=b, d=random.randrange(env[a].dim())), (a, b), rounding

    return family


def _all(rounding: Rounding, *texts: str) -> dict[str, Rounding]:
    return dict.fromkeys(texts, rounding)


POINTWISE = _templates(
    {
        **_all(EXACT, "-{a}", "{a}.abs()", "{a}.relu()", "{a} > 0", "{a}.double()", "{a}.isnan()", "{a}.float()"),
        **_all(EXACT, "torch.nan_to_num({a}, 0.5)", "{a}.clamp(-1, 1)", "{a} == {a}.round()", "{a}.sign()"),
        **_all(RESULT, "{a} * 2", "{a} + 1", "{a} * {a}"),
        **_all(SMOOTH, "{a}.sigmoid()", "{a}.tanh()", "{a}.exp()", "1 / {a}"),
    },
    least_rank=0,
)
SIZED = _templates(
    {
        **_all(RESULT, "{a} + {a}.shape[{d}]", "{a} - {a}.numel()", "{a} * ({a}.shape[{d}] + 1)"),
        **_all(SMOOTH, "{a} / {a}.shape[{d}]", "{a} * {a}.shape[{d}] ** -0.5", "{a} * (1 / {a}.shape[{d}])"),
        **_all(EXACT, "torch.arange({a}.shape[{d}])", "torch.ones_like({a})", "torch.zeros({a}.shape[{d}], 3)"),
        **_all(EXACT, "torch.arange({a}.shape[{d}] - 1, -1, -1)", "torch.full(({a}.shape[{d}],), {a}.shape[{e}])"),
        **_all(EXACT, "torch.arange(1, {a}.shape[{d}] + 3, 2)", "{a}.new_full({a}.shape, 3)"),
    }
)
REDUCTIONS = _templates(
    {
        **_all(
            EXACT, "{a}.amax({d})", "{a}.amin({d}, keepdim=True)", "{a}.argmax({d})", "{a}.argmin({d}, keepdim=True)"
        ),
        **_all(
            EXACT, "{a}.max()", "{a}.min({d})[0]", "{a}.max({d})[1]", "{a}.any({d})", "{a}.all()", "{a}.count_nonzero()"
        ),
        **_all(EXACT, "{a}.argmax()", "{a}.bool().all({d})"),
        **_all(SUMS, "{a}.sum({d})", "{a}.sum()", "{a}.nansum({d}, keepdim=True)", "{a}.sum({d}, keepdim=True)"),
        **_all(SMOOTH, "{a}.mean({d})", "{a}.mean()", "{a}.var({d})", "{a}.std({d}, correction=0)", "{a}.prod({d})"),
        **_all(
            SMOOTH,
            "{a}.logsumexp({d})",
            "torch.linalg.vector_norm({a}, 3, {d})",
            "torch.var_mean({a}.nan_to_num(0, 1, -1), {d})[1]",
        ),
    }
)
ALONG = _templates(
    {
        **_all(SMOOTH, "{a}.softmax({d})", "{a}.log_softmax({d})", "{a}.cumprod({d})", "{a}.logcumsumexp({d})"),
        **_all(SUMS, "{a}.cumsum({d})"),
        **_all(EXACT, "{a}.sort({d})[0]", "{a}.sort(dim={d}, descending=True, stable=True)[1]", "{a}.topk(2, {d})[0]"),
        **_all(EXACT, "{a}.cummax({d})[0]", "{a}.topk(2, {d}, largest=False)[0]", "{a}.sort(dim={d}, stable=True)[1]"),
        **_all(
            EXACT,
            "{a}.flip({d})",
            "{a}.roll(1, {d})",
            "{a}.roll(-2, {d})",
            "{a}.gather({d}, {a}.argsort({d}, stable=True))",
        ),
        **_all(EXACT, "{a}.index_select({d}, torch.arange({a}.shape[{d}] - 1))", "{a}[torch.arange({a}.shape[0]) - 1]"),
        **_all(
            EXACT,
            "F.pad({a}, (1, 2))",
            "F.pad({a}, (0, 3), value=1)",
            "{a}.flip({d}, {e})",
            "{a}.tril()",
            "{a}.triu(1)",
        ),
    }
)
MOVED = _templates(
    {
        **_all(
            EXACT,
            "{a}.roll(3)",
            "{a}.reshape(-1).sort(stable=True)[1]",
            "{a}.reshape(-1)[2:]",
            "{a}.repeat({a}.shape[{d}], *[1] * {c})",
        ),
        **_all(
            EXACT,
            "torch.eye({a}.shape[{d}], {a}.shape[{e}])",
            "F.pad({a}, (-1, 2))",
            "F.pad({a}, (0, -{a}.shape[-1] % 4))",
        ),
        **_all(EXACT, "F.pad({a}, ({a}.shape[{d}], 0))", "{a}.flatten(0, 1).amax(0)", "{a}.reshape(-1).argmin()"),
        **_all(EXACT, "F.pad({a}, (1, 1), mode='replicate')", "F.pad({a}, (1, 0), mode='reflect')"),
        **_all(EXACT, "F.interpolate({a}, scale_factor=2.0)", "F.adaptive_max_pool1d({a}, 2)", "F.max_pool1d({a}, 2)"),
        **_all(SUMS, "{a}.reshape(-1).cumsum(0)", "F.adaptive_avg_pool1d({a}, 3)", "F.unfold({a}[:, None], (2, 1))"),
        **_all(
            SPECTRAL,
            "torch.fft.rfft({a}.nan_to_num(0, 1, -1), dim={d}).abs()",
            "torch.fft.irfft({a}.nan_to_num(0, 1, -1), n={a}.shape[{d}], dim={d})",
        ),
        **_all(SMOOTH, "F.layer_norm({a}, {a}.shape[{e}:])", "F.interpolate({a}, scale_factor=1.5, mode='linear')"),
    }
)
VIEWS = _templates(
    {
        **_all(
            EXACT,
            "{a}.transpose({d}, {e})",
            "{a}.unsqueeze({d})",
            "{a}.reshape(-1)",
            "{a}.flatten({e})",
            "{a}.squeeze()",
        ),
        **_all(
            EXACT, "{a}.flatten(0, 1)", "{a}.reshape(-1, {a}.shape[-1])", "{a}.reshape({a}.shape[0], -1)", "{a}.t()"
        ),
        **_all(EXACT, "{a}.unflatten({d}, (2, -1))", "{a}.unflatten({d}, (-1, 2))", "{a}.movedim({d}, 0)"),
        **_all(
            EXACT, "{a}.unsqueeze({e}).expand(*{a}.shape[:{e}], 3, *{a}.shape[{e}:])", "{a}.repeat_interleave(2, {d})"
        ),
        **_all(EXACT, "{a}.repeat(*[2] * {c})", "{a}.unbind({d})[0]", "{a}.split(2, {d})[0]", "{a}.contiguous()"),
        **_all(EXACT, "{a}.narrow({d}, 1, 1)", "{a}.select({d}, -1)", "{a}.select({d}, 1)", "{a}.select({d}, -2)"),
        **_all(
            EXACT,
            "{a}[1:]",
            "{a}[:-1]",
            "{a}[-2:]",
            "{a}[::2]",
            "{a}[..., 1:-1]",
            "{a}[..., -3:]",
            "{a}[..., 1::2]",
            "{a}[..., :2]",
        ),
        **_all(
            EXACT,
            "{a}[..., None, :-1]",
            "{a}[-1]",
            "{a}[..., -1]",
            "{a}[..., 0]",
            "{a}.diagonal()",
            "{a}.unfold({d}, 2, 1)",
        ),
    }
)
WHOLE = _templates(
    {
        **_all(EXACT, "torch.cat([{a}, {a}[:0]])", "torch.cat([{a}.narrow({d}, 0, 0), {a}], {d})", "torch.cat([{a}])"),
        **_all(EXACT, "{a}.slice_scatter({a}[:0], 0, 0, 0)", "{a}.slice_scatter({a}, {d})", "{a}.roll(0, {d})"),
        **_all(
            EXACT, "{a}.clone()", "{a}.flip(())", "{a}.repeat(*[1] * {c})", "F.pad({a}, (0, 0))", "{a}.to({a}.dtype)"
        ),
        **_all(EXACT, "{a}.index_fill({d}, torch.arange(0), 3)", "F.dropout({a}, 0.5, False)", "{a}.tril({a}.numel())"),
        **_all(RESULT, "{a} + 0", "{a}.index_add({d}, torch.arange(0), {a}.narrow({d}, 0, 0))"),
        **_all(
            EXACT,
            "torch.empty_strided({a}.shape, [2 * n for n in {a}.contiguous().stride()], dtype={a}.dtype).copy_({a})",
            "{a}.new_empty_strided({a}.shape, [2 * n for n in {a}.contiguous().stride()]).copy_({a})",
        ),
    }
)
"""All of a tensor in other memory, or in its own; and memory with gaps."""
PAIRS = _pairs(
    {
        **_all(RESULT, "{a} + {b}", "{a} - {b}", "{a} * {b}"),
        **_all(
            EXACT,
            "torch.maximum({a}, {b})",
            "{a} < {b}",
            "torch.where({a} > 0, {a}, {b})",
            "{a}.masked_fill({b} > 0, 0)",
        ),
        **_all(EXACT, "torch.cat([{a}, {b}], {d})", "torch.cat([{b}, {a}, {b}], {d})", "torch.stack([{a}, {b}], {d})"),
        **_all(EXACT, "{a}.slice_scatter({b}[1:], {d}, 1)", "torch.cat([{a}[1:], {b}])"),
        **_all(
            SUMS, "{a} @ {b}", "{a} @ {b}.transpose(-1, -2)", "{a}.transpose(-1, -2) @ {b}", "torch.outer({a}, {b})"
        ),
        **_all(
            SUMS, "{a}.scatter_add({d}, {b}.argsort({d}, stable=True), {b})", "F.mse_loss({a}, {b}, reduction='sum')"
        ),
        **_all(SUMS, "torch.einsum('i...,j...->ij', {a}, {b})", "torch.tensordot({a}, {b}, {d})"),
    }
)
FAMILIES: tuple[Family, ...] = (
    POINTWISE,
    SIZED,
    REDUCTIONS,
    REDUCTIONS,
    ALONG,
    ALONG,
    MOVED,
    VIEWS,
    VIEWS,
    VIEWS,
    WHOLE,
    PAIRS,
    PAIRS,
    PAIRS,
)
