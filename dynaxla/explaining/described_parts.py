"""What is said of the compiled parts of a process: who lowers their ops, what is folded, masked and donated, and memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import Graph, Node

from dynaxla.bucketing.padded_graph import CannotPad
from dynaxla.diagnostics import user_frame
from dynaxla.fx.graph_utils import list_subgraphs
from dynaxla.lowering.function_cache import is_own
from dynaxla.lowering.locations import LocatedNode, locate
from dynaxla.observe.compile_timing import CompileTiming
from dynaxla.programs.counted_calls import describe_bucket
from dynaxla.programs.donation import describe_value
from dynaxla.programs.part_programs import PartPrograms
from dynaxla.programs.program import Program
from dynaxla.programs.specialization import ArgumentSpec, BucketSpec, ExactSpec, empty_arguments
from dynaxla.runtime.executable_info import MemoryUse
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.symbols import example, varies
from dynaxla.types import MODULE_PATH, NOT_DONATED, ORIGIN, TensorSpec

ATTENTIONS = ("attention.default", "_scaled_dot_product_flash_attention_for_cpu.default")
_MEMORY = ("arguments", "outputs", "temporaries", "code", "aliased", "peak")
Lowerer = Literal["torch-mlir", "JAX body", "your lowering", "eager"]


@dataclass(frozen=True, slots=True)
class LoweredOp:
    """Calls of one op from one line, and who lowers them.

    Attributes:
        op: the overload.
        lowered_by: a call that torch-mlir or a JAX body lowers is compiled; one of eager is not.
        stands_for: the op that the line called, where a decomposition or a pass made this one of it; "" elsewhere.
        where: the user's line; "" where there is none.
        calls: how many, in one program.
    """

    op: str
    lowered_by: Lowerer
    stands_for: str
    where: str
    calls: int = 1

    def __str__(self) -> str:
        made = "rewritten" if self.op.startswith("dynaxla.") else "decomposed"
        of = f" ({made} from {self.stands_for})" if self.stands_for else ""
        return f"{self.op}{of}: {self.lowered_by}, {_count(self.calls, 'call')}{_at(self.where)}"


@dataclass(frozen=True, slots=True)
class OpWork:
    """What calls of an op from one line of one module have to do, by their sizes in one program, in one turn of a loop.

    Attributes:
        op: its short name, "addmm".
        module: the path of the user's module; "" where there is none.
        place: file and line of the user; "" where there is none.
        flops: multiplications and additions of products, convolutions and attentions; 0 for other ops.
        nbytes: of operands and results. XLA reads and writes less where it fuses calls.
    """

    op: str
    module: str
    place: str
    flops: int = 0
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class MaskedOp:
    """Calls from one line before which padding is set to a number.

    Attributes:
        op: the overload that would else read the padding.
        fill: the number.
        where: the user's line; "" where there is none.
        masks: how many, in one program.
    """

    op: str
    fill: str
    where: str
    masks: int = 1

    def __str__(self) -> str:
        return f"{self.op}: padding is {self.fill}, {_count(self.masks, 'mask')}{_at(self.where)}"


@dataclass(frozen=True, slots=True)
class FoldedValue:
    """A value that depends on weights and constants alone, computed once per weight version.

    Attributes:
        ops: the overloads that compute it, in order.
        value: its dtype and sizes.
        nbytes: of memory that it keeps.
        where: the user's line, or module, of the last of these ops that has one.
    """

    ops: tuple[str, ...]
    value: str
    nbytes: int
    where: str

    def __str__(self) -> str:
        return f"{self.value}, {write_bytes(self.nbytes)}, by {', '.join(self.ops)}{_at(self.where)}"


@dataclass(frozen=True, slots=True)
class DescribedProgram:
    """A program that is loaded.

    Attributes:
        bucket: its sizes, "8x128"; "exact 5x7" where sizes are not padded, "fixed" where none varies, "weights" of a fold.
        memory: what it needs on the device; None where it computes nothing.
        flops, accessed_bytes: by XLA's cost analysis; 0 where it has none.
        donated: the arguments whose memory it takes for their new values: dtype, sizes, and the line that writes.
        kept: those whose memory it could take but for their sizes or layout, and why.
    """

    bucket: str
    memory: MemoryUse | None
    flops: float
    accessed_bytes: float
    donated: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.memory is None:
            return f"{self.bucket}: nothing to compute"
        used = {name: getattr(self.memory, f"{name}_bytes") for name in _MEMORY}
        told = ", ".join(f"{name} {write_bytes(size)}" for name, size in used.items() if size)
        return f"{self.bucket}: {told or 'the platform does not say'}"


@dataclass(frozen=True, slots=True)
class DescribedPart:
    """A compiled part of a captured graph.

    Attributes:
        function: the user's function.
        is_backward: whether it is of a backward.
        programs: those that are loaded, that of the fold included.
        folded: what is computed once per weight version; the constants of the graph are among its sources.
        constants_bytes: of the tensors that the graph holds.
        kept: inputs that the graph writes to and whose memory no program takes: dtype, sizes, why, and the line that writes.
        lowered, work: at the sizes of one program, folds included; empty unless they were asked for.
        masked: of every bucket; empty unless they were asked for.
    """

    function: str
    is_backward: bool
    programs: tuple[DescribedProgram, ...]
    folded: tuple[FoldedValue, ...] = ()
    constants_bytes: int = 0
    kept: tuple[str, ...] = ()
    lowered: tuple[LoweredOp, ...] = ()
    work: tuple[OpWork, ...] = ()
    masked: tuple[MaskedOp, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.function}, backward" if self.is_backward else self.function


def describe_parts(parts: Iterable[PartPrograms], *, in_full: bool) -> list[DescribedPart]:
    """Describes parts.

    Args:
        in_full: reads the graphs of parts that were found on disk too, and says who lowers ops and what is masked.
    """
    return [_describe(part, in_full) for part in parts]


def _describe(part: PartPrograms, in_full: bool) -> DescribedPart:
    compiler = part.compiler
    graphs, pipeline = compiler.graphs, compiler.pipeline
    is_read = in_full or not graphs.are_known
    made = [(key, program) for key in list(part) if (program := part.get(key)) is not None]
    programs = [_describe_program(part, describe_bucket(part.keys, key), program, is_read) for key, program in made]
    if compiler.fold is not None:
        programs.append(_measure("weights", compiler.fold))
    found = DescribedPart(pipeline.origin.what, graphs.saved.inputs, tuple(programs))
    if not is_read:
        return found
    with pipeline.tracing:
        held = sum(constant.nbytes for constant in graphs.constants)
        kept = [why for node in graphs.graph.find_nodes(op="placeholder") if (why := node.meta.get(NOT_DONATED))]
        found = replace(found, folded=tuple(_list_folded(graphs.fold)), constants_bytes=held, kept=tuple(kept))
        if not in_full or not made:
            return found
        lowered, work = _list_calls(part)
        return replace(found, lowered=lowered, work=work, masked=tuple(_list_masked(part)))


def _describe_program(part: PartPrograms, bucket: str, program: Program, is_read: bool) -> DescribedProgram:
    if program.executable is None:
        return DescribedProgram(bucket, None, 0.0, 0.0)
    measured, facts = _measure(bucket, program.executable), part.compiler.graphs.facts
    if not facts.donations or not is_read:
        return measured
    inputs, output = part.compiler.graphs.graph.find_nodes(op="placeholder"), part.compiler.graphs.graph.output_node()
    results: Any = output.args[0] if isinstance(output.args[0], (tuple, list)) else output.args
    taken, donated, kept = {each.position for each in program.donated}, [], []
    for number, place in facts.donations.items():
        position = facts.free[facts.free_tensors[number]]
        value, line = describe_value(inputs[position]), _at(user_frame(results[place]) or "")
        if position in taken:
            donated.append(f"{value}{line}")
        else:
            kept.append(f"{value}: in {bucket} its new value has another dtype, layout or padded size{line}")
    return replace(measured, donated=tuple(donated), kept=tuple(kept))


def _measure(bucket: str, executable: Any) -> DescribedProgram:
    cost = executable.cost()
    flops, accessed = (max(cost.get(name, 0.0), 0.0) for name in ("flops", "bytes accessed"))
    return DescribedProgram(bucket, executable.memory_use(), flops, accessed)


def _list_folded(fold: Graph | None) -> Iterator[FoldedValue]:
    if fold is None:
        return
    for value in fold.output_node().all_input_nodes:
        sources, ops = [value], []
        for node in sources:
            sources += [each for each in node.all_input_nodes if each not in sources]
        for node in fold.nodes:
            if node in sources and node.op == "call_function":
                ops.append(node)
        where = next(filter(None, map(_place, reversed(ops))), "")
        yield FoldedValue(tuple(str(o.target) for o in ops), describe_value(value), _count_bytes(value, ()), where)


def _list_calls(part: PartPrograms) -> tuple[tuple[LoweredOp, ...], tuple[OpWork, ...]]:
    """The calls of one program and of the fold: who lowers them, and their work; equal ones from one line together."""
    graphs, pipeline = part.compiler.graphs, part.compiler.pipeline
    table = pipeline.choice.table
    lowered: dict[Any, LoweredOp] = {}
    work: dict[Any, OpWork] = {}
    for static, source in ((_specialize_one(part), graphs.main), (graphs.specialize_fold(), graphs.fold)):
        origins = {} if source is None else {node.name: node for node in source.nodes}
        for located in () if static is None else _locate_ops(static):
            node, line = located.node, located.line
            op: Any = node.target
            by: Lowerer = "torch-mlir"
            if node.graph is not static or not pipeline.choice.offers(node):  # bodies lower all of a sub-graph
                by = "JAX body" if is_own(op, table.bodies.get(op)) else "your lowering"
            key = (str(op), by, _replaced(node, origins), _place(node))
            same = lowered.get(key, LoweredOp(*key, calls=0))
            lowered[key] = replace(same, calls=same.calls + 1)
            at = (located.op, located.module, f"{line.file}:{line.line}" if line else "")
            if node.graph is not static and any(map(varies, _list_tensors(node))):
                continue
            spent = work.get(at, OpWork(*at))
            flops, nbytes = (
                spent.flops + int(count_flops(node)),
                spent.nbytes + _count_bytes(node, node.all_input_nodes),
            )
            work[at] = replace(spent, flops=flops, nbytes=nbytes)
    return tuple(lowered.values()), tuple(work.values())


def _locate_ops(static: Graph) -> Iterator[LocatedNode]:
    """The calls of ops in a static graph; in the place of a loop or a branch, those of its sub-graphs."""
    for node in static.nodes:
        for located in locate(node, 0) if node.op == "call_function" else ():
            if isinstance(located.node.target, OpOverload) and not list_subgraphs(located.node):
                yield located


def _replaced(node: Node, origins: dict[str, Node]) -> str:
    """The op that the user's line called, where that is another one."""
    origin = origins.get(node.meta.get(ORIGIN, ""))
    called = None if origin is None else origin.meta.get("original_aten")
    return "" if called is None or str(called) == str(node.target) else str(called)


def _specialize_one(part: PartPrograms) -> Graph:
    """The graph of one of the part's programs; where all are of exact sizes, that of the sizes at the capture."""
    compiler = part.compiler
    specs = [spec for key in list(part) if isinstance(spec := part.spec_of(key, ()), BucketSpec)]
    spec = specs[0] if specs else ExactSpec(_captured_arguments(part))
    return compiler.specialize(spec, CompileTiming())[0].graph


def _captured_arguments(part: PartPrograms) -> list[Any]:
    """Tensors without memory, of the sizes that the part's arguments had when the graph was captured."""
    graphs = part.compiler.graphs
    if not graphs.sizes:
        return []
    values = [node.meta["val"] for node in graphs.graph.find_nodes(op="placeholder")]
    return empty_arguments([_at_capture(value) for value in values])


def _at_capture(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return example(value)
    sizes, strides = (tuple(map(example, each)) for each in (value.shape, value.stride()))
    return ArgumentSpec(sizes, strides, value.dtype, value.device)


def _list_masked(part: PartPrograms) -> Iterator[MaskedOp]:
    """The masks of every bucket; equal ones from one line together."""
    found: dict[tuple[str, str, str], int] = {}
    for key in list(part):
        spec = part.spec_of(key, ())
        if not isinstance(spec, BucketSpec):
            continue
        try:
            masks = part.compiler.graphs.pad_symbolic(spec.buckets).masks
        except CannotPad:
            continue
        here = [(mask.op, str(mask.fill), mask.frame or "") for mask in masks]
        found |= {each: max(here.count(each), found.get(each, 0)) for each in here}
    yield from (MaskedOp(*key, masks=count) for key, count in found.items())


def count_flops(node: Node) -> int:
    """Multiplications and additions of a product, a convolution or an attention of fixed sizes; 0 for any other op."""
    _, _, name = str(node.target).partition(".")
    given = [n for n in node.args if not isinstance(n, list)]
    sizes: list[tuple[int, ...]] = [tuple(n.meta["val"].shape) if isinstance(n, Node) else () for n in given]
    result: tuple[int, ...] = next((tuple(tensor.shape) for tensor in _tensors(node.meta["val"])), ())
    if name in ("mm.default", "bmm.default", "linear.default"):
        return 2 * math.prod(result) * sizes[0][-1]
    if name in ("addmm.default", "baddbmm.default"):
        return 2 * math.prod(result) * sizes[1][-1]
    if name == "convolution_channels_last.default":
        return 2 * math.prod(result) * math.prod(sizes[1][:-1])
    if name == "convolution.default":
        return 2 * math.prod(sizes[0] if node.args[6] else result) * math.prod(sizes[1][1:])
    if name in ATTENTIONS:
        query, key, value = sizes[:3]
        return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return 0


def _count_bytes(node: Node, operands: Iterable[Node]) -> int:
    """Of a call's results, and of these operands."""
    values = [value for each in (*operands, node) for value in _tensors(each.meta.get("val"))]
    return sum(int(TensorSpec.from_tensor(value).nbytes) for value in values)  # a size may be a symbol that guards fix


def _list_tensors(node: Node) -> list[torch.Tensor]:
    """A call's operands and results."""
    return [value for each in (*node.all_input_nodes, node) for value in _tensors(each.meta.get("val"))]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in (value if isinstance(value, (tuple, list)) else (value,)) if isinstance(v, torch.Tensor)]


def _place(node: Node) -> str:
    """The user's line of a node; the path of its module where the user's code has none."""
    path = node.meta.get(MODULE_PATH, "")
    return user_frame(node) or (f"module {path}" if path else "")


def _at(line: str) -> str:
    return f"; at {line}" if line else ""


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def write_bytes(number: float) -> str:
    """A number of bytes for people, "1.5 MiB"."""
    power = min(int(math.log2(number)) // 10, 4) if number >= 1 else 0
    return f"{number:.0f} B" if power == 0 else f"{number / 1024**power:.1f} {'KMGT'[power - 1]}iB"
