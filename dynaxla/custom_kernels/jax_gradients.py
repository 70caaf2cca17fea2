"""Autograd formulas that are JAX functions: the backward of an operator is itself an operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from dynaxla.errors import OptionError
from dynaxla.graph_builder import GraphBuilder
from dynaxla.observe.compile_timing import CapturedFunction
from dynaxla.ops.record import Body, Record
from dynaxla.ops.table import OpTable
from dynaxla.options import Options
from dynaxla.passes.manager import CapturedGraph, GraphFunction
from dynaxla.programs.miss_policy import FunctionPolicy
from dynaxla.programs.program_cache import ProgramCache
from dynaxla.programs.specialization import ArgumentSpec, empty_arguments
from dynaxla.runtime.host_padding import to_row_major
from dynaxla.runtime_state import process
from dynaxla.targets.registry import target_of_device
from dynaxla.torch_api.custom_ops import CustomOpDef, formula_of, list_custom_ops, overload_of
from dynaxla.torch_api.fakes import drop_graph_sources
from dynaxla.torch_api.overloads import OpOverload, get_schema, parameters, results
from dynaxla.torch_api.pytree import TreeSpec, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    import jax

NAMESPACE = "dynaxla_backward"

MOST_CALLS = 1024
"""Distinct calls outside of compiled graphs, of one backward, that are kept."""


@dataclass(frozen=True, slots=True)
class KernelBackward:
    """The backward of an operator that has a JAX body.

    Attributes:
        operator: takes the cotangents of the results, then the operator's own arguments; returns the cotangents of its
            floating-point tensors, in order.
        body: its JAX body.
    """

    operator: CustomOpDef
    body: Body

    @property
    def target(self) -> OpOverload:
        return overload_of(self.operator)


def check_differentiable(target: OpOverload, replace: bool) -> None:
    """Checks that an autograd formula can be registered for an operator.

    Raises:
        OptionError: the operator has a formula already, or takes lists of tensors or keyword-only tensors.
    """
    formula = formula_of(target)
    if formula is not None and not (replace and isinstance(formula, _Formula)):
        raise OptionError(f"{target} has an autograd formula already", "leave `backward` out")
    for argument in parameters(target):
        kind = str(argument.type)
        if "Tensor" in kind and (argument.kwarg_only or kind not in ("Tensor", "Optional[Tensor]")):
            raise OptionError(
                f"{target} takes {argument.name} as {kind}{' by keyword' if argument.kwarg_only else ''}, of which a "
                "`backward` cannot be registered",
                "torch.library.register_autograd takes any formula made of operators",
            )


def define_backward(target: OpOverload, function: Body) -> KernelBackward:
    """Defines the operator of a backward; outside of compiled graphs XLA runs it, too."""
    count = len(results(target))

    def body(*args: object, **kwargs: object) -> tuple[jax.Array, ...]:
        import jax.numpy as jnp

        cotangents, rest = args[:count], args[count:]
        given = function(cotangents[0] if count == 1 else cotangents, *rest, **kwargs)
        arrays = [x for x in rest if hasattr(x, "dtype") and hasattr(x, "shape")]
        found = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if len(found) != len(arrays):
            raise ValueError(f"it gives {len(found)} cotangents of {len(arrays)} tensors")
        pairs = zip(arrays, found, strict=True)
        return tuple(jnp.zeros_like(x) if y is None else y for x, y in pairs if jnp.issubdtype(x.dtype, jnp.inexact))

    eager = _EagerBackward(body)
    made = torch.library.custom_op(_new_name(target), eager, mutates_args=(), schema=_schema(target))
    eager.operator = overload_of(made)
    made.register_fake(lambda *args, **kwargs: _like_operands(args[count:]))
    return KernelBackward(made, body)


def _new_name(target: OpOverload) -> str:
    base = f"{NAMESPACE}::{str(target).replace('.', '_')}"
    return base if (count := sum(name.startswith(base) for name in list_custom_ops())) == 0 else f"{base}_{count}"


def _schema(target: OpOverload) -> str:
    count, text = len(results(target)), get_schema(target)
    own = text[text.index("(") + 1 : text.rindex(") ->")]
    kind = "Tensor" if count == 1 else "Tensor?"
    return f"({', '.join(f'{kind} cotangent_{i}' for i in range(count))}, {own}) -> Tensor[]"


def register_gradient(target: OpOverload, formula: KernelBackward) -> None:
    """Registers a backward as the operator's autograd formula."""
    by_keyword = any(argument.kwarg_only for argument in parameters(target))
    torch.library.register_autograd(
        target, _Formula(formula), setup_context=_save_with_keywords if by_keyword else _save
    )


class _Context(Protocol):
    """Autograd's context object between a forward and its backward.

    Attributes:
        inputs: the forward's arguments, each in a tuple; None for a tensor, which is among `saved_tensors`.
        keywords: the keyword-only arguments.
    """

    saved_tensors: tuple[Tensor, ...]
    inputs: list[tuple[object] | None]
    keywords: Mapping[str, object]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Formula:
    """The function that autograd calls: runs the backward's operator on the arguments that `_save` saved."""

    def __init__(self, backward: KernelBackward) -> None:
        self._backward = backward

    def __call__(self, ctx: _Context, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = iter(ctx.saved_tensors)
        args = [next(tensors) if plain is None else plain[0] for plain in ctx.inputs]
        found = iter(self._backward.target(*cotangents, *args, **ctx.keywords))
        return tuple(next(found) if _is_floating(x) else None for x in args)


def _save(ctx: _Context, inputs: Sequence[object], output: object) -> None:
    _save_with_keywords(ctx, inputs, {}, output)


def _save_with_keywords(
    ctx: _Context, inputs: Sequence[object], keyword_only_inputs: Mapping[str, object], output: object
) -> None:  # torch passes them by these names
    ctx.save_for_backward(*[x for x in inputs if isinstance(x, Tensor)])
    ctx.inputs = [None if isinstance(x, Tensor) else (x,) for x in inputs]
    ctx.keywords = keyword_only_inputs


class _EagerBackward:
    """Runs a backward outside of compiled graphs: each distinct call is a graph of its own, compiled as any other.

    Args:
        body: of the backward.

    Attributes:
        operator: the backward's, which is defined with this as its eager kernel.
    """

    operator: OpOverload

    def __init__(self, body: Body) -> None:
        self._body = body
        self._functions: ProgramCache[str, GraphFunction] = ProgramCache(MOST_CALLS)

    def __call__(self, *args: object, **kwargs: object) -> list[Tensor]:
        leaves, tree = tree_flatten((args, kwargs))
        leaves = [to_row_major(x) if isinstance(x, Tensor) else x for x in leaves]
        specs = [ArgumentSpec.of(x) for x in leaves]
        function = self._functions.get_or_make(repr((specs, str(tree))), lambda: self._build(specs, tree))
        return function([x for x in leaves if isinstance(x, Tensor)])

    def _build(self, specs: Sequence[Any], tree: TreeSpec) -> GraphFunction:
        """What runs a call; also in dtypes that the user's `dtypes` leave to eager, which is here."""
        shared, options = process(), Options.from_mapping({"fallback": "error"})
        target = target_of_device(next(spec.device for spec in specs if isinstance(spec, ArgumentSpec)))
        table = OpTable().with_records([Record(self.operator, self._body)])
        origin = CapturedFunction(str(self.operator))
        with shared.tracing, drop_graph_sources():
            graph = CapturedGraph("inference", GraphModule({}, _call_graph(self.operator, specs, tree)), table)
            builder = GraphBuilder(shared, options, target.policies(False), FunctionPolicy(), origin, target)
            return builder.build_op(graph)


def _call_graph(operator: OpOverload, specs: Sequence[Any], tree: TreeSpec) -> Graph:
    """A graph of one call, whose placeholders are the tensors."""
    graph = Graph()
    fakes = empty_arguments(specs)
    values = [
        _with_value(graph.placeholder(f"input_{i}"), x) if isinstance(x, Tensor) else x for i, x in enumerate(fakes)
    ]
    (args, kwargs), (nodes, named_nodes) = tree_unflatten(fakes, tree), tree_unflatten(values, tree)
    given = operator(*args, **kwargs)
    call = _with_value(graph.call_function(operator, nodes, named_nodes), given)
    graph.output(tuple(_with_value(graph.call_function(getitem, (call, i)), x) for i, x in enumerate(given)))
    return graph


def _with_value(node: Node, value: object) -> Node:
    node.meta["val"] = value
    return node


def _is_floating(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _like_operands(args: Sequence[object]) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in args if _is_floating(x)]
