"""AOTAutograd's cache: what it keeps of a capture, under which key, and when.

Relies on `torch._functorch` and `torch._inductor.output_code` (since torch 2.9). The cache asks compilers for an `OutputCode`,
which it pickles with its own account of the capture; its key is of Dynamo's graph and of torch's settings, and knows no
backend: `cache_key_tag` is what tells backends apart.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo import config as _dynamo_config
from torch._functorch import config as _functorch_config
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache, BypassAOTAutogradCache, check_cacheable
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._guards import TracingContext
from torch._inductor import config as _inductor_config
from torch._inductor.codecache import BypassFxGraphCache
from torch._inductor.output_code import OutputCode
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.compiler import config as _compiler_config
from torch.fx import GraphModule

from dynaxla.torch_api.dynamo import compile_lock

FOLDER_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_HANDED_DOWN = "dynaxla_handed_down"

_OF_AUTOCAST = ("torch.amp.autocast_mode._enter_autocast", "torch.amp.autocast_mode._exit_autocast")

NotKept = BypassAOTAutogradCache
"""Raised by `KeptCode.prepare_for_serialization`: the capture is not kept."""


@dataclass
class KeptCode(OutputCode):
    """What a compiler gives to AOTAutograd's cache: the function that runs the graph, and what is kept of it.

    Relies on what `BundledAOTAutogradResult` does with an `OutputCode`: a shallow copy of it is told to
    `prepare_for_serialization`, and pickled; when it is loaded, `post_compile` is called before it is run. And on the attribute
    `_boxed_call`, which must be the object's own, as wrappers copy its `__dict__`.

    Attributes:
        content: what makes the function in another process; None: nothing can be kept.
        function: takes one list of arguments.
    """

    content: bytes | None
    function: Callable[[list[Any]], list[Any]] | None

    def __post_init__(self) -> None:
        self._boxed_call = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.function(inputs)  # type: ignore[misc, arg-type]

    def prepare_for_serialization(self) -> None:
        if self.content is None:
            raise NotKept("what dynaxla made of the graph cannot be kept")
        self.function = None

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There is none."""


def keeping(code: type[KeptCode], compiler: Callable[..., KeptCode]) -> Any:
    """A compiler whose results AOTAutograd keeps. Relies on `SerializableAOTDispatchCompiler`.

    To be made anew for each graph: torch puts a wrapper around that of the backward, in place.
    """
    return SerializableAOTDispatchCompiler(code, compiler)


@contextmanager
def kept_as(tag: str) -> Iterator[None]:
    """While it lasts, what AOTAutograd captures is looked for, and kept, under keys with this tag.

    What `aot_compile` captures is neither looked for nor kept there: the graphs of two packages may be alike to torch's key.

    Relies on the settings `cache_key_tag`; `bundled_autograd_cache`, without which only what Inductor compiled is kept;
    and `force_non_lazy_backward_lowering`, as a backward that is compiled at its first call comes when this is over.
    """
    patched = {"bundled_autograd_cache": True, "force_non_lazy_backward_lowering": True}
    with ExitStack() as during:
        if is_packaging():
            tag = f"{tag} {uuid.uuid4()}"
            during.enter_context(_apart())
        during.enter_context(_compiler_config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]
        during.enter_context(_functorch_config.patch(patched))
        during.enter_context(_more_is_known())
        yield


@contextmanager
def _apart() -> Iterator[None]:
    """A graph of which torch can tell no key gets a random number for one, in `aot_compile`: not one of the user's seed.

    With Python's generator, which torch takes, a process that is seeded finds what another one kept, of another function.
    Relies on `random.random` of `autograd_cache_key`, and on `_write_to_local_cache`; Dynamo's lock keeps captures in calls,
    and of other packages, out while these are others.
    """
    unwritten = patch.object(AOTAutogradCache, "_write_to_local_cache", lambda key, content: None)
    with compile_lock, patch.object(autograd_cache, "random", SystemRandom()), unwritten:
        yield


def unknown_to_the_cache(module: GraphModule) -> str | None:
    """Why AOTAutograd's cache would not have a graph of Dynamo's. Relies on `check_cacheable`, and what it raises."""
    try:
        with _more_is_known():
            check_cacheable(module)
    except (BypassAOTAutogradCache, BypassFxGraphCache) as refusal:
        return str(refusal).partition("\n")[0].strip()
    return None


def _more_is_known() -> AbstractContextManager[Any]:
    """Of an autocast the graph says all: torch just has not listed the functions by which it stands in one."""
    known = dict.fromkeys(_OF_AUTOCAST, "as the graph says")
    return _inductor_config.patch(  # type: ignore[no-any-return]
        unsafe_marked_cacheable_functions={**_inductor_config.unsafe_marked_cacheable_functions, **known}
    )


def is_on() -> bool:
    """Whether AOTAutograd keeps anything. Relies on the settings `enable_autograd_cache` and `force_disable_caches`."""
    return bool(_functorch_config.enable_autograd_cache and not _compiler_config.force_disable_caches)


def keeps_frames() -> bool:
    """Whether Dynamo keeps its captures, which name AOTAutograd's. Relies on the setting `caching_precompile`."""
    return bool(_dynamo_config.caching_precompile)


def folder() -> Path:
    """Where AOTAutograd keeps captures, as pickles. Relies on Inductor's `cache_dir`, which makes the folder."""
    return Path(cache_dir())


def is_packaging() -> bool:
    """Whether a graph is captured by `aot_compile`. Relies on the setting `bypass_autograd_cache_key`, its alone."""
    return bool(_functorch_config.bypass_autograd_cache_key)


@contextmanager
def handing_down(value: object) -> Iterator[None]:
    """While it lasts, `handed_down` gives this value in the capture at hand.

    Relies on `TracingContext`, of which each capture has one of its own, taking an attribute.
    """
    context = TracingContext.try_get()
    setattr(context, _HANDED_DOWN, value)
    try:
        yield
    finally:
        delattr(context, _HANDED_DOWN)


def handed_down() -> Any:
    """What the capture at hand was given; None outside of one. Relies on `TracingContext.try_get`."""
    return getattr(TracingContext.try_get(), _HANDED_DOWN, None)


def held_tensor(module: GraphModule) -> str | None:
    """A tensor that a graph of Dynamo's holds itself, or a graph within it, by its name; of which the key knows no values."""
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
