"""Lowers calls by torch-mlir or by the op's JAX body, and compiles and runs them in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from conformance.op_calls import Call
from dynaxla.errors import LoweringError
from dynaxla.lowering import stablehlo_module, torch_mlir_importer, torch_mlir_passes
from dynaxla.lowering.call_graph import OpCall, call_graph
from dynaxla.lowering.jax_lowering import lower_bodies
from dynaxla.lowering.link import LinkedModule, link
from dynaxla.lowering.stablehlo_functions import FunctionFinisher, StablehloFunction
from dynaxla.lowering.torch_dialect import import_calls, result_items
from dynaxla.ops.aten_calls import Form
from dynaxla.ops.record import Body
from dynaxla.runtime import xla

GraphOf = Callable[[Sequence[Call]], tuple[Graph, list[int]]]
"""Makes a graph of calls; and says how many tensors each gives."""


def prepare() -> None:
    """Loads what forked processes would else load again."""
    torch_mlir_importer.load(), torch_mlir_passes.lower(b"", stablehlo_module.artifact_version())


@dataclass(frozen=True)
class Lowering:
    """How calls of one op become an executable.

    Attributes:
        bodies: by overload.
        forms: the op's aten form, where it is not lowered as it is.
    """

    bodies: Mapping[Any, Body]
    forms: Mapping[Any, Form] = field(default_factory=dict)

    def lower(
        self, calls: Sequence[Call], *, by_body: bool, graph_of: GraphOf | None = None
    ) -> tuple[LinkedModule, list[int]]:
        """A module that makes every call apart, and how many tensors each call gives.

        Raises:
            LoweringError, LinkError: torch-mlir refuses a call, or a body does.
        """
        graph, counts = (graph_of or alone)(calls)
        whole = call_graph(graph)
        lower = self._by_bodies if by_body else self._by_torch_mlir
        functions = lower([*whole.distinct.values()], FunctionFinisher(stablehlo_module.load(), "cpu", "HIGHEST"))
        return link(whole, dict(zip(whole.distinct, functions, strict=True))), counts

    def run(self, calls: Sequence[Call], *, by_body: bool, graph_of: GraphOf | None = None) -> list[list[torch.Tensor]]:
        """The results of every call."""
        if not calls:
            return []
        linked, counts = self.lower(calls, by_body=by_body, graph_of=graph_of)
        outputs = iter(Executable(linked.module).run([x for call in calls for x in call.tensors]))
        return [[next(outputs) for _ in range(count)] for count in counts]

    def _by_bodies(self, calls: Sequence[tuple[OpCall, Node]], finisher: FunctionFinisher) -> list[StablehloFunction]:
        return lower_bodies([(self.bodies[call.target], call) for call, _ in calls], finisher)

    def _by_torch_mlir(
        self, calls: Sequence[tuple[OpCall, Node]], finisher: FunctionFinisher
    ) -> list[StablehloFunction]:
        module, names = import_calls(torch_mlir_importer.load(), [node for _, node in calls], self.forms)
        lowered = torch_mlir_passes.lower(module, stablehlo_module.artifact_version())
        if isinstance(lowered, torch_mlir_passes.LoweringRejected):
            raise LoweringError(lowered.diagnostics)
        loaded = finisher.mlir.load_artifact(finisher.mlir.context(), lowered.artifact)
        found = [finisher.finish(loaded, name, call) for name, (call, _) in zip(names, calls, strict=True)]
        functions = [function for function in found if function is not None]
        if len(functions) < len(found):
            raise LoweringError("error: the function has not the type of torch's tensors")
        return functions


class Executable:
    """A module compiled for a CPU client of this process."""

    def __init__(self, module: bytes) -> None:
        self._device = _client().local_devices()[0]
        self._executable = xla.compile_on(_client(), [self._device], module, xla.compile_options([self._device]))

    def buffers(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        import jax

        with jax.enable_x64(True):
            return [jax.device_put(_to_numpy(t), self._device) for t in tensors]

    def start(self, buffers: Sequence[Any]) -> list[Any]:
        """Runs it to its end; the results as buffers."""
        outputs = self._executable.execute_sharded(buffers).disassemble_into_single_device_arrays()
        results = [shards[0] for shards in outputs]
        for result in results:
            result.block_until_ready()
        return results

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        import numpy as np

        return [_from_numpy(np.asarray(result)) for result in self.start(self.buffers(tensors))]


def alone(calls: Sequence[Call]) -> tuple[Graph, list[int]]:
    """A graph of placeholders, the calls and their results, with fake tensors in `meta["val"]`; how many results each has."""
    mode, graph = FakeTensorMode(), Graph()
    inputs = [_placeholders(graph, mode, call) for call in calls]
    results = []
    for call, leaves in zip(calls, inputs, strict=True):
        args, kwargs = pytree.tree_unflatten(leaves, call.treespec)
        node = graph.call_function(call.target, args, kwargs)
        fakes = [x.meta["val"] if isinstance(x, Node) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(fakes, call.treespec)
        with mode:
            values = call.target(*args, **kwargs)
        several = isinstance(values, (tuple, list))
        node.meta["val"] = tuple(values) if several else values
        results.append(result_items(graph, node) if several else [node])
    graph.output(tuple(node for nodes in results for node in nodes))
    return graph, [len(nodes) for nodes in results]


def _placeholders(graph: Graph, mode: FakeTensorMode, call: Call) -> list[Any]:
    leaves: list[Any] = []
    for leaf in call.leaves:
        if isinstance(leaf, torch.Tensor):
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = mode.from_tensor(leaf.resolve_conj().resolve_neg().contiguous())
            leaves.append(node)
        else:
            leaves.append(leaf)
    return leaves


@cache
def _client() -> Any:
    return xla.load().xla_client.make_cpu_client()


def _to_numpy(tensor: torch.Tensor) -> Any:
    import ml_dtypes

    plain = tensor.resolve_conj().resolve_neg().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


def _from_numpy(array: Any) -> torch.Tensor:
    import numpy as np

    writable = np.array(array)
    if writable.dtype.name == "bfloat16":
        return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(writable)
