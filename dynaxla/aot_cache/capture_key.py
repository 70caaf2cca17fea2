"""The key of a stored capture, beside what torch's key has, and why a capture is not stored."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from dynaxla.bucketing.size_buckets import SymbolPolicies
from dynaxla.cache.environment_key import Environment, versions
from dynaxla.cache.kinds import CAPTURE
from dynaxla.cache.permissions import find_distrust_of
from dynaxla.errors import PackageError
from dynaxla.graph_builder import GraphBuilder
from dynaxla.ops.table import OpTable, core_table
from dynaxla.options import Options
from dynaxla.torch_api import capture_cache
from dynaxla.torch_api.capture_state import find_replaced_formula, read_floats
from dynaxla.torch_api.fakes import get_view_base, memory_of
from dynaxla.torch_api.input_memory import InputMemory
from dynaxla.torch_api.overloads import namespace

_TORCHS = frozenset("aten prims prim rngprims quantized quantized_decomposed _quantized mkldnn dynaxla".split())
"""Namespaces whose operators change with versions alone, which are a part of every key."""


def find_tag(
    module: GraphModule,
    builder: GraphBuilder,
    inputs: Sequence[Any],
    placement: str = "",
    memory: InputMemory | None = None,
) -> str | None:
    """The tag of a graph of Dynamo's for torch's keys; None if its capture is not kept. Why not, where it could be, is counted.

    Args:
        inputs: its inputs, as Dynamo hands them over.
        placement: which of them are on a mesh.
        memory: what the capture takes for granted of where they lie.

    Raises:
        PackageError: it is captured for a package, and a policy cannot go along.
    """
    packaged = capture_cache.is_packaging()
    shared, options = builder.shared, builder.options
    wanted = options.captures or capture_cache.is_precompile_cached()
    stored = wanted and options.cache and shared.executables.store is not None and capture_cache.is_on()
    if not packaged and (not stored or options.executor == "eager" or options.debug.dump is not None):
        return None
    if packaged:
        why = (
            find_unkeyed(module, _TORCHS | {"transformers"}) if options.package == "captures" else None
        )  # the engine's key has its version
    else:
        why = (
            find_distrust()
            or find_unkeyed(module)
            or find_unkeyed_formulas(inputs)
            or capture_cache.find_bypass_reason(module)
        )
    if why is None:
        try:
            known = shared.registered.current
            places = [str(inputs[i].storage_offset()) for i in (() if memory is None else memory.placed)]
            given = f"{placement} {describe_inputs(inputs)} {places} {read_floats()}"
            return capture_tag(options, builder.policies, known, packaged=packaged, inputs=given)
        except CannotTag as error:
            why = str(error)
    if packaged:
        raise PackageError(why)
    shared.recorder.note(captures_not_kept=f"{builder.origin.what}: {why}")
    return None


def find_distrust() -> str | None:
    """Why torch's folder of captures is not used: what is read there is code, and torch warns of what it cannot write there."""
    folder = capture_cache.folder()
    try:
        told = find_distrust_of(folder, read_only=False, variable=capture_cache.FOLDER_VARIABLE)
    except OSError as error:
        return f"{folder} is not used: {error.strerror}"
    return told or (None if os.access(folder, os.W_OK) else f"{folder} is not used: it cannot be written to")


def find_unkeyed(module: GraphModule, known: Collection[str] = _TORCHS) -> str | None:
    """What a graph of Dynamo's depends on that no key says.

    Args:
        known: namespaces of which the key has the version.
    """
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
            if (space := namespace(node.target)) is not None and space not in known:
                return f"{node.target} is the user's: no key says what its formulas are"
    held = capture_cache.find_tensor_attribute(module)
    if held is not None:
        return f"the graph holds the tensor {held}: torch's key says nothing of its values"
    return None


def find_unkeyed_formulas(inputs: Sequence[Any]) -> str | None:
    """What AOTAutograd would trace and no key says: a tensor class of the user's, or the user's kernel of an op of torch's; and
    jagged tensors, for whose ragged sizes torch has no key."""
    made_of_others = [tensor for value in inputs for tensor in _subclassed(value)]
    if any(tensor.is_nested for tensor in made_of_others):
        return "an input is a jagged tensor: torch has no key for its ragged size"
    for kind in set(map(type, made_of_others)):
        if kind.__module__.partition(".")[0] != "torch":
            return f"an input is of {kind.__module__}.{kind.__qualname__}: no key says what it computes"
    replaced = find_replaced_formula()
    return None if replaced is None else f"{replaced} computes what the user says: no key says what that is"


def describe_inputs(inputs: Sequence[Any]) -> str:
    """What torch's key lacks of inputs: classes of tensor subclasses, which inputs share memory, where in it they begin, and of
    what they are views."""
    classes = [type(tensor).__qualname__ for value in inputs for tensor in _subclassed(value)]
    plain = {i: value for i, value in enumerate(inputs) if isinstance(value, torch.Tensor) and not _inner(value)}
    memories = {i: memory_of(value) for i, value in plain.items() if value.layout is torch.strided}
    users = Counter(memories.values())
    shared = {i: (memory, id(get_view_base(plain[i]))) for i, memory in memories.items() if users[memory] > 1}
    numbers = {identity: i for i, pair in reversed(shared.items()) for identity in pair}
    views = [(i, plain[i].storage_offset(), *(numbers[identity] for identity in pair)) for i, pair in shared.items()]
    return repr((classes, views))


def _subclassed(value: Any) -> Iterator[torch.Tensor]:
    """A tensor that is made of others, and those of these that are."""
    if inner := _inner(value):
        yield value
        for tensor in inner:
            yield from _subclassed(tensor)


def _inner(value: Any) -> list[torch.Tensor]:
    """The tensors that a tensor is made of: none where it is of no subclass."""
    if not isinstance(value, torch.Tensor) or not hasattr(value, "__tensor_flatten__"):
        return []
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]]


def capture_tag(options: Options, policies: SymbolPolicies, table: OpTable, *, packaged: bool, inputs: str = "") -> str:
    """The digest of all that a capture depends on and torch's key does not have.

    Args:
        packaged: whether programs go along.
        inputs: what torch's key has not of the inputs.

    Raises:
        CannotTag: an option or a policy cannot be pickled, so that nothing says which one it is.
    """
    try:
        buckets = pickle.dumps(policies, protocol=5)
        parts: dict[str, object] = {"packaged": packaged, "policies": buckets, "registered": registered_ops(table)}
        return CAPTURE.key(options, capture_environment(), inputs=inputs, **parts).digest
    except Exception as error:  # of a class of the user's, which may raise anything
        raise CannotTag(f"a policy cannot be pickled: {type(error).__name__}: {error}") from error


def registered_ops(table: OpTable) -> list[str]:
    """The ops whose records are not this package's: the user's, by name."""
    own = core_table()
    if table is own:
        return []  # and no record is read
    return sorted(str(op) for op, record in table.records.items() if own.records.get(op) is not record)


def capture_environment() -> Environment:
    """What a capture depends on in this process: it is of no device."""
    return Environment({}, {}, versions())


class CannotTag(Exception):
    """No key says which policy it is; the text says why."""
