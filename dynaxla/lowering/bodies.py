"""Bodies -> StableHLO functions. The new calls of a module are lowered together: one MLIR context, one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dynaxla.errors import LinkError
from dynaxla.lowering import jax_mlir
from dynaxla.lowering.importer import BodyCall
from dynaxla.runtime.pjrt import cpu_client
from dynaxla.stages import TensorSpec
from dynaxla.torch_api.trees import tree_unflatten

Body = Callable[..., Any]
_Store = WeakKeyDictionary[Body, dict[tuple[str, str], "BodyFunction"]]


@dataclass(frozen=True, slots=True)
class BodyFunction:
    """The body of a call of a body.

    Attributes:
        module: MLIR bytecode of a module that holds it, and whatever functions it calls.
        name: its symbol there.
    """

    module: bytes
    name: str


class BodyFunctions:
    """The functions JAX has lowered, one per distinct call and platform."""

    def __init__(self, bodies: Mapping[Any, Body], lowered: _Store | None = None) -> None:
        self._bodies = bodies
        # By body: what belongs to one compiled graph goes with it.
        self._lowered: _Store = WeakKeyDictionary() if lowered is None else lowered

    def using(self, bodies: Mapping[Any, Body]) -> BodyFunctions:
        """The same store of functions, for these bodies."""
        return BodyFunctions(bodies, self._lowered)

    def __len__(self) -> int:
        return sum(map(len, self._lowered.values()))

    def of(self, calls: Sequence[BodyCall], platform: str) -> list[BodyFunction]:
        """The bodies of some calls.

        Args:
            platform: JAX's name of the platform to lower for.

        Raises:
            LinkError: a body's result differs from torch's in shape or dtype.
        """
        stores = [self._lowered.setdefault(self._bodies[call.target], {}) for call in calls]
        keys = [(platform, call.key) for call in calls]
        new = {key: (store, call) for key, call, store in zip(keys, calls, stores, strict=True) if key not in store}
        if new:
            found = lower_together([(self._bodies[call.target], call) for _, call in new.values()], platform)
            for (key, (store, _)), function in zip(new.items(), found, strict=True):
                store[key] = function
        return [store[key] for store, key in zip(stores, keys, strict=True)]


def lower_together(calls: Sequence[tuple[Body, BodyCall]], platform: str) -> list[BodyFunction]:
    """Lowers calls of bodies as the functions of one module.

    Raises:
        LinkError: a body's result differs from torch's in shape or dtype.
    """
    import jax

    from dynaxla.ops.promotion import JNP_DTYPES

    bodies = [jax.jit(_flat(body, call), keep_unused=True) for body, call in calls]

    def call_each(operands: list[list[Any]]) -> list[list[Any]]:
        return [function(*given) for function, given in zip(bodies, operands, strict=True)]

    operands = [
        [jax.ShapeDtypeStruct(s.shape, JNP_DTYPES[s.dtype]) for s in call.leaves if isinstance(s, TensorSpec)]
        for _, call in calls
    ]
    # Without a default device, lowering would start the user's JAX backends; on a GPU that takes most of its memory.
    with jax.enable_x64(True), jax.default_device(cpu_client().device):
        traced = jax.jit(call_each, keep_unused=True).trace(operands)
        for (_, call), infos in zip(calls, traced.out_info, strict=True):
            _check_results(call, infos)
        module = traced.lower(lowering_platforms=(platform,)).compiler_ir("stablehlo")
    return _functions(module, len(calls))


def _functions(module: Any, count: int) -> list[BodyFunction]:
    """The functions that `main` calls, in order."""
    mlir = jax_mlir.load()
    main = next(f for f in module.body.operations if mlir.symbol_name(f) == "main")
    names = [mlir.callee(operation) for operation in jax_mlir.walk(main.operation) if operation.name == "func.call"]
    assert len(names) == count, "every body is one call"
    bytecode = mlir.bytecode(module)
    return [BodyFunction(bytecode, name) for name in names]


def _flat(body: Body, call: BodyCall) -> Body:
    """The body as a function of the call's tensor operands, which gives its tensor results."""

    def flat(*operands: Any) -> list[Any]:
        given = iter(operands)
        leaves = [next(given) if isinstance(leaf, TensorSpec) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.treespec)
        produced = body(*args, **kwargs)
        results = list(produced) if isinstance(produced, (tuple, list)) else [produced]
        return [r for r, spec in zip(results, call.results, strict=True) if spec is not None]

    return flat


def _check_results(call: BodyCall, infos: Sequence[Any]) -> None:
    expected = [spec for spec in call.results if spec is not None]
    for index, (info, spec) in enumerate(zip(infos, expected, strict=True)):
        if tuple(info.shape) != spec.shape or str(info.dtype) != _jax_name(spec.dtype):
            raise LinkError(
                explanation=f"the body of {call.target} gives {info.dtype}{list(info.shape)} as result {index}, "
                f"torch gives {spec}",
                hint="the body is at fault; report it, or refuse the call in the op's record",
                op=str(call.target),
            )


def _jax_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
