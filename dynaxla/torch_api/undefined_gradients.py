"""Gradients that autograd calls undefined: those of a graph's results that nothing is differentiated of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch._dynamo import config as _dynamo_config
from torch._functorch._aot_autograd.runtime_wrappers import _AOTDispatchAutogradFunctionFactory as _Factory
from torch._functorch._aot_autograd.schemas import SubclassCreationMeta
from torch.distributed.tensor import DTensor

from dynaxla.torch_api.capture_cache import CachedCode
from dynaxla.torch_api.dynamo import find_undisabled


@dataclass(frozen=True, slots=True)
class Undefined:
    """Stands for an undefined gradient among the arguments of a compiled backward.

    Attributes:
        node: autograd's node of the graph.
        position: of the result of the node.
    """

    node: Any
    position: int

    def make_zeros(self) -> torch.Tensor:
        """Zeros of the shape, dtype and device of the result. Relies on `_input_metadata` of a node."""
        result = self.node._input_metadata[self.position]
        return torch.zeros(result.shape, dtype=result.dtype, device=result.device)


_captures: ContextVar[bool] = ContextVar("captures", default=False)
_positions: ContextVar[frozenset[int]] = ContextVar("positions", default=frozenset())


@contextmanager
def take_undefined() -> Iterator[None]:
    """Context in which the captured backwards are compiled by what takes an `Undefined`."""
    token = _captures.set(True)
    try:
        yield
    finally:
        _captures.reset(token)


def find_undefined() -> frozenset[int]:
    """The positions of undefined gradients among the arguments of the backward that is called, while torch compiles it for
    that call; none where it is compiled ahead."""
    return _positions.get()


@cache
def leave_undefined() -> None:
    """Has the backwards of graphs that `take_undefined` captures, and of loaded ones, get an `Undefined` for every undefined
    gradient, once per process.

    torch fills such gradients with zeros, and the backward of a graph computes with them what eager PyTorch does not compute
    at all: the zero times an infinite slope is NaN, and parameters that only an unused result depends on get gradients of
    zeros where eager has none.

    These backwards write to no saved value, which AOTAutograd may have allowed a backward that it compiled ahead: it would then
    refuse `retain_graph=True`.

    torch keeps filling in while `compiled_autograd` is set, which traces backwards with the zeros; where a result is a tensor
    subclass, of whose gradient it takes the pieces; and where an input is one other than DTensor.

    Relies on `_AOTDispatchAutogradFunctionFactory`: on its `spec`, of which `fw_metadata.bw_donated_idxs` says what is given
    away; on the class that `build` returns, with `forward` and
    `_bwd_fn` (called with a list of the list of gradients, the node, and the parts, of which the third is called with the node
    and the list of the compiled backward's arguments), on `compiled_bw`, which is None before that is compiled, on a prologue
    that hands on what is no tensor, on `_bw_epilogue_fn`, which makes DTensors of results, and on `grad_input_metas`, which has
    where.
    """
    build = _Factory.build

    @wraps(build)
    def build_class(self: Any) -> Any:
        if _captures.get():
            self.spec.fw_metadata.bw_donated_idxs = []
        made = build(self)
        if _takes_undefined(self.spec):
            _leave_undefined(made)
            if self.spec.maybe_subclass_meta is not None:
                _leave_pieces_undefined(made, self.spec.maybe_subclass_meta.grad_input_metas)
        return made

    _Factory.build = build_class  # type: ignore[method-assign]


def _takes_undefined(spec: Any) -> bool:
    is_loaded = isinstance(find_undisabled(spec.compiled_bw_func), CachedCode)
    if not (_captures.get() or is_loaded) or _dynamo_config.compiled_autograd:
        return False
    parts = spec.maybe_subclass_meta
    return parts is None or (
        not any(isinstance(each, SubclassCreationMeta) for each in spec.fw_metadata.subclass_tangent_meta)
        and all(getattr(each, "original_subclass_type", DTensor) is DTensor for each in parts.grad_input_metas)
    )


def _leave_undefined(made: Any) -> None:
    forward, run = made.forward, made._bwd_fn

    def run_forward(ctx: Any, *args: Any) -> Any:
        ctx.set_materialize_grads(False)
        return forward(ctx, *args)

    def run_backward(
        arguments: tuple[list[Any]], ctx: Any, prologue: Any, add_states: Any, compute: Callable[..., Any], *rest: Any
    ) -> Any:
        gradients = arguments[0]
        undefined = [i for i, gradient in enumerate(gradients) if gradient is None]
        for i in undefined:
            gradients[i] = Undefined(ctx, i)
        if undefined and made.compiled_bw is None:
            compute = _with_positions(compute)
        return run(arguments, ctx, prologue, add_states, compute, *rest)

    made.forward, made._bwd_fn = staticmethod(run_forward), staticmethod(run_backward)


def _with_positions(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the function of the node and of a compiled backward's arguments one in which `find_undefined` knows the latter."""

    def compute_backward(ctx: Any, args: list[Any]) -> Any:
        token = _positions.set(frozenset(i for i, each in enumerate(args) if type(each) is Undefined))
        try:
            return compute(ctx, args)
        finally:
            _positions.reset(token)

    return compute_backward


def _leave_pieces_undefined(made: Any, described: Sequence[Any]) -> None:
    """Has a DTensor of no piece be None."""
    finish = made._bw_epilogue_fn
    starts = {
        i: each.flat_tensor_start_idx for i, each in enumerate(described) if isinstance(each, SubclassCreationMeta)
    }

    def finish_backward(results: Sequence[Any], *given: Any) -> tuple[Any, ...]:
        pieces = list(results)
        undefined = [i for i, start in starts.items() if pieces[start] is None]
        for i in undefined:
            pieces[starts[i]] = torch.empty(0)
        gradients = list(finish(pieces, *given))
        for i in undefined:
            gradients[i] = None
        return tuple(gradients)

    made._bw_epilogue_fn = staticmethod(finish_backward)
