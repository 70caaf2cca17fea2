"""Higher-order operators as JAX functions: their sub-graphs are run by the bodies of their ops, while JAX traces.

So a branch becomes `stablehlo.case`, a loop `stablehlo.while`, and a sub-graph that is called several times one function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import GraphModule, Node, map_arg

from dynaxla.ops.promotion import JNP_DTYPES
from dynaxla.ops.record import Body
from dynaxla.torch_api.overloads import HigherOrderOperator

Bodies = Mapping[Any, Body]
Run = Callable[[GraphModule, Sequence[Any]], tuple[Any, ...]]

_SIZES: Mapping[object, Callable[..., int]] = {
    torch.ops.aten.sym_size.int: lambda x, dim: int(x.shape[dim]),
    torch.ops.aten.sym_numel.default: lambda x: int(x.size),
}


def call(target: HigherOrderOperator, args: Sequence[Any], bodies: Bodies) -> tuple[Any, ...]:
    """A call of a higher-order operator.

    Args:
        target: one of `TARGETS`.
        args: its arguments; sub-graphs as modules, tensors as arrays, sizes as plain integers.
        bodies: the JAX functions of ops.
    """
    return _BODIES[target](lambda module, given: run(module, given, bodies), *args)


def run(module: GraphModule, args: Sequence[Any], bodies: Bodies) -> tuple[Any, ...]:
    """A graph's results, by the bodies of its ops."""
    values: dict[Node, Any] = {}
    given = iter(args)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = _held(module, node)
        elif node.op == "call_function":
            node_args, node_kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = _call(node.target, node_args, node_kwargs, bodies)
    returned = module.graph.output_node().args[0]
    results = returned if isinstance(returned, (tuple, list)) else (returned,)
    return tuple(values[x] if isinstance(x, Node) else x for x in results)


def attribute(module: GraphModule, node: Node) -> Any:
    """What a `get_attr` node names."""
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _held(module: GraphModule, node: Node) -> Any:
    """A sub-graph, or a tensor's values as an array."""
    value = attribute(module, node)
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach().cpu()
    # numpy has no bfloat16
    return jnp.asarray((plain.float() if value.dtype == torch.bfloat16 else plain).numpy(), JNP_DTYPES[value.dtype])


def _call(target: Any, args: Any, kwargs: Any, bodies: Bodies) -> Any:
    if isinstance(target, HigherOrderOperator):
        return call(target, args, bodies)
    body = bodies.get(target) or _SIZES.get(target)
    # What has no body is arithmetic on sizes, which are plain numbers here, or a pick.
    return (body or target)(*args, **kwargs)


def _cond(run: Run, pred: Any, true: GraphModule, false: GraphModule, operands: Sequence[Any]) -> tuple[Any, ...]:
    arrays = [x for x in operands if isinstance(x, jax.Array)]

    def branch(module: GraphModule) -> Callable[..., tuple[Any, ...]]:
        def taken(*given: Any) -> tuple[Any, ...]:
            left = iter(given)
            return _strong(run(module, [next(left) if isinstance(x, jax.Array) else x for x in operands]))

        return taken

    results: tuple[Any, ...] = lax.cond(jnp.reshape(pred, ()), branch(true), branch(false), *arrays)
    return results


def _while_loop(
    run: Run, cond: GraphModule, body: GraphModule, carried: Sequence[Any], more: Sequence[Any]
) -> tuple[Any, ...]:
    def goes_on(values: tuple[Any, ...]) -> Any:
        return jnp.reshape(run(cond, [*values, *more])[0], ())

    results: tuple[Any, ...] = lax.while_loop(
        goes_on, lambda values: _strong(run(body, [*values, *more])), tuple(carried)
    )
    return results


def _scan(
    run: Run, combine: GraphModule, init: Sequence[Any], xs: Sequence[Any], more: Sequence[Any]
) -> tuple[Any, ...]:
    def step(carry: tuple[Any, ...], slices: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        results = _strong(run(combine, [*carry, *slices, *more]))
        return results[: len(init)], results[len(init) :]

    carry, stacked = lax.scan(step, tuple(init), tuple(xs))
    return (*carry, *stacked)


def _map(run: Run, body: GraphModule, xs: Sequence[Any], more: Sequence[Any]) -> tuple[Any, ...]:
    return _scan(run, body, (), xs, more)


def _invoke(run: Run, called: GraphModule, identifier: str, *operands: Any) -> tuple[Any, ...]:
    return run(called, operands)


def _strong(values: Sequence[Any]) -> tuple[Any, ...]:
    """Both branches, and every turn of a loop, give values of one type; a type that JAX holds weakly is another."""
    return tuple(jnp.asarray(x, x.dtype) for x in values)


_BODIES: Mapping[HigherOrderOperator, Callable[..., tuple[Any, ...]]] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.while_loop: _while_loop,
    torch.ops.higher_order.scan: _scan,
    torch.ops.higher_order.map_impl: _map,
    torch.ops.higher_order.invoke_subgraph: _invoke,
}
TARGETS = frozenset(_BODIES)
"""The higher-order operators that are lowered."""

PLAIN = frozenset({operator.getitem, *_SIZES})
"""What a sub-graph may call beside ops with bodies and arithmetic on sizes."""
