"""What a torch.nn.Module keeps to itself, and modules of graphs."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule


def compiled_call(module: Any) -> Any:
    """What `module.compile()` made its calls go to, else None. Relies on `Module._compiled_call_impl`."""
    return getattr(module, "_compiled_call_impl", None)


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks run at the module's calls. Relies on `Module._forward_hooks` and `Module._forward_pre_hooks`."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def graph_module(root: nn.Module, graph: Graph) -> GraphModule:
    """A module of a graph whose Python code is made when it is first run, and not at each change.

    Relies on `torch.fx._lazy_graph_module._LazyGraphModule`.
    """
    return _LazyGraphModule(root, graph)
