"""Prints docs/ops.md from the records of ops and the op sweep's results: `python -m docs.write_ops > docs/ops.md`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType, ModuleType

import torch

from conformance.mlir_findings import judged
from conformance.mlir_record import DECOMPOSED, DIRECT, FORM, in_way, read
from conformance.sweep_evidence import claims
from conformance.sweep_record import read_records
from docs.write_evidence import write_evidence
from dynaxla.ops.aten_calls import decompose
from dynaxla.ops.dtypes import COMPLEX, FLOAT8, FLOATS, INTEGERS_WITHOUT_BOOL, XLA_DTYPES
from dynaxla.ops.record import Record
from dynaxla.ops.table import families

_INTRODUCTION = """\
# Ops

Written by `python -m docs.write_ops > docs/ops.md` from the records of ops (`dynaxla/ops/`), which the partition and
the importer read too, and from the results of `python -m conformance.ops_sweep`. Do not edit.

An op is compiled in one of two ways, which may meet in one executable: by torch-mlir's own lowering, in the dtypes in
which a sweep over PyTorch's samples found every call right, or by its body, a function written in JAX beside its record.
"eager" means that the op runs in eager PyTorch between two executables, as does a call
in a dtype that is not listed. A limit says which calls run in eager, or what a compiled call does that eager does not.

An op that is not here is rewritten to ops that are, if torch has a decomposition for it; otherwise it runs in eager,
and `dynaxla.read_metrics().fallbacks` says so.

Values differ from eager's by XLA's nature or torch's own:

- subnormal numbers count as zero (`x > 0` is False for 1e-40), as after `torch.set_flush_denormal(True)`;
- NaN, infinities and numbers out of range become the integers that x86 makes of them, as in eager, in programs for the CPU;
  elsewhere 0 and the nearest integers;
- an index out of range raises on the CPU alone ("Indices out of range" below);
- where eager's answer depends on the kernel that it picks for a processor or a layout (its gelu of infinity is NaN with
  oneDNN and infinity without), the compiled answer is the one that the formula gives.
"""
_INDICES = """\
## Indices out of range

Eager raises where an index is out of range, and for some other values. An XLA program cannot raise: a compiled graph has
assertions of such values, of which a program returns the number of the first that fails, and the call raises before it returns.

- `x[index]`, `index_put`, `index_fill`, `take`, `put`: for an index below minus the size, or not below the size;
- `embedding`, `embedding_bag`, `index_select`, `index_add`, `index_copy`, `index_reduce`, `gather`, `scatter` and its kin: for one below 0, or
  not below the size;
- `nll_loss`, `cross_entropy`, `multi_margin_loss`, `multilabel_margin_loss`, `one_hot`: for a target that is no class;
- `embedding_bag`: for a first bag that does not begin at 0, one that begins before the bag in front of it, or behind the indices;
- `max_unpool1d` to `max_unpool3d`: for an index outside of the output;
- `masked_fill`, `index_fill` with a tensor of no dims: for a number that the dtype does not hold;
- `//`, `%`, `fmod` of whole numbers: for a zero in the tensor that divides, or a zero number where it varies; `**` of them: for a negative number that varies;
- `binary_cross_entropy`: for an input or a target that is not from 0 to 1, or NaN;
- `masked_scatter`: for a source with too few elements; `segment_reduce`: for lengths that are negative, or do not sum to the size;
- `histc` without ends: for values that are not finite;
- `bernoulli` of probabilities that are not from 0 to 1, `multinomial` of weights that are negative, not finite or all zero, `normal` of negative
  deviations.

The error is a RuntimeError, or `IndexOutOfRange`, which is both an IndexError and a RuntimeError; it names the op and the user's line. Raising
waits for the program, so this is the default where the results are the host's own anyway: on the CPU, for tensors of the host.
`options={"value_checks": True}` has it on every device, where each call then waits for its results, `False` nowhere. A call with
such ops takes some 20 us longer, a first one 0.05 to 0.4 s, and indices are read once more, in one thread
(`python -m benchmarks.value_check_cost`; two idle cores with AVX2, one run, ratios to the call without checks): a `gather` of
20,000 x 64 1.5, `scatter_add` 1.4, `index_add` of 20,000 rows of 64 1.15, `index_select` of them 1.1 to 1.8, `//` of 100,000 numbers 1.26, `cross_entropy` of 512 x 1000 1.

Without these checks, and in branches and loops, whose ops are not looked at,

- `embedding` and `embedding_bag` give NaN for the row, and negative indices are out of range, as in eager;
- reads (`gather`, `x[index]`, `index_select`, `take`) give some element of the tensor: a plausible number;
- writes (`scatter`, `index_put`, `index_add`, `put` and the like) leave the element out;
- `nll_loss` and `cross_entropy` count the target as ignored;
- `one_hot` compares its classes with their number, and raises as eager does;
- whole numbers that a tensor's zero divides are some number, `binary_cross_entropy` is NaN for inputs outside of 0 to 1 and its formula for
  such targets, and a first bag of `embedding_bag` that does not begin at 0 does so;
- draws are NaN for such probabilities and deviations, and -2^63 (`multinomial`) for such weights.

Eager ops of a graph and single ops on the device (docs/device.md) raise
eager's own error.
"""
_WORDS: Mapping[str, str] = MappingProxyType(
    {
        "right": "right",
        "wrong": "wrong",
        "rounds": "farther from eager than the body, in 16 bits",
        "slower": "right, but slower than the body on the CPU",
        "crashes": "the process dies, or never ends",
        "none": "no lowering of some call, or too few calls to tell",
    }
)
_WAYS: Mapping[str, str] = MappingProxyType(
    {
        DIRECT: "as it is",
        FORM: "as other ATen calls (`dynaxla/ops/aten_forms.py`)",
        DECOMPOSED: "through torch's decomposition, where it is not right as it is",
    }
)
_DTYPE_WORDS: Mapping[str, frozenset[torch.dtype]] = MappingProxyType(
    {"floats": FLOATS, "complex": COMPLEX, "integers": INTEGERS_WITHOUT_BOOL}
)


def write_ops() -> str:
    """The whole text of docs/ops.md."""
    known = [(*_title(module), records) for module, records in families()]
    sweep = list(read_records().values())
    verified = claims(sweep).verified
    sections = (line for title, about, records in known for line in _section(title, about, records, verified))
    legend = _legend([record for *_, records in known for record in records])
    return "\n".join([_INTRODUCTION, *legend, _INDICES, *write_evidence(sweep), *sections])


def _title(module: ModuleType) -> tuple[str, str]:
    """The name of a family's file in words, and the first line of its docstring."""
    name = module.__name__.rpartition(".")[2].replace("_", " ").capitalize()
    return name, (module.__doc__ or "").partition("\n")[0]


def _legend(records: Collection[Record]) -> Iterator[str]:
    lowered = sum(bool(record.lowered) for record in records)
    yield f"{len(records)} overloads: {lowered} by torch-mlir and a body, {len(records) - lowered} by a body alone."
    yield "What came of offering them to torch-mlir, each in every dtype in which there are calls of it (pairs of the two):"
    yield ""
    yield from _verdicts(records)
    yield ""
    for word, dtypes in _DTYPE_WORDS.items():
        yield f"- {word}: {', '.join(_names(dtypes))}"
    yield "- all: these and bool"
    yield f"- float8: {', '.join(_names(FLOAT8))}, which the sweep leaves out, and torch-mlir is not given"
    yield ""
    yield '"verified" has the dtypes in which the op was part of an executable that gave eager\'s result in the sweep.'
    yield ""


def _verdicts(records: Collection[Record]) -> Iterator[str]:
    """The counts of the sweep's lines, for each way in which ops were offered."""
    found = read()
    lines = [line for record in records for line in judged(found.get(str(record.target), []))]
    yield f"| offered | overloads | with their dtypes | {' | '.join(_WORDS.values())} |"
    yield "|---" * (len(_WORDS) + 3) + "|"
    for way, words in _WAYS.items():
        some = in_way(lines, way)
        counts = [len({line.overload for line in some}), len(some)]
        counts += [sum(line.verdict == verdict for line in some) for verdict in _WORDS]
        yield f"| {words} | {' | '.join(map(str, counts))} |"
    yield ""
    taken = sum(record.as_aten is decompose for record in records)
    forms = sum(record.as_aten is not None for record in records) - taken
    yield f"Taken as other ATen calls: {forms} overloads; through torch's decomposition: {taken}."


def _section(
    title: str, about: str, records: Sequence[Record], verified: Mapping[str, frozenset[str]]
) -> Iterator[str]:
    yield from (f"## {title}", "", about, "")
    yield "| op | compiled by | dtypes | verified | limits |"
    yield "|---|---|---|---|---|"
    for record in sorted(records, key=lambda record: str(record.target)):
        yield _line(record, frozenset(getattr(torch, dtype) for dtype in verified[str(record.target)]))
    yield ""


def _line(record: Record, verified: frozenset[torch.dtype]) -> str:
    covered = XLA_DTYPES if record.dtypes is None else record.dtypes & XLA_DTYPES
    dtypes = _words(covered) + ", float8" * (record.dtypes is not None and record.dtypes >= FLOAT8)
    cells = (f"`{record.target}`", _compiled_by(record, covered), dtypes, _words(verified), record.limits)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _compiled_by(record: Record, covered: frozenset[torch.dtype]) -> str:
    if covered <= record.lowered:
        return "torch-mlir"
    return f"torch-mlir ({_words(record.lowered & covered)}); else JAX" if record.lowered else "JAX"


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
