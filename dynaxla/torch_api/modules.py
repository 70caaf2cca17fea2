"""Private attributes of torch.nn.Module, and modules of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule


def compiled_call(module: Any) -> Any:
    """Returns the callable that `module.compile()` installed, else None. Relies on `Module._compiled_call_impl`."""
    return getattr(module, "_compiled_call_impl", None)


def has_hooks(module: nn.Module) -> bool:
    """Whether calls of the module run hooks. Relies on `Module._forward_hooks` and `Module._forward_pre_hooks`."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def move_tensors(module: nn.Module, move: Callable[[Tensor], Tensor]) -> None:
    """Replaces all parameters, gradients and buffers of a module by what a function makes of them, as `module.to` does.

    Relies on `Module._apply`, which keeps the parameters' identities where torch's settings allow it.
    """
    module._apply(move)


def graph_module(root: nn.Module | dict[str, Any], graph: Graph) -> GraphModule:
    """Makes a module of a graph whose Python code is generated at its first run, and not at each change.

    Args:
        root: has the attributes that the graph reads.

    Relies on `torch.fx._lazy_graph_module._LazyGraphModule`.
    """
    return _LazyGraphModule(root, graph)
