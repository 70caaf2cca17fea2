"""Under which key a capture is kept, beside what torch's key says of it, and why one is not kept."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterator

import torch
from torch.fx import GraphModule

from dynaxla.aot_cache.serialized_graph import kept_options
from dynaxla.bucketing.size_buckets import Policies
from dynaxla.cache.environment_key import versions
from dynaxla.cache.key import Key
from dynaxla.cache.permissions import refusal
from dynaxla.errors import PackageError
from dynaxla.graph_builder import GraphBuilder
from dynaxla.ops.table import OpTable, core_table
from dynaxla.options import Options
from dynaxla.torch_api import capture_cache
from dynaxla.torch_api.overloads import namespace

_TORCHS = frozenset("aten prims prim rngprims quantized quantized_decomposed _quantized mkldnn dynaxla".split())
"""Namespaces whose operators change with versions alone, which are a part of every key."""


def tag_to_keep(module: GraphModule, builder: GraphBuilder) -> str | None:
    """The tag of a graph of Dynamo's for torch's keys; None if its capture is not kept. Why not, where it could be, is counted.

    Raises:
        PackageError: it is captured for a package, and a policy cannot go along.
    """
    packaged = capture_cache.is_packaging()
    shared, options = builder.shared, builder.options
    wanted = options.captures or capture_cache.keeps_frames()
    stored = wanted and options.cache and shared.kept.store is not None and capture_cache.is_on()
    if not packaged and (not stored or options.executor == "eager" or options.debug.dump is not None):
        return None
    if packaged:
        why = (
            undescribed(module, _TORCHS | {"transformers"}) if options.captures else None
        )  # the engine's key has its version
    else:
        why = distrusted() or undescribed(module) or capture_cache.unknown_to_the_cache(module)
    if why is None:
        try:
            return tag_of(options, builder.policies, shared.registered.current, packaged=packaged)
        except CannotTag as error:
            why = str(error)
    if packaged:
        raise PackageError(why)
    shared.recorder.note_capture_not_kept(f"{builder.origin.what}: {why}")
    return None


def distrusted() -> str | None:
    """Why torch's folder of captures is not believed: what is read there is code."""
    folder = capture_cache.folder()
    try:
        return refusal(folder, read_only=False, variable=capture_cache.FOLDER_VARIABLE)
    except OSError as error:
        return f"{folder} is not used: {error.strerror}"


def undescribed(module: GraphModule, known: Collection[str] = _TORCHS) -> str | None:
    """What a graph of Dynamo's depends on that no key says.

    Args:
        known: namespaces of which the key has the version.
    """
    for inner in module.modules():
        for node in inner.graph.nodes if isinstance(inner, GraphModule) else ():
            if (space := namespace(node.target)) is not None and space not in known:
                return f"{node.target} is the user's: no key says what its formulas are"
    held = capture_cache.held_tensor(module)
    if held is not None:
        return f"the graph holds the tensor {held}: torch's key says nothing of its values"
    return None


def tag_of(options: Options, policies: Policies, table: OpTable, *, packaged: bool) -> str:
    """All that what this package makes of a graph depends on, and torch's key does not know.

    Args:
        packaged: whether programs go along.

    Raises:
        CannotTag: an option or a policy cannot be pickled, so that nothing says which one it is.
    """
    try:
        chosen = pickle.dumps((kept_options(options), policies), protocol=5)
    except Exception as error:  # of a class of the user's, which may raise anything
        raise CannotTag(f"a policy cannot be pickled: {type(error).__name__}: {error}") from error
    return Key.of(backend="dynaxla", packaged=packaged, chosen=chosen, **process_parts(table)).digest


def process_parts(table: OpTable) -> dict[str, object]:
    """Parts of a key that say what the process adds to a capture: ops that were registered, torch's settings, versions."""
    own = core_table().records
    return {
        "registered": sorted(str(op) for op, record in table.records.items() if own.get(op) is not record),
        "settings": tuple(_settings()),
        "versions": versions(),
    }


class CannotTag(Exception):
    """Nothing names what is chosen; the text says why."""


def _settings() -> Iterator[str]:
    """torch's settings that decide which ops a function is made of, or of what dtype."""
    yield str(torch.get_default_dtype())
    yield str(torch.get_default_device())
    yield str(torch.is_inference_mode_enabled())
    yield str(torch.backends.mkldnn.enabled)
    yield str(torch.backends.mha.get_fastpath_enabled())
    cuda = torch.backends.cuda
    yield str(
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled())
    )
