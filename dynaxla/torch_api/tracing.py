"""The graph of ATen calls that a function makes, found without what torch's own ways change for every thread of the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    PythonKeyTracer,
    disable_autocast_cache,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.utils._pytree import tree_map_only


def sizes_varying() -> AbstractContextManager[Any]:
    """Within it those of torch's ops that are made of others take sizes that vary. Relies on `enable_python_dispatcher`."""
    return enable_python_dispatcher()  # type: ignore[no-any-return]


def traced(
    function: Callable[..., Any],
    examples: Sequence[torch.Tensor | torch.SymInt],
    rewrites: Mapping[OpOverload, Callable[..., Any]],
) -> GraphModule:
    """The graph of ATen calls that a function makes of tensors like these, which are fake, within their mode.

    Safe from several threads, also beside captures. make_fx is not: it patches `torch.nn.Module`, says to the whole process
    that something is traced, which makes other threads' calls of compiled functions raise, and takes the sub-graphs of other
    threads' traces for its own.

    Relies on `ProxyTorchDispatchMode` and `PythonKeyTracer`, whose nodes carry fake tensors in `meta["val"]`. Control flow
    needs make_fx, and is not traced here.

    Args:
        examples: one input each, no two the same object; those that are sizes, too.
        rewrites: what is called in the place of an op.
    """
    tracer = PythonKeyTracer()
    tracer.root, tracer.graph, tracer.tensor_attrs = torch.nn.Module(), Graph(tracer_cls=PythonKeyTracer), {}
    inputs = [tracer.create_proxy("placeholder", f"input_{i}", (), {}) for i in range(len(examples))]
    track_tensor_tree(list(examples), inputs, constant=None, tracer=tracer)
    with disable_autocast_cache(), ProxyTorchDispatchMode(tracer, "real", decomposition_table=dict(rewrites)):
        results = function(*examples)
    proxies = tree_map_only(torch.Tensor, lambda x: get_proxy_slot(x, tracer, x, lambda found: found.proxy), results)
    tracer.create_node("output", "output", (tracer.create_arg(proxies),), {})
    return GraphModule(tracer.root, tracer.graph)
