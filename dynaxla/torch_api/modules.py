"""Private attributes of torch.nn.Module, and modules of graphs."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule


def compiled_call(module: Any) -> Any:
    """Returns the callable that `module.compile()` installed, else None. Relies on `Module._compiled_call_impl`."""
    return getattr(module, "_compiled_call_impl", None)


def has_hooks(module: nn.Module) -> bool:
    """Whether calls of the module run hooks. Relies on `Module._forward_hooks` and `Module._forward_pre_hooks`."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def graph_module(root: nn.Module, graph: Graph) -> GraphModule:
    """Makes a module of a graph whose Python code is generated at its first run, and not at each change.

    Relies on `torch.fx._lazy_graph_module._LazyGraphModule`.
    """
    return _LazyGraphModule(root, graph)
