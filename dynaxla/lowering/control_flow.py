"""JAX bodies of higher-order operators. A sub-graph is interpreted by the bodies of its ops while JAX traces.

So a branch becomes `stablehlo.case`, a loop `stablehlo.while`, and a sub-graph that is called several times one function.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import torch
from jax import lax
from torch.fx import GraphModule, Node, map_arg

from dynaxla.custom_ops.constrain import CONSTRAIN, IN_REGION
from dynaxla.custom_ops.reversed_scan import REVERSED_SCAN
from dynaxla.fx.graph_utils import attribute
from dynaxla.lowering.locations import SCOPE
from dynaxla.ops.promotion import JNP_DTYPES
from dynaxla.ops.record import Body
from dynaxla.torch_api.overloads import HigherOrderOperator

Value: TypeAlias = jax.Array | int | float
"""An input or result of a sub-graph: tensors as arrays, sizes as plain numbers."""

Values: TypeAlias = tuple[Value, ...]
Arrays: TypeAlias = tuple[jax.Array, ...]
Argument: TypeAlias = Value | GraphModule | str | Sequence[Value]
"""An argument of a higher-order operator; sub-graphs are modules."""

Bodies = Mapping[Any, Body]  # by OpOverload; asked for whatever a graph calls
Run = Callable[[GraphModule, Sequence[Value]], Values]

_SIZES: Mapping[object, Callable[..., int]] = {
    torch.ops.aten.sym_size.int: lambda x, dim: int(x.shape[dim]),
    torch.ops.aten.sym_numel.default: lambda x: int(x.size),
}


def call(target: HigherOrderOperator, args: Sequence[Argument], bodies: Bodies, scope: str = SCOPE) -> Values:
    """Computes a call of a higher-order operator.

    Args:
        target: one of `TARGETS`.
        args: its arguments; sub-graphs as modules, tensors as arrays, sizes as plain integers.
        bodies: the JAX bodies of the sub-graphs' ops.
        scope: the name of the call's own scope.
    """
    graphs = [each for each in args if isinstance(each, GraphModule)]
    return _BODIES[target](lambda graph, given: _run(graph, given, bodies, f"{scope}_{graphs.index(graph)}"), *args)


def _run(module: GraphModule, args: Sequence[Value], bodies: Bodies, scope: str) -> Values:
    """Interprets a graph by the bodies of its ops, each in a scope of its own. Returns its results."""
    values: dict[Node, Any] = {}
    given = iter(args)
    for number, node in enumerate(module.graph.nodes):
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = _held(module, node)
        elif node.op == "call_function":
            node_args, node_kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            own = f"{scope}_{number}"
            with jax.named_scope(own):
                values[node] = _call(node.target, node_args, node_kwargs, bodies, own)
    returned: Any = module.graph.output_node().args[0]
    results = returned if isinstance(returned, (tuple, list)) else (returned,)
    return tuple(values[x] if isinstance(x, Node) else x for x in results)


def _held(module: GraphModule, node: Node) -> object:
    """The attribute of a `get_attr` node: a sub-graph, or a tensor as an array."""
    value = attribute(module, node)
    if not isinstance(value, torch.Tensor):
        return value
    plain = value.detach().cpu()
    # numpy has no bfloat16
    return jnp.asarray((plain.float() if value.dtype == torch.bfloat16 else plain).numpy(), JNP_DTYPES[value.dtype])


def _call(
    target: Callable[..., object], args: Sequence[Argument], kwargs: Mapping[str, Argument], bodies: Bodies, scope: str
) -> object:
    if isinstance(target, HigherOrderOperator):
        return call(target, args, bodies, scope)
    if target is CONSTRAIN:
        return _constrain(*args)  # type: ignore[arg-type]
    body = bodies.get(target) or _SIZES.get(target)
    # What has no body is arithmetic on sizes, which are plain numbers here, or a pick.
    return (body or target)(*args, **kwargs)


def _constrain(x: jax.Array, spec: str) -> jax.Array:
    """A call that `lowering/link.py` makes a constraint, or nothing: a function is lowered once for whatever devices."""
    constrained: jax.Array = jax.ffi.ffi_call(IN_REGION, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, spec=spec)
    return constrained


def _cond(run: Run, pred: Value, true: GraphModule, false: GraphModule, operands: Sequence[Value]) -> Values:
    arrays = [x for x in operands if isinstance(x, jax.Array)]

    def branch(module: GraphModule) -> Callable[..., Arrays]:
        def taken(*given: jax.Array) -> Arrays:
            left = iter(given)
            return _strong(run(module, [next(left) if isinstance(x, jax.Array) else x for x in operands]))

        return taken

    results: Arrays = lax.cond(jnp.reshape(pred, ()), branch(true), branch(false), *arrays)
    return results


def _while_loop(
    run: Run, cond: GraphModule, body: GraphModule, carried: Sequence[jax.Array], more: Sequence[Value]
) -> Values:
    def goes_on(values: Arrays) -> jax.Array:
        return jnp.reshape(run(cond, [*values, *more])[0], ())

    results: Arrays = lax.while_loop(goes_on, lambda values: _strong(run(body, [*values, *more])), tuple(carried))
    return results


def _scan(
    run: Run,
    combine: GraphModule,
    init: Sequence[jax.Array],
    xs: Sequence[jax.Array],
    more: Sequence[Value],
    places: jax.Array | None = None,
    *,
    reverse: bool = False,
) -> Values:
    """
    Args:
        places: how many places are scanned, from the first; None: all.
        reverse: whether all are scanned from the last to the first.
    """

    def step(carry: Arrays, slices: Arrays) -> tuple[Arrays, Arrays]:
        results = _strong(run(combine, [*carry, *slices, *more]))
        return results[: len(init)], results[len(init) :]

    if places is None:
        carry, stacked = lax.scan(step, tuple(init), tuple(xs), reverse=reverse)
    else:
        carry, stacked = _scan_first(step, tuple(init), xs, jnp.reshape(places, ()))
    return (*carry, *stacked)


def _scan_first(
    step: Callable[[Arrays, Arrays], tuple[Arrays, Arrays]], init: Arrays, xs: Sequence[jax.Array], places: jax.Array
) -> tuple[Arrays, Arrays]:
    """What `lax.scan` gives for the first places; zeros stand behind."""

    def read(place: jax.Array | int) -> Arrays:
        return tuple(lax.dynamic_index_in_dim(x, place, keepdims=False) for x in xs)

    def take(place: jax.Array, state: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        carry, made = step(state[0], read(place))
        stacked = zip(state[1], made, strict=True)
        return carry, tuple(lax.dynamic_update_index_in_dim(all_, one, place, 0) for all_, one in stacked)

    made = jax.eval_shape(step, init, read(0))[1]
    stacked = tuple(jnp.zeros((xs[0].shape[0], *each.shape), each.dtype) for each in made)
    found: tuple[Arrays, Arrays] = lax.fori_loop(jnp.zeros_like(places), places, take, (init, stacked))
    return found


def _map(
    run: Run, body: GraphModule, xs: Sequence[jax.Array], more: Sequence[Value], places: jax.Array | None = None
) -> Values:
    return _scan(run, body, (), xs, more, places)


def _invoke(run: Run, called: GraphModule, identifier: str, *operands: Value) -> Values:
    return run(called, operands)


def _strong(values: Values) -> Arrays:
    """Removes weak types: JAX requires equal types of both branches and of every iteration of a loop."""
    return tuple(jnp.asarray(x, x.dtype) for x in values)  # type: ignore[union-attr]


_BODIES: Mapping[HigherOrderOperator, Callable[..., Values]] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.while_loop: _while_loop,
    torch.ops.higher_order.scan: _scan,
    REVERSED_SCAN: partial(_scan, reverse=True),
    torch.ops.higher_order.map_impl: _map,
    torch.ops.higher_order.invoke_subgraph: _invoke,
}
TARGETS = frozenset(_BODIES)
"""The higher-order operators that are lowered."""

PLAIN = frozenset({operator.getitem, *_SIZES})
"""Functions that a sub-graph may call in addition to ops with bodies and arithmetic on sizes."""
