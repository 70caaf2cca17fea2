"""The graph of one call: arrays of memories and plain numbers in, new tensors and new arrays out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from dynaxla.decompositions.decomposition_table import decomposition_table
from dynaxla.decompositions.eager_dtypes import EAGER_DTYPES, call_as_eager
from dynaxla.decompositions.eager_strides import eager_strides, memory_format_of
from dynaxla.decompositions.random_draws import random_decompositions
from dynaxla.device.op_call import DEVICE, HOST, LIST, NUMBER, PLAIN, TENSOR, OpInvocation, Part, leaf_parts
from dynaxla.device.scalar_arguments import FILLS, number_dtype
from dynaxla.device.view_layout import OverlappingView, ViewLayout, memory_order
from dynaxla.fx.permutations import invert_permutation, is_dense
from dynaxla.torch_api.fakes import FakeTensorMode, make_fake, make_uncached_mode, mode_of
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.private_device import trace_as_captured
from dynaxla.torch_api.tracing import accept_symbolic_sizes, pause_tracing, run_fake_kernel, trace_calls
from dynaxla.types import TensorSpec

aten = torch.ops.aten


class Untraceable(Exception):
    """Why a call has no graph."""


@dataclass(frozen=True, slots=True)
class TraceInputs:
    """What a call's program takes, in this order, each where there is any.

    Attributes:
        arrays: of the memories.
        starts: how many numbers say where the windows start, int64 [starts].
        numbers: for each dtype of numbers which of the call's, as a vector.
        hosts: the tensors of the host.
    """

    arrays: tuple[TensorSpec, ...]
    starts: int
    numbers: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    hosts: tuple[torch.dtype, ...]

    def examples(self, mode: FakeTensorMode) -> list[torch.Tensor]:
        """Fake tensors like them."""
        specs = [*self.arrays, *([TensorSpec((self.starts,), torch.int64)] if self.starts else ())]
        specs += [TensorSpec((len(which),), dtype) for dtype, which in self.numbers]
        specs += [TensorSpec((), dtype) for dtype in self.hosts]
        return [make_fake(mode, spec.dtype, spec.shape) for spec in specs]


@dataclass(frozen=True, slots=True)
class NumberResult:
    """A result that is a number, which the sizes of the arguments determine."""

    value: int


@dataclass(frozen=True, slots=True)
class TensorWrite:
    """A tensor that a call writes to.

    Attributes:
        tensor: which of the call's tensors of the device.
        memory: which of its memories.
        resized: whether the tensor takes the result's sizes, and a storage of its own: the output is then its value, and else
            the memory's new array.
    """

    tensor: int
    memory: int
    resized: bool


@dataclass(frozen=True, slots=True)
class TracedGraph:
    """The graph of a call. Its outputs are the results that are no parameters, then what is written.

    Attributes:
        results: of each result that is no parameter the number of its output, a `NumberResult`, a list of such, or None.
        writes: of the last outputs.
    """

    module: GraphModule
    inputs: TraceInputs
    results: tuple[Any, ...]
    writes: tuple[TensorWrite, ...]


def trace_call(call: OpInvocation) -> TracedGraph:
    """Traces a call, with torch's and this package's decompositions, as AOTAutograd would.

    Raises:
        Uncapturable: no op gives what this one writes, or it cannot be written so.
        Exception: what torch raises of such arguments.
    """
    return _captured(lambda: call, make_uncached_mode(), ())


def trace_dynamic_call(
    make: Callable[[], OpInvocation], mode: FakeTensorMode, sizes: Sequence[torch.SymInt]
) -> TracedGraph:
    """Traces a call whose sizes vary.

    Args:
        make: gives it, anew, so that what it computes of sizes is traced.
        mode: in which they vary.
        sizes: those of them that are inputs of the graph, behind all others.

    Raises:
        as `capture`.
    """
    with accept_symbolic_sizes():
        return _captured(make, mode, sizes)


def _captured(make: Callable[[], OpInvocation], mode: FakeTensorMode, sizes: Sequence[torch.SymInt]) -> TracedGraph:
    made: list[_Capturing] = []

    def outputs(*given: Any) -> list[torch.Tensor]:
        made.append(_Capturing(make()))
        return made[-1].outputs(*given[: len(given) - len(sizes)])

    with trace_as_captured(), mode:
        first = _Capturing(make())
        rewrites = {**decomposition_table(), **random_decompositions()}
        module = trace_calls(outputs, [*first.inputs.examples(mode), *sizes], rewrites)
    return TracedGraph(module, first.inputs, made[-1].results, tuple(made[-1].writes))


class _Capturing:
    """
    Raises:
        Uncapturable: no op gives what this one writes, or eager has none for such tensors.
    """

    def __init__(self, call: OpInvocation) -> None:
        if call.known.function is None:
            raise Untraceable("it writes to its arguments, and no op gives what it writes")
        self._call, self._known = call, call.known
        leaves = [leaf for part in (*call.parts, *(part for _, part in call.named)) for leaf in leaf_parts(part)]
        self._tensors: list[tuple[int, ViewLayout]] = [
            (leaf[1], leaf[2].layout) for leaf in leaves if leaf[0] == TENSOR
        ]
        self._kinds = [leaf[1] for leaf in leaves if leaf[0] == NUMBER]
        allowed = call.known.dtypes if self._kinds else None
        odd = set() if allowed is None else {layout.tensor.dtype for _, layout in self._tensors} - allowed
        if odd:
            raise Untraceable(f"dtype {', '.join(sorted(map(str, odd)))}")
        self._hosts = tuple(leaf[1] for leaf in leaves if leaf[0] == HOST)
        arrays = tuple(memory.spec for memory in call.memories)
        self.inputs = TraceInputs(arrays, len(call.starts), self._number_inputs(), self._hosts)
        self.results: tuple[Any, ...] = ()
        self.writes: list[TensorWrite] = []

    def outputs(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """What is traced."""
        self.writes = []
        rest = iter(given)
        arrays = [next(rest) for _ in self.inputs.arrays]
        starts = self._starts(next(rest) if self.inputs.starts else None)
        numbers = self._numbers([next(rest) for _ in self.inputs.numbers])
        tensors = [
            layout.read(arrays[memory], own) for (memory, layout), own in zip(self._tensors, starts, strict=True)
        ]
        made = self._called(tensors, numbers, list(rest))
        places = {name: place for name, place in self._places() if place is not None}
        written = [name for name in self._known.written if name in places]
        own = len(made) - len(written)
        if own < 0:
            raise Untraceable(f"{self._known.function} gives fewer results than {self._known.op} writes")
        outputs: list[torch.Tensor] = []
        self.results = tuple(_numbered(each, outputs) for each in made[:own])
        for name, value in zip(written, made[own:], strict=True):
            outputs.extend(self._write(places[name], value, arrays, starts))
        return outputs

    def _number_inputs(self) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        found: dict[torch.dtype, list[int]] = {}
        for place, kind in enumerate(self._kinds):
            found.setdefault(torch.int64 if kind is int else torch.float64, []).append(place)
        return tuple((dtype, tuple(places)) for dtype, places in found.items())

    def _starts(self, together: torch.Tensor | None) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        first = 0
        for _, layout in self._tensors:
            count = len(layout.grid.sizes) if layout.grid is not None and layout.grid.is_windowed else 0
            found.append(aten.slice.Tensor(together, 0, first, first + count) if count else None)
            first += count
        return found

    def _numbers(self, vectors: Sequence[torch.Tensor]) -> list[Any]:
        dtypes = [layout.tensor.dtype for _, layout in self._tensors]
        found: list[Any] = [None] * len(self._kinds)
        for vector, (_, places) in zip(vectors, self.inputs.numbers, strict=True):
            for index, place in enumerate(places):
                number = aten.select.int(vector, 0, index)
                fills = self._known.function in FILLS
                found[place] = number if fills else number.to(number_dtype(self._kinds[place], dtypes))
        return found

    def _called(self, tensors: Sequence[Any], numbers: Sequence[Any], hosts: Sequence[Any]) -> list[Any]:
        """The results of the function that writes nothing, with the dtypes and strides of eager's."""
        known = self._known
        function = known.on_tensors if known.on_tensors is not None and numbers else known.function
        assert function is not None
        assert known.function is not None
        args, kwargs = self._arguments({TENSOR: tensors, NUMBER: numbers, HOST: hosts})
        made = function(*args, **kwargs)
        has_gaps = any(_has_gaps(layout) for _, layout in self._tensors)
        if numbers or has_gaps or isinstance(known.function, OpOverload):
            # Numbers as plain ones, which take part in the choice of a dtype as numbers do.
            plain = self._arguments({TENSOR: self._strided(tensors), NUMBER: [k(1) for k in self._kinds], HOST: hosts})
            made = _match_results(made, _compute_as_eager(known.function, *plain))
        return list(made) if isinstance(made, tuple) else [made]

    def _strided(self, tensors: Sequence[Any]) -> list[Any]:
        """The tensors, those with gaps between their elements with the strides that they have for torch."""
        return [
            _like(tensor, layout.own_strides) if _has_gaps(layout) else tensor
            for tensor, (_, layout) in zip(tensors, self._tensors, strict=True)
        ]

    def _arguments(self, values: Mapping[int, Sequence[Any]]) -> tuple[list[Any], dict[str, Any]]:
        """Those of the function that writes nothing: without tensors to write to only."""
        queues = {kind: iter(each) for kind, each in values.items()}
        args = [_filled(part, queues) for part in self._call.parts]
        kwargs = {name: _filled(part, queues) for name, part in self._call.named}
        known = self._known
        outs = known.names[len(known.names) - known.outs :] if known.outs else ()
        kwargs = {name: value for name, value in kwargs.items() if name not in (*outs, "pin_memory")}
        if known.function is not known.op:  # which may have no defaults of its own
            left_out = {name: known.defaults[name] for name in known.names[len(args) :] if name in known.defaults}
            kwargs = {**left_out, **kwargs}
        return args[: len(known.names) - len(outs)], kwargs

    def _places(self) -> Iterator[tuple[str, Any]]:
        """For each parameter that is given which of the tensors it is, a list of such, or None."""
        first = 0
        for name, part in (*zip(self._known.names, self._call.parts, strict=False), *self._call.named):
            count = sum(leaf[0] == TENSOR for leaf in leaf_parts(part))
            places = list(range(first, first + count))
            first += count
            yield name, places if part is not None and part[0] == LIST else next(iter(places), None)

    def _write(self, place: Any, value: Any, arrays: list[Any], starts: list[Any]) -> list[torch.Tensor]:
        if isinstance(place, list):
            each = zip(place, value, strict=True)
            return [output for one, its in each for output in self._write(one, its, arrays, starts)]
        memory, layout = self._tensors[place]
        spec = layout.tensor
        if any(write.memory == memory for write in self.writes):
            raise Untraceable("two arguments that are written to share memory")
        is_real_in_place = value.dtype.is_floating_point and spec.dtype.is_complex and not self._known.outs  # `abs_`
        if is_real_in_place or not torch.can_cast(value.dtype, spec.dtype):
            raise Untraceable(f"result type {value.dtype} can't be cast to the desired output type {spec.dtype}")
        names_dtype = any(
            name == "dtype" for name, _ in self._call.named
        )  # of `cumsum_`, which takes its operand's alone
        if value.dtype is not spec.dtype and (self._known.outs or names_dtype):
            raise Untraceable(f"a result of {value.dtype} in a tensor of {spec.dtype}, which eager casts or refuses")
        cast = value if value.dtype is spec.dtype else value.to(spec.dtype)
        resized = tuple(value.shape) != spec.shape
        if resized and (layout.is_spread or not self._known.outs):
            raise Untraceable(f"output with shape {list(spec.shape)} doesn't match {list(value.shape)}")
        if resized and (0 not in arrays[memory].shape or [held for held, _ in self._tensors].count(memory) > 1):
            raise Untraceable("an output of other sizes keeps its memory, which other tensors may have, too")
        self.writes.append(TensorWrite(place, memory, resized))
        if resized:
            return [cast]
        try:  # an array lies row-major, however the op's results do
            return [layout.write(arrays[memory], starts[place], cast).contiguous()]
        except OverlappingView as error:
            raise Untraceable(str(error)) from error


def _filled(part: Part, queues: Mapping[int, Iterator[Any]]) -> Any:
    if part is None:
        return None
    kind = part[0]
    if kind == LIST:
        return [_filled(each, queues) for each in part[1]]
    if kind == PLAIN:
        return float(part[2]) if part[1] is float else part[2]
    return torch.device("cpu") if kind == DEVICE else next(queues[kind])


def _has_gaps(layout: ViewLayout) -> bool:
    return not layout.is_empty and not layout.has_order_of_memory


def _like(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    return make_fake(mode_of(tensor), tensor.dtype, tensor.shape, strides)


def _numbered(value: Any, outputs: list[torch.Tensor]) -> Any:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return [_numbered(each, outputs) for each in value]
    if type(value) is int:
        return NumberResult(value)
    if not isinstance(value, torch.Tensor):
        raise Untraceable(f"a result is no tensor but {type(value).__name__}")
    outputs.append(value)
    return len(outputs) - 1


def _compute_as_eager(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Fake results of a call, with the dtypes and strides of the CPU's kernels; None if torch has no fake kernel."""
    with pause_tracing():
        typed = function
        if isinstance(function, OpOverload) and function in EAGER_DTYPES:
            typed = partial(call_as_eager, function)
        results = run_fake_kernel(typed, args, kwargs)
        if function is aten.normal.Tensor_Tensor:  # of whose result torch's fake kernel promotes the dtype
            results = results.to(args[0].dtype)
        strides = None if results is None else eager_strides(function, results, args)
        if strides is None:
            return results
        if not isinstance(results, (list, tuple)):
            return _like(results, strides)
        return tuple(_like(each, strides) if each.shape == results[0].shape else each for each in results)


def _match_results(made: Any, expected: Any) -> Any:
    """Traced results with the dtypes and strides of fake ones; as they are where there is no fake one."""
    if isinstance(made, (list, tuple)):
        return type(made)(map(_match_results, made, expected)) if isinstance(expected, (list, tuple)) else made
    if not isinstance(made, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return made
    typed = made if made.dtype is expected.dtype else made.to(expected.dtype)
    return _with_strides(typed, expected)


def _with_strides(value: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    with pause_tracing():
        if value.shape != expected.shape or not is_dense(expected):
            return value
        memory_format = memory_format_of(expected)
        if memory_format is not torch.contiguous_format:  # with the strides of dims of one element, too
            expected = torch.empty_like(expected, memory_format=memory_format)
        if value.stride() == expected.stride():
            return value
        order = memory_order(expected.stride())
    return value.permute(order).contiguous().permute(invert_permutation(order))
