"""Lowers JAX bodies to StableHLO functions. All new calls of a program are lowered together, in one MLIR module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynaxla.errors import LinkError
from dynaxla.lowering.call_graph import OpCall
from dynaxla.lowering.stablehlo_functions import FunctionFinisher, StablehloFunction
from dynaxla.lowering.stablehlo_module import StablehloModules, walk
from dynaxla.ops.record import Body
from dynaxla.runtime.pjrt_clients import cpu_client
from dynaxla.torch_api.pytree import tree_unflatten
from dynaxla.types import TensorSpec


def lower_bodies(calls: Sequence[tuple[Body, OpCall]], finisher: FunctionFinisher) -> list[StablehloFunction]:
    """Lowers calls by their bodies. Returns their functions.

    Raises:
        LinkError: a body's result differs from torch's in shape or dtype.
    """
    import jax

    from dynaxla.ops.promotion import JNP_DTYPES

    bodies = [jax.jit(_flat(body, call), keep_unused=True) for body, call in calls]

    def call_each(operands: list[list[Any]]) -> list[list[Any]]:
        return [function(*given) for function, given in zip(bodies, operands, strict=True)]

    operands = [[jax.ShapeDtypeStruct(s.shape, JNP_DTYPES[s.dtype]) for s in call.operands] for _, call in calls]
    # Without a default device, lowering would start the user's JAX backends; on a GPU that takes most of its memory.
    with jax.enable_x64(True), jax.default_device(cpu_client().device):
        traced = jax.jit(call_each, keep_unused=True).trace(operands)
        for (_, call), infos in zip(calls, traced.out_info, strict=True):
            _check_results(call, infos)
        module = traced.lower(lowering_platforms=(finisher.platform,)).compiler_ir("stablehlo")
    return [
        _finished(finisher, module, name, call)
        for name, (_, call) in zip(_names(finisher.mlir, module), calls, strict=True)
    ]


def _finished(finisher: FunctionFinisher, module: Any, name: str, call: OpCall) -> StablehloFunction:
    function = finisher.finish(module, name, call)
    assert function is not None, "the results were compared with torch's"
    return function


def _names(mlir: StablehloModules, module: Any) -> list[str]:
    """The names of the functions that `main` calls, in order; each body is one call."""
    main = next(f for f in module.body.operations if mlir.symbol_name(f) == "main")
    return [mlir.callee(operation) for operation in walk(main.operation) if operation.name == "func.call"]


def _flat(body: Body, call: OpCall) -> Body:
    """The body as a function from the call's tensor operands to its tensor results."""
    from dynaxla.ops.promotion import round_float

    def flat(*operands: Any) -> list[Any]:
        given = iter(operands)
        leaves = [next(given) if isinstance(leaf, TensorSpec) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.treespec)
        produced = body(*args, **kwargs)
        results = list(produced) if isinstance(produced, (tuple, list)) else [produced]
        return [round_float(r, spec.dtype) for r, spec in zip(results, call.results, strict=True) if spec is not None]

    return flat


def _check_results(call: OpCall, infos: Sequence[Any]) -> None:
    for index, (info, spec) in enumerate(zip(infos, call.tensors, strict=True)):
        if tuple(info.shape) != spec.shape or str(info.dtype) != str(spec.dtype).removeprefix("torch."):
            raise LinkError(
                explanation=f"the body of {call.target} gives {info.dtype}{list(info.shape)} as result {index}, "
                f"torch gives {spec}",
                hint="the body is at fault; report it, or refuse the call in the op's record",
                op=str(call.target),
            )
