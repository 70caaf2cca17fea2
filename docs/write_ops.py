"""Prints docs/ops.md from the op table and the op sweep's results: `python -m docs.write_ops > docs/ops.md`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType, ModuleType

import torch

from benchmarks.sweep_evidence import claims
from benchmarks.sweep_record import read_records
from docs.write_evidence import write_evidence
from dynaxla.ops.registry import op_table
from dynaxla.ops.spec import OpSpec, Support
from dynaxla.ops.tables import core, data, nn, pointwise, resampling, spectral
from dynaxla.partition.support import XLA_DTYPES

_INTRODUCTION = """\
# Ops

Written by `python -m docs.write_ops > docs/ops.md` from the op table (`dynaxla/ops/tables/`), which the partition and
the importer read too, and from the results of `python -m benchmarks.ops_sweep`. Do not edit.

An op is compiled in one of two ways, which may meet in one executable: by torch-mlir's own lowering, in the dtypes in
which a sweep over PyTorch's samples found every call right, or by a function written in JAX
(`dynaxla/lowering/jax_rules/`). "eager" means that the op runs in eager PyTorch between two executables, as does a call
in a dtype that is not listed. A limit says which calls run in eager, or what a compiled call does that eager does not.

An op that is not here is rewritten to ops that are, if torch has a decomposition for it; otherwise it runs in eager,
and `dynaxla.read_metrics().fallbacks` says so.

Three kinds of values differ from eager's by XLA's nature or torch's own:

- subnormal numbers count as zero (`x > 0` is False for 1e-40), as after `torch.set_flush_denormal(True)`;
- an index out of range raises nothing: see the limits of `embedding`, `gather` and `index`;
- where eager's answer depends on the kernel that it picks for a processor or a layout (its gelu of infinity is NaN with
  oneDNN and infinity without), the compiled answer is the one that the formula gives.
"""
_DTYPE_WORDS: Mapping[str, frozenset[torch.dtype]] = MappingProxyType(
    {
        "floats": frozenset(d for d in XLA_DTYPES if d.is_floating_point),
        "complex": frozenset(d for d in XLA_DTYPES if d.is_complex),
        "integers": frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}),
    }
)
_FAMILIES: tuple[tuple[str, ModuleType], ...] = (
    ("Elementwise ops and matrix products", pointwise),
    ("Moving, choosing, ordering, reducing and creating data", data),
    ("Neural networks", nn),
    ("Resampling", resampling),
    ("Fourier transforms, linear algebra, distances", spectral),
    ("Recurrent layers, and ops of this package that rewrites introduce", core),
)


def write_ops() -> str:
    """The whole text of docs/ops.md."""
    table = op_table()
    rows = [table[row.target] for _, module in _FAMILIES for row in module.ROWS]
    records = list(read_records().values())
    verified = claims(records).verified
    sections = (line for family in _FAMILIES for line in _section(*family, verified))
    return "\n".join([_INTRODUCTION, *_legend(rows), *write_evidence(records), *sections])


def _legend(rows: Collection[OpSpec]) -> Iterator[str]:
    counts = {support: sum(row.support is support for row in rows) for support in Support}
    yield (
        f"{len(rows)} overloads: {counts[Support.LOWERED]} by torch-mlir and a JAX function, "
        f"{counts[Support.JAX]} by a JAX function alone, {counts[Support.FALLBACK]} in eager."
    )
    yield ""
    for word, dtypes in _DTYPE_WORDS.items():
        yield f"- {word}: {', '.join(_names(dtypes))}"
    yield "- all: these and bool"
    yield ""
    yield '"verified" has the dtypes in which the op was part of an executable that gave eager\'s result in the sweep.'
    yield ""


def _section(title: str, module: ModuleType, verified: Mapping[str, frozenset[str]]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    for name, rows in _groups(module):
        if name:
            yield f"### {name}"
            yield ""
        yield "| op | compiled by | dtypes | verified | limits |"
        yield "|---|---|---|---|---|"
        for row in sorted((op_table()[row.target] for row in rows), key=lambda row: str(row.target)):
            yield _line(row, frozenset(getattr(torch, dtype) for dtype in verified[str(row.target)]))
        yield ""


def _groups(module: ModuleType) -> list[tuple[str, tuple[OpSpec, ...]]]:
    """The named tuples of rows of a table module that make up its ROWS; where there are none, ROWS without a name."""
    named = {name: value for name, value in vars(module).items() if name != "ROWS" and _holds_rows(value)}
    grouped = [row.target for rows in named.values() for row in rows]
    if len(grouped) != len(module.ROWS) or set(grouped) != {row.target for row in module.ROWS}:
        return [("", module.ROWS)]
    return [(name.strip("_").replace("_", " ").capitalize(), rows) for name, rows in named.items()]


def _holds_rows(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(row, OpSpec) for row in value)


def _line(row: OpSpec, verified: frozenset[torch.dtype]) -> str:
    covered = XLA_DTYPES if row.dtypes is None else row.dtypes & XLA_DTYPES
    cells = (f"`{row.target}`", _compiled_by(row, covered), _words(covered), _words(verified), row.limits)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _compiled_by(row: OpSpec, covered: frozenset[torch.dtype]) -> str:
    if row.support is Support.LOWERED and covered <= row.lowered:
        return "torch-mlir"
    if row.support is Support.LOWERED:
        return f"torch-mlir ({_words(row.lowered & covered)}); else JAX"
    return {Support.JAX: "JAX", Support.DECOMPOSED: "decomposition", Support.FALLBACK: "eager"}[row.support]


def _words(dtypes: frozenset[torch.dtype]) -> str:
    if dtypes == XLA_DTYPES:
        return "all"
    whole = [word for word, members in _DTYPE_WORDS.items() if members <= dtypes]
    rest = dtypes - frozenset().union(*(_DTYPE_WORDS[word] for word in whole))
    return ", ".join([*whole, *_names(rest)])


def _names(dtypes: Collection[torch.dtype]) -> list[str]:
    def kind_and_size(dtype: torch.dtype) -> tuple[bool, bool, bool, int, str]:
        signed = dtype.is_floating_point or dtype.is_complex or dtype.is_signed
        return dtype.is_complex, dtype.is_floating_point, signed, dtype.itemsize, str(dtype)

    return [str(dtype).removeprefix("torch.") for dtype in sorted(dtypes, key=kind_and_size)]


if __name__ == "__main__":
    print(write_ops(), end="")
