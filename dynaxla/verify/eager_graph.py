"""A captured graph as eager PyTorch computes it, on copies of a call's arguments; graphs of the device on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate

from dynaxla.custom_ops.threefry import DRAW_SEED
from dynaxla.fx.graph_utils import attribute, copy_graph, find_device, make_eager_function, opaque_class_of
from dynaxla.observe.differences import RELATIVE, Difference, find_differences, measure_difference
from dynaxla.passes.manager import CapturedGraph
from dynaxla.passes.seed_inputs import add_seed_arguments
from dynaxla.torch_api.modules import graph_module
from dynaxla.torch_api.overloads import namespace
from dynaxla.types import DEVICE_TYPE, restride
from dynaxla.verify.float64_mode import Float64Mode

_HOST = torch.device("cpu")
_ROUNDINGS = 10.0
"""XLA may add in another order than eager: its error is that of roundings if it is at most so many times eager's."""

_COLLECTIVES = ("_c10d_functional", "c10d", "c10d_functional", "_dtensor")


def find_obstacle(module: GraphModule) -> str | None:
    """Why calls of a graph cannot be repeated in eager; None if they can."""
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.with_effects:
            return "an op of it has an effect, which would happen twice"
        if namespace(node.target) in _COLLECTIVES:
            return f"{node.target} has several processes compute together"
        if node.kwargs.get("generator") is not None or opaque_class_of(node) == "Generator":
            return "it draws from a generator of its own, which would advance twice"
    return None


def copy_captured(graph: CapturedGraph) -> CapturedGraph:
    """A graph that passes may change while the given one stays."""
    return replace(graph, module=graph_module(graph.module, copy_graph(graph.module.graph)))


def is_on_device(module: GraphModule) -> bool:
    """Whether a graph computes on tensors of the device "dynaxla"."""
    return find_device(module).type == DEVICE_TYPE


class EagerGraph:
    """A captured graph, whatever passes ran on it, as a function of AOTAutograd's arguments that eager PyTorch computes.

    A graph of the device is computed on the host: the device's own ops have the lowerings that are to be compared.

    Args:
        graph: no pass may change it any more.
    """

    def __init__(self, graph: CapturedGraph) -> None:
        self._device = find_device(graph.module)
        self._on_host = is_on_device(graph.module)
        self._is_seeded = any(map(draws_itself, graph.module.graph.nodes))
        run = make_eager_function(move_to_host(graph.module) if self._on_host else graph.module, graph.saved)
        constants = list(map(_to_host, graph.constants)) if self._on_host else graph.constants
        function = graph.opaque.wrap(lambda args: run([*args, *constants]))
        function = add_seed_arguments(function, graph.seeds)
        self._function = function if graph.aliases is None else graph.aliases.wrap(function)

    @torch.no_grad()
    def run(self, args: Sequence[Any]) -> list[Any]:
        """Returns the graph's results. The generators stay as they are, so that the next run draws the same numbers."""
        with repeat_draws(self._device):
            return self._function(list(map(_to_host, args)) if self._on_host else args)

    def find_differences(
        self, actual: Sequence[Any], expected: Sequence[Any], args: Sequence[Any]
    ) -> dict[int, Difference]:
        """The results that are not eager's, by position.

        What is left of numbers that cancel each other may differ by more than its tolerance. So a result that differs is
        compared with one in float64, if the graph can be computed so, and passes if it is as near to that as eager's.

        Args:
            actual: the results that are checked.
            expected: those of eager.
            args: of the call.
        """
        found = find_differences(actual, expected)
        wide = self._run_in_float64(args) if any(not each.problem for each in found.values()) else None
        if wide is None:
            return found
        return {
            i: each for i, each in found.items() if each.problem or not is_rounding(actual[i], expected[i], wide[i])
        }

    def _run_in_float64(self, args: Sequence[Any]) -> list[Any] | None:
        if self._is_seeded:
            return None  # eager's generators draw other numbers in float64
        try:
            with Float64Mode():
                return self.run(copy_arguments(args))
        except Exception:  # of an operator of the user's, or an op of torch, without a kernel in float64
            return None


def move_to_host(module: GraphModule) -> GraphModule:
    """A copy of a graph whose nodes make their tensors on the host. Seeds are drawn from the device's own generator."""
    graph = copy_graph(module.graph)
    held: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            value = attribute(module, node)
            held[str(node.target)] = move_to_host(value) if isinstance(value, GraphModule) else _to_host(value)
        elif node.target is not DRAW_SEED:
            node.args, node.kwargs = map_aggregate(node.args, _name_host), map_aggregate(node.kwargs, _name_host)
    return GraphModule(held, graph)


def copy_arguments(args: Iterable[Any], kept: frozenset[int] = frozenset()) -> list[Any]:
    """Copies of the tensors among a call's arguments, of the same strides, before anything writes to them.

    Args:
        kept: positions of those that nothing writes to: they are not copied.
    """
    return [_copy(x) if isinstance(x, Tensor) and i not in kept else x for i, x in enumerate(args)]


def repeat_draws(device: torch.device) -> AbstractContextManager[None]:
    """A context that leaves the default generators as it found them, so that the next draws are the same."""
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device.index or 0], device_type=device.type)


def is_rounding(actual: Any, expected: Any, wide: Any) -> bool:
    """Whether two tensors of a floating dtype differ by no more than they both may by rounding.

    Args:
        actual, expected: of one shape.
        wide: the same result computed in float64.
    """
    if not isinstance(actual, Tensor) or actual.dtype not in RELATIVE or wide.shape != actual.shape:
        return False
    mine, eagers = (measure_difference(x.detach().cpu().to(wide.dtype), wide) for x in (actual, expected))
    return not mine.problem and not eagers.problem and mine.absolute <= _ROUNDINGS * eagers.absolute


def draws_itself(node: Node) -> bool:
    """Whether a node draws numbers from a generator; seeds are drawn alike in every dtype."""
    return node.target is not DRAW_SEED and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or _overlaps(tensor):
        return tensor.clone()
    once = tensor
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        once = once.narrow(dim, 0, 1) if stride == 0 and size > 1 else once
    return restride(once.clone(), tensor.shape, tensor.stride())


def _overlaps(tensor: Tensor) -> bool:
    """Whether elements share memory otherwise than by strides of 0, as those of `unfold` do."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride and size > 1:
            if stride < extent:
                return True
            extent = stride * (size - 1) + extent
    return False


def _to_host(value: Any) -> Any:
    moves = isinstance(value, Tensor) and value.device.type == DEVICE_TYPE
    return value.detach().cpu() if moves else value


def _name_host(value: Any) -> Any:
    return _HOST if isinstance(value, torch.device) and value.type == DEVICE_TYPE else value
