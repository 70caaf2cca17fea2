"""Static FX graph -> module in the torch dialect, with the JAX rows left as calls to be linked.

A node whose target has a body becomes

    %b = torch_c.to_builtin_tensor %a
    %r = stablehlo.custom_call @dynaxla.body_3(%b)
    %t = torch_c.from_builtin_tensor %r

which torch-mlir's pipelines carry through untouched: `stablehlo.custom_call` is legal in their backend contract, where a
`func.call` is not. `lowering.link` replaces the custom call by a call of the function that JAX lowered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dynaxla.lowering import mlir
from dynaxla.lowering.mlir import TorchMlir
from dynaxla.stages import TensorSpec
from dynaxla.torch_api.overloads import OpOverload
from dynaxla.torch_api.trees import TreeSpec, tree_flatten

BODY_PREFIX = "dynaxla."

TakesBody = Callable[[torch.fx.Node], bool]
"""Says of a node that calls an overload whether a body computes it."""

_MLIR_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "ui8",
    torch.bool: "i1",
    torch.complex64: "complex<f32>",
    torch.complex128: "complex<f64>",
}


@dataclass(frozen=True, slots=True)
class BodyCall:
    """One call of a body, as a plain value: equal calls share one lowered function.

    Attributes:
        target: the ATen overload.
        leaves: the flattened (args, kwargs); a `TensorSpec` stands for each tensor operand, in operand order.
        treespec: how the leaves unflatten to (args, kwargs).
        results: the specs that torch gives for the results; None where the op returns no tensor in that place.
    """

    target: OpOverload
    leaves: tuple[Any, ...]
    treespec: TreeSpec
    results: tuple[TensorSpec | None, ...]

    @property
    def key(self) -> str:
        return repr((str(self.target), self.leaves, str(self.treespec), self.results))


@dataclass(frozen=True, slots=True)
class ImportedModule:
    """A module in the torch dialect, as bytecode, and the calls of bodies that its custom calls name by symbol."""

    bytecode: bytes
    calls: dict[str, BodyCall]

    @property
    def text(self) -> str:
        """The module, readable."""
        return mlir.load().text(self.bytecode)


def import_graph(torch_mlir: TorchMlir, graph: torch.fx.Graph, by_body: TakesBody) -> ImportedModule:
    """Imports a static, functional graph; every node that is `by_body` becomes a call of a body.

    Every tensor node carries a fake or real tensor in `meta["val"]` with plain integer sizes.

    Raises:
        NotImplementedError, TypeError, AssertionError: torch-mlir's importer refuses a node.
    """
    calls: dict[str, BodyCall] = {}
    importer = torch_mlir.fx_importer.FxImporter(
        context=torch_mlir.context(),
        config_check=False,
        graph_node_importer_cls=_node_importer(torch_mlir, by_body, calls),
    )
    importer.import_stateless_graph(graph, func_name="main")
    return ImportedModule(torch_mlir.bytecode(importer.module.operation), calls)


def body_call(node: torch.fx.Node) -> tuple[BodyCall, list[torch.fx.Node]]:
    """The call as a value, and the nodes that are its tensor operands."""
    leaves, treespec = tree_flatten((node.args, node.kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, torch.fx.Node)]
    specs = tuple(TensorSpec.from_tensor(x.meta["val"]) if isinstance(x, torch.fx.Node) else x for x in leaves)
    values = node.meta["val"]
    results = values if isinstance(values, (tuple, list)) else (values,)
    found = tuple(TensorSpec.from_tensor(v) if isinstance(v, torch.Tensor) else None for v in results)
    return BodyCall(node.target, specs, treespec, found), operands  # type: ignore[arg-type]


def _node_importer(torch_mlir: TorchMlir, by_body: TakesBody, calls: dict[str, BodyCall]) -> type:
    symbols: dict[str, str] = {}

    class BodyAwareImporter(torch_mlir.fx_importer.GraphNodeImporter):  # type: ignore[name-defined, misc]
        def _import_torch_op_overload(self, loc: Any, node: torch.fx.Node, concrete_target: Any = None) -> None:
            if not by_body(node):
                super()._import_torch_op_overload(loc, node, concrete_target)
                return
            call, operands = body_call(node)
            symbol = symbols.setdefault(call.key, f"{BODY_PREFIX}body_{len(symbols)}")
            calls[symbol] = call
            results = _emit_call(
                torch_mlir, loc, symbol, [self.resolve_node_value(x) for x in operands], operands, call
            )
            if isinstance(node.meta["val"], (tuple, list)):
                self._multi_result_nodes.add(node)
            produced = iter(results)
            for index, spec in enumerate(call.results):
                if spec is not None:
                    self.bind_node_value(node, next(produced), index)

    return BodyAwareImporter


def _emit_call(
    torch_mlir: TorchMlir, loc: Any, symbol: str, values: list[Any], operands: list[torch.fx.Node], call: BodyCall
) -> list[Any]:
    specs = [TensorSpec.from_tensor(x.meta["val"]) for x in operands]
    with loc:
        arguments = [
            torch_mlir.operation("torch_c.to_builtin_tensor", [_builtin(torch_mlir, spec)], [value], loc).result
            for value, spec in zip(values, specs, strict=True)
        ]
        produced = [spec for spec in call.results if spec is not None]
        called = torch_mlir.operation(
            "stablehlo.custom_call",
            [_builtin(torch_mlir, spec) for spec in produced],
            arguments,
            loc,
            call_target_name=symbol,
        )
        return [
            torch_mlir.operation("torch_c.from_builtin_tensor", [_vtensor(torch_mlir, spec)], [result], loc).result
            for result, spec in zip(called.results, produced, strict=True)
        ]


def _builtin(torch_mlir: TorchMlir, spec: TensorSpec) -> Any:
    return torch_mlir.type(f"tensor<{''.join(f'{n}x' for n in spec.shape)}{_MLIR_DTYPES[spec.dtype]}>")


def _vtensor(torch_mlir: TorchMlir, spec: TensorSpec) -> Any:
    element = _MLIR_DTYPES[spec.dtype]
    if element.startswith("i") and element != "i1":
        element = "s" + element  # torch-mlir's integers carry their sign
    return torch_mlir.type(f"!torch.vtensor<[{','.join(map(str, spec.shape))}],{element}>")
