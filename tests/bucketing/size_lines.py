"""Lines of random programs in which sizes are values: ends of slices, shifts, counts, scalars, conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from tests.random_graphs.random_programs import Environment, Rounding

EXACT, RESULT, SUMS, SMOOTH, SPECTRAL = Rounding
Family = Callable[[Random, Environment], "tuple[str, tuple[str, ...], Rounding] | None"]

OUT = "OUT"
"""In a line's text: the name of its result."""

_OF_ONE = (
    "{n}",
    "{n}",
    "{n}",
    "{n} // 2",
    "{n} - 1",
    "{n} + 1",
    "({n} + 1) // 2",
    "{n} // 3 + 1",
    "{n} % 4",
    "2 * {n}",
)
_OF_TWO = ("{n} + {m}", "{n} - {m}", "abs({n} - {m})", "max({n}, {m})", "min({n}, {m})", "{n} * {m}", "{n} % {m}")
_OF_BOUNDS = ("min({n}, 5)", "max({n} - 6, 1)", "max({n}, 8)", "-{n} % 4", "12 - {n}")


def size_text(random: Random, env: Environment, near: str) -> str:
    """A number made of sizes: mostly of the tensor `near`."""

    def base() -> str:
        name = near if random.random() < 0.7 else random.choice([name for name, x in env.items() if x.dim()])
        return f"{name}.shape[{random.randrange(env[name].dim())}]"

    forms = random.choice((_OF_ONE, _OF_ONE, _OF_TWO, _OF_BOUNDS))
    return "(" + random.choice(forms).format(n=base(), m=base()) + ")"


def _lines(rounding: Rounding, texts: Sequence[str], least_rank: int = 1) -> Family:
    """Expressions of a tensor {a}, others {b} and {c}, dims {d} and {e} of the first, numbers {n} and {m} made of sizes."""

    def family(random: Random, env: Environment) -> tuple[str, tuple[str, ...], Rounding] | None:
        names = [name for name, x in env.items() if x.dim() >= least_rank]
        others = [name for name, x in env.items() if x.dim()]
        if not names:
            return None
        a = max(random.choice(names), random.choice(names), key=names.index)
        b, rank, text = random.choice(others), env[a].dim(), random.choice(texts)
        made = text.format(
            a=a,
            b=b,
            d=random.randrange(rank),
            e=random.randrange(-rank, 0),
            n=size_text(random, env, a),
            m=size_text(random, env, a),
            r=rank,
        )
        return made, (a, b) if "{b}" in text else (a,), rounding

    return family


SLICES = _lines(
    EXACT,
    (
        "{a}[-{n}:]",
        "{a}[:-{n}]",
        "{a}[{n}:]",
        "{a}[:{n}]",
        "{a}[..., -{n}:]",
        "{a}[..., :-{n}]",
        "{a}[..., {n}:]",
        "{a}[..., :{n}]",
        "{a}[-{n}::2]",
        "{a}[{n}:{m}]",
        "{a}[-{n}:-1]",
        "{a}[..., -{n}:{m}]",
        "{a}[..., {n}:-{m}]",
        "{a}[..., -{n}:-{m}:2]",
        "{a}[..., {n} - 1]",
        "{a}[-{n}]",
        "{a}.reshape(-1)[-{n}:]",
        "{a}.reshape(-1)[{n}:{m}]",
        "{a}.flatten()[::{n}]",
        "{a}.t()[-{n}:]",
        "{a}.movedim({d}, 0)[{n} - {m}:]",
        "{a}.narrow({d}, {n}, {m})",
        "{a}.narrow({d}, 0, {n})",
        "{a}.select({d}, -{n})",
        "{a}.split({n}, {d})[-1]",
        "{a}.tensor_split(({n},), {d})[1]",
        "{a}.tensor_split((-{n},), {d})[0]",
        "{a}.chunk(2, {d})[-1]",
        "torch.cat([{a}, {a}], {d})[-{n}:]",
        "torch.cat([{a}, {b}], {e})[..., -{n}:]",
        "F.pad({a}, ({n}, 0))[..., -{m}:]",
        "{a}.diagonal({n})",
        "{a}.diagonal(-{n})",
    ),
)
MOVES = _lines(
    EXACT,
    (
        "{a}.roll({n}, {d})",
        "{a}.roll(-{n}, {e})",
        "{a}.roll({n})",
        "{a}.flip({d}).narrow({d}, 0, {n})",
        "F.pad({a}, ({n}, {m}))",
        "F.pad({a}, (-{n}, {m}), value=2.5)",
        "F.pad({a}, (0, -{n}))",
        "F.pad({a}, ({n}, 1), mode='replicate')",
        "F.pad({a}, ({n}, {m}), mode='reflect')",
        "{a}.repeat({n}, *[1] * ({r} - 1))",
        "{a}.unsqueeze(0).expand({n}, *{a}.shape)",
        "{a}.unfold({d}, {n}, 1)",
        "{a}.unfold({d}, {n}, {m})",
        "{a}.tril({n})",
        "{a}.triu(-{n})",
        "{a}.tril({n} - {m})",
        "{a}.view(*{a}.shape[:-1], {n}, -1)",
        "{a}.reshape({n}, -1)",
        "{a}.unflatten({d}, (-1, {n}))",
        "{a}[torch.arange({n}) % {a}.shape[0]]",
        "{a}[torch.arange({n}) - {n}]",
        "{a}[..., torch.arange({n} - 1, -1, -1)]",
        "{a}.index_select({d}, torch.arange({n}) + {m})",
        "{a}.gather({d}, {a}.argsort(dim={d}, stable=True).narrow({d}, 0, {n}))",
        "F.one_hot(torch.arange({n}) % {m}, {m})",
        "torch.arange({n}, {n} + {m})",
        "torch.arange({n}, 0, -1)",
        "torch.arange(-{n}, {m})",
        "torch.eye({n}, {m})",
        "torch.full(({n},), {m})",
        "{a}.new_full(({n}, 2), -{m})",
        "torch.ones({n}, {m}).tril({n} - {m})",
        "{a}.masked_fill(torch.arange({a}.shape[-1]) < {n}, {m})",
        "{a}.masked_fill(torch.arange({a}.shape[-1]) >= {n}, 0)",
        "torch.where(torch.arange({a}.shape[-1]) == {n}, {a}, 0)",
        "{a}.topk({n}, {d})[0]",
        "{a}.kthvalue({n}, {d})[0]",
        "{a}.sort({d})[0].select({d}, {n})",
        "{a}.cummax({d})[0].select({d}, -{n})",
        "F.interpolate({a}, size={n})",
        "F.adaptive_max_pool1d({a}, {n})",
        "F.max_pool1d({a}, 2, ceil_mode=True)",
        "torch.searchsorted(torch.arange({n}), {a}.nan_to_num(0, 1, -1).long())",
        "torch.bucketize({a}, torch.arange(0, {n}, 2), right=True)",
    ),
)
SCALARS = _lines(
    RESULT,
    (
        "{a} * {n}",
        "{n} - {a}",
        "{a} + {n}",
        "{a} + ({n} - {m})",
        "{a}.add({a}, alpha={n})",
        "{a} * torch.arange({a}.shape[-1]) + {n}",
        "({a} if {n} > {m} else -{a})",
        "({a}[..., 1:] if {n} > 8 else {a} + 1)",
        "({a} * 2 if {n} % 2 else {a})",
        "torch.where({a} > 0, {a}, {n})",
        "{a}.masked_fill({a} > 0, -{n})",
        "{a}.clamp(max={n})",
        "{a}.fmod({n})",
        "{a}.new_tensor({n}) + {a}",
    ),
)
SMOOTHS = _lines(
    SMOOTH,
    (
        "{a} / {n}",
        "{a} * {n} ** -0.5",
        "{a} * (1 / {n})",
        "{a} * ({n} / {m})",
        "torch.linspace(0, {n}, {m})",
        "torch.linspace(-1, 1, {n})",
        "{a}.cumsum({d}).select({d}, {n}) / {m}",
        "{a}.softmax({d}).narrow({d}, 0, {n})",
        "F.layer_norm({a}.float(), {a}.shape[-1:]) * {n}",
        "F.avg_pool1d({a}, {n})",
        "F.avg_pool1d({a}, 3, 2, 1, ceil_mode=True)",
        "F.adaptive_avg_pool1d({a}, {n})",
        "F.interpolate({a}, size={n}, mode='linear')",
        "{a}.sum({d}) / {a}.shape[{d}]",
        "{a}.mean() * {n} + {m}",
        "{a}.logsumexp({d}) - {n}",
        "{a} @ {b}.transpose(-1, -2) / {n}",
        "{a} @ {a}[..., -{n}:]",
    ),
)
SPECTRA = _lines(
    SPECTRAL,
    (
        "torch.fft.rfft({a}.nan_to_num(0, 1, -1), n={n}, dim={d}).abs()",
        "torch.fft.fft({a}.nan_to_num(0, 1, -1), n={a}.shape[{d}], dim={d}).real * {n}",
        "torch.fft.irfft({a}.nan_to_num(0, 1, -1), n={n}, dim={d})",
    ),
)
WRITES = _lines(
    EXACT,
    (
        "{a}.clone(); OUT[-{n}:] = {m}",
        "{a}.clone(); OUT[..., -{n}:] = {m}",
        "{a}.clone(); OUT[..., :{n}] = 0",
        "{a}.clone(); OUT[..., {n}:] = {a}[..., :1]",
        "{a}.clone(); OUT[..., -{n}] = {m}",
        "{a}.clone(); OUT[{n} - 1] = {a}[0]",
        "{a}.clone(); OUT[..., -{n}:] += {m}",
        "{a}.clone(); OUT[..., -{n}:].mul_(2)",
        "{a}.clone(); OUT.movedim({d}, 0)[-{n}:].zero_()",
        "{a}.clone(); OUT.narrow({d}, {n}, {m}).fill_(1)",
        "{a}.clone(); OUT[..., torch.arange({n})] = {m}",
        "{a}.clone(); OUT.index_fill_({d}, torch.arange({n}), {m})",
        "{a}.new_zeros(*{a}.shape[:-1], {a}.shape[-1] + {n}); OUT[..., -{a}.shape[-1]:] = {a}",
        "{a}.new_zeros(*{a}.shape[:-1], {a}.shape[-1] + {n}); OUT[..., {n}:] = {a}",
        "{a}.new_zeros(2 * {a}.shape[0], *{a}.shape[1:]); OUT[-{a}.shape[0]:] = {a}",
        "{b}.new_zeros({n}, {m}); OUT[:, -1] = {n}; OUT[-1] = {m}",
        "{a}.slice_scatter({a}.narrow({d}, 0, {n}), {d}, {a}.shape[{d}] - {n})",
        "{a}.scatter({d}, torch.zeros_like({a}, dtype=torch.long) + {n}, 1)",
        "torch.zeros({n}, dtype={a}.dtype).index_add(0, torch.arange({a}.shape[0]) % {n}, {a}.reshape({a}.shape[0], -1)[:, 0])",
    ),
)
BREAKS = _lines(
    EXACT,
    (
        "{a} * 1; torch._dynamo.graph_break()",
        "{a}.flip({d}); torch._dynamo.graph_break(); OUT = OUT[-{n}:]",
        "{a}[..., -{n}:] + 0; torch._dynamo.graph_break()",
    ),
)
FAMILIES: tuple[Family, ...] = (
    *(SLICES, SLICES, SLICES, SLICES),
    *(MOVES, MOVES, MOVES, MOVES),
    *(SCALARS, SCALARS),
    *(SMOOTHS, SMOOTHS),
    *(WRITES, WRITES),
    SPECTRA,
    BREAKS,
)
