"""AOTAutograd's cache: the entry that it stores for a capture, its key, and its settings.

Relies on `torch._functorch` and `torch._inductor.output_code` (since torch 2.9). The cache takes an `OutputCode` from a
compiler and pickles it with its own record of the capture. Its key covers Dynamo's graph and torch's settings, but no
backend: `cache_key_tag` tells backends apart.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo import config as _dynamo_config
from torch._functorch import config as _functorch_config
from torch._functorch._aot_autograd import autograd_cache, graph_compile
from torch._functorch._aot_autograd.autograd_cache import (
    AOTAutogradCache,
    AOTAutogradCacheDetails,
    BypassAOTAutogradCache,
    FXGraphCacheMiss,
    check_cacheable,
)
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler, ViewAndMutationMeta
from torch._guards import TracingContext
from torch._inductor import config as _inductor_config
from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache
from torch._inductor.output_code import OutputCode
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._library.opaque_object import is_opaque_reference_type
from torch.compiler import config as _compiler_config
from torch.fx import GraphModule

from dynaxla.torch_api.dynamo import compile_lock

FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_HANDED_DOWN = "dynaxla_handed_down"

_OF_AUTOCAST = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")

NotCacheable = BypassAOTAutogradCache
"""Raised by `CachedCode.prepare_for_serialization`: the capture is not stored."""

NotUsable = FXGraphCacheMiss
"""Raised by `CachedCode.post_compile`: torch takes the entry for one that it has not found, captures, and stores that."""

_KEY_PREFIX = "dynaxla-"
"""Of the keys of this package's captures, which are the names of their folders: torch's begin with its own."""


@dataclass
class CachedCode(OutputCode):
    """A compiler's result for AOTAutograd's cache: the function that runs the graph, and its serialized form.

    Relies on how `BundledAOTAutogradResult` uses an `OutputCode`: it calls `prepare_for_serialization` on a shallow copy and
    pickles the copy; after loading it calls `post_compile` before the first run. Relies also on `_boxed_call` in the object's
    own `__dict__`, which wrappers copy.

    Attributes:
        content: serialized form from which another process restores the function; None if the graph cannot be stored.
        function: runs the graph; takes one list of arguments.
    """

    content: bytes | None
    function: Callable[[list[Any]], list[Any]] | None

    def __post_init__(self) -> None:
        self._boxed_call = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.function(inputs)  # type: ignore[misc, arg-type]

    def prepare_for_serialization(self) -> None:
        if self.content is None:
            raise NotCacheable("what dynaxla made of the graph cannot be kept")
        self.function = None

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Does nothing: there is no Triton bundle."""


def make_cacheable_compiler(code: type[CachedCode], compiler: Callable[..., CachedCode]) -> Any:
    """Wraps a compiler so that AOTAutograd stores its results. Relies on `SerializableAOTDispatchCompiler`.

    Make a new one for each graph: torch wraps the compiler of the backward in place.
    """
    return SerializableAOTDispatchCompiler(code, compiler)


@dataclass(slots=True)
class Lookup:
    """One look-up of a capture, of whose key there may be several entries, for sizes that other guards hold for.

    Attributes:
        folder: the key's folder, which need not exist; None before the look-up.
        entry: the entry that torch read last, which is the one that it takes if it takes any; None before there is one.
        unreadable: why entries could not be unpickled, which are removed.
    """

    folder: Path | None = None
    entry: Path | None = None
    unreadable: list[str] = field(default_factory=list)

    def read(self, local: bool, remote_cache: Any, key: str) -> Iterator[tuple[Any, bytes, bool]]:
        """Stands for `AOTAutogradCache.iterate_over_candidates`, which leaves what it cannot read, and warns of it in every
        process. Gives an entry, its content, and whether it is of the disk."""
        folder = self.folder = Path(AOTAutogradCache._get_tmp_dir_for_key(key))
        for self.entry in sorted(folder.glob("[!.]*")) if local else ():  # the others are being written
            with suppress(OSError):  # another process has just removed it
                content = self.entry.read_bytes()
                try:
                    entry = pickle.loads(content)
                except Exception as error:  # a file may hold anything
                    self.unreadable.append(f"{type(error).__name__}: {error}")
                    self.remove()
                    continue
                yield entry, content, True
        yield from _candidates(False, remote_cache, key)

    def remove(self) -> None:
        """Removes the entry."""
        if self.entry is not None:
            with suppress(OSError):
                self.entry.unlink()

    def touch(self) -> None:
        """Says that the entry was used now: the time of use of a key's entries is that of their folder."""
        if self.entry is not None:
            with suppress(OSError):
                os.utime(self.entry.parent)


_candidates = AOTAutogradCache.iterate_over_candidates


@contextmanager
def use_cache_tag(tag: str) -> Iterator[Lookup]:
    """Context in which AOTAutograd looks up and stores captures under keys with this tag.

    Captures of `aot_compile` are neither looked up nor stored: torch's key may be the same for graphs of two packages.

    Relies on the settings `cache_key_tag`; `bundled_autograd_cache`, without which torch stores only Inductor's
    results; and `force_non_lazy_backward_lowering`, for packages and where Dynamo's captures are kept, whose entries are
    wanted when the capture ends. Other captures are stored when their backward is compiled, at its first run at the latest:
    torch does that by itself.

    Keys have nothing of Inductor's: see `_describe_graph`. Relies on `AOTAUTOGRAD_CACHE_PREFIX`, on `iterate_over_candidates`
    for what `Lookup.read` says, and on `warn_once`, which only says what authors of tensor subclasses might do.
    """
    whole = is_packaging() or is_precompile_cached()
    patched = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": whole}
    lookup = Lookup()
    with ExitStack() as during:
        during.enter_context(compile_lock)  # before anything of torch's is replaced, for whichever thread captures
        if is_packaging():
            tag = f"{tag} {uuid.uuid4()}"
            during.enter_context(_random_keys())
        during.enter_context(patch.object(AOTAutogradCacheDetails, "_init_fx_graph_hash_details", _describe_graph))
        during.enter_context(patch.object(autograd_cache, "AOTAUTOGRAD_CACHE_PREFIX", _KEY_PREFIX))
        during.enter_context(patch.object(autograd_cache, "warn_once", _say_nothing))
        during.enter_context(patch.object(AOTAutogradCache, "iterate_over_candidates", lookup.read))
        during.enter_context(patch.object(graph_compile, "_cache_autograd_info", _store_training))
        during.enter_context(_with_all_guards())
        during.enter_context(_compiler_config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]
        during.enter_context(_functorch_config.patch(patched))
        during.enter_context(_allow_autocast_functions())
        yield lookup


def _say_nothing(text: str) -> None:
    """Stands for `warn_once`."""


def _describe_graph(
    self: AOTAutogradCacheDetails, module: GraphModule, example_inputs: Sequence[Any], fx_config: Any
) -> None:
    """Describes a graph for torch's key without Inductor, which compiles none of it: its settings, back ends and source.

    They take half a second to a second of each process. torch's version and its settings are in the tag. Relies on
    `AOTAutogradCacheDetails._init_fx_graph_hash_details`, which is where all of Inductor's part is; the rest of the key is
    made before it, and what has attributes here is hashed by torch's pickler.

    Raises:
        BypassAOTAutogradCache: the graph has no key.
    """
    try:
        FxGraphCache._check_can_cache(module, example_inputs, fx_config)
    except BypassFxGraphCache as refusal:
        raise BypassAOTAutogradCache(str(refusal)) from refusal
    self.gm = module
    described: list[Any] = [type(x).__qualname__ if is_opaque_reference_type(type(x)) else x for x in example_inputs]
    self.example_inputs = described
    self.cache_key_tag = _compiler_config.cache_key_tag  # type: ignore[attr-defined]


@contextmanager
def _random_keys() -> Iterator[None]:
    """Context in which a graph without a key, in `aot_compile`, gets a random key that the user's seed does not determine.

    torch draws such keys from Python's generator: a seeded process would find an entry that another process stored for
    another function. Relies on `random.random` of `autograd_cache_key`, and on `_write_to_local_cache`; Dynamo's lock
    excludes other captures while these are replaced.
    """
    unwritten = patch.object(AOTAutogradCache, "_write_to_local_cache", lambda key, content: None)
    with patch.object(autograd_cache, "random", SystemRandom()), unwritten:
        yield


_really_store_training = graph_compile._cache_autograd_info


def _store_training(*captured: Any) -> tuple[Any, Any]:
    """Stores a capture with a backward, which gives away no saved value, so that it can run again after `retain_graph=True`.

    torch decides that by itself where a backward is compiled at its first run, but stores what it decided. Relies on
    `_cache_autograd_info`: on the metadata among its arguments, which is what each run of the backward looks at, and on the
    first of its two results, which stores a capture when its backward is compiled later, outside of `use_cache_tag`.
    """
    for metadata in captured:
        if isinstance(metadata, ViewAndMutationMeta):
            metadata.bw_donated_idxs = []
    store, entry = _really_store_training(*captured)
    if store is not None:
        store = _with_all_guards()(_functorch_config.patch(bundled_autograd_cache=True)(store))
    return store, entry


def _with_all_guards() -> Any:
    """Context, and decorator, in which an entry has the guards that `_describe_guards` gives."""
    return patch.object(AOTAutogradCache, "generate_guards_expression", _describe_guards)


def _describe_guards(cache_info: Any) -> str | None:
    """The guards on sizes that an entry holds for, as torch evaluates them for a call's sizes when it looks entries up.

    torch leaves out a guard with a size that is fixed: `max(n, m + 1) == 4` where m is fixed to 3, for which the graph was
    captured, and an entry of n = 4 would serve n = 8. Here such a size is replaced by its value. Relies on `ShapeEnv.guards`,
    `replace` and `produce_guards_expression`, and stands for `generate_guards_expression`.
    """
    env = AOTAutogradCache._get_shape_env()
    if env is None:
        return None
    sizes = cache_info.forward_symints
    known = {size.node.expr for size in sizes if size.node.expr.is_Symbol}
    guards = [guard._replace(expr=env.replace(guard.expr)) for guard in env.guards]
    kept = [guard for guard in guards if guard.expr.free_symbols and guard.expr.free_symbols <= known]
    described: str | None = env.produce_guards_expression(placeholders=sizes, guards=kept)
    return described


def find_bypass_reason(module: GraphModule) -> str | None:
    """Returns why AOTAutograd's cache does not take a graph of Dynamo's, None if it does. Relies on `check_cacheable`
    and the exceptions that it raises: an AssertionError for a method of a number."""
    try:
        with _allow_autocast_functions():
            check_cacheable(module)
    except (BypassAOTAutogradCache, BypassFxGraphCache, AssertionError) as refusal:
        return str(refusal).partition("\n")[0].strip()
    return None


def _allow_autocast_functions() -> AbstractContextManager[Any]:
    """Marks the functions of autocast regions as cacheable: torch does not list them, but the graph has all of their
    arguments."""
    known = dict.fromkeys(_OF_AUTOCAST, "as the graph says")
    return _inductor_config.patch(  # type: ignore[no-any-return]
        unsafe_marked_cacheable_functions={**_inductor_config.unsafe_marked_cacheable_functions, **known}
    )


def is_on() -> bool:
    """Whether AOTAutograd's cache is on. Relies on the settings `enable_autograd_cache` and `force_disable_caches`."""
    return bool(_functorch_config.enable_autograd_cache and not _compiler_config.force_disable_caches)


def is_precompile_cached() -> bool:
    """Whether Dynamo stores its captures, which refer to AOTAutograd's. Relies on the setting `caching_precompile`."""
    return bool(_dynamo_config.caching_precompile)


def folder() -> Path:
    """Returns AOTAutograd's cache folder, which holds pickles. Relies on Inductor's `cache_dir`, which makes the folder."""
    return Path(cache_dir())


def captures_folder() -> Path:
    """Returns the folder of captures in AOTAutograd's cache folder. Relies on `AOTAutogradCache._get_tmp_dir`."""
    return Path(AOTAutogradCache._get_tmp_dir())


def find_key_folders() -> list[Path]:
    """Returns the folders of this package's captures in AOTAutograd's cache, one for each key."""
    return list(captures_folder().glob(f"{_KEY_PREFIX}*"))


def is_packaging() -> bool:
    """Whether `aot_compile` captures the graph. Relies on the setting `bypass_autograd_cache_key`, which only it sets."""
    return bool(_functorch_config.bypass_autograd_cache_key)


@contextmanager
def share_in_capture(value: object) -> Iterator[None]:
    """Context in which `get_shared` returns this value, for the current capture.

    Relies on `TracingContext`, one object for each capture, accepting new attributes.
    """
    context = TracingContext.try_get()
    setattr(context, _HANDED_DOWN, value)
    try:
        yield
    finally:
        delattr(context, _HANDED_DOWN)


def get_shared() -> Any:
    """Returns the value that `share_in_capture` set for the current capture; None outside of one. Relies on
    `TracingContext.try_get`."""
    return getattr(TracingContext.try_get(), _HANDED_DOWN, None)


def find_tensor_attribute(module: GraphModule) -> str | None:
    """Returns the name of a tensor attribute of a Dynamo graph or a nested one, else None: the cache key ignores its
    values."""
    for inner in module.modules():
        for node in inner.graph.find_nodes(op="get_attr") if isinstance(inner, GraphModule) else ():
            if isinstance(_attribute(inner, str(node.target)), torch.Tensor):
                return str(node.target)
    return None


def _attribute(module: torch.nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name, None)
    return value
