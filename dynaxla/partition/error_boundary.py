"""Catches exceptions that the package did not expect: the graph or part runs in eager PyTorch instead, with a logged reason.

Beside these boundaries only code that calls a user's (a model, a tokenizer, a class that is pickled) or reads a file that may
hold anything catches every `Exception`, with a comment. Everywhere else an `except` names the exceptions that it expects.
Capturing and compiling only speed up results that eager computes as well, so a fault there must not end the user's
program. Results stay correct, because a caught exception has returned none. Each stage has one boundary:

- the capture of a Dynamo graph (`backend.py`): Dynamo's graph runs in eager, autograd included;
- the rewriting and partitioning of an AOTAutograd graph (`graph_builder.py`): that graph runs in eager;
- the rewriting of a stored graph (`graph_builder.py`): it is captured anew in the call (`aot_cache/kept_capture.py`);
- the padding of a call (`bucketing/padded_graph.py`): its part is compiled per exact shape;
- specializing, padding, lowering, compiling and running a part (`partition/part_runner.py`): the part runs in eager. A part has
  no effect but its results (writes to inputs and eager ops are between parts, no buffer is donated), so it can run again.
  Arguments that eager refuses as well are the caller's fault: the part stays compiled, and eager's error is raised;
- compiling a program in the background (`async_compile/service.py`, `async_compile/worker.py`): calls go on without it;
- an op of the device (`device/op_programs.py`, `device/dynamic_op_graphs.py`, `device/lazy_mode.py`): it runs alone, at fixed
  sizes, or on the host.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from dynaxla.diagnostics import EagerRefusal, FallbackReason, ReasonId, user_frame
from dynaxla.errors import DynaxlaError, UnsupportedError
from dynaxla.observe.recorder import Recorder
from dynaxla.observe.repro import write_graph_repro
from dynaxla.options import Options
from dynaxla.torch_api.aot import (
    find_counting_op,
    find_uncaptured_op,
    is_overwritten,
    lacks_derivative,
    reads_number,
    writes_to_strided_view,
)
from dynaxla.torch_api.dynamo import TorchDynamoException
from dynaxla.torch_api.generators import UntracedDrawError

logger = logging.getLogger("dynaxla")

_OVERWRITTEN = (
    "it writes to a tensor whose old elements its backward reads, or detaches it, so eager's backward raises, too"
)
_NUMBER = "an input of no dims is a size or an index, whose number torch reads while it captures the graph"
_AS_NUMBER = "pass a Python number, or an index of one dim"
_COUNTED = "torch's formula of a gradient has a result of as many elements as values say:"
_UNCAPTURED = "torch captures no graph with an op whose shapes it does not know:"
_STRIDED = "it writes to `as_strided` of a view, which torch captures of a tensor that is no view alone"
_COPY = "write to a copy of the tensor, or compute without gradients"


@dataclass(frozen=True, slots=True)
class Boundary:
    """Reports graphs that run in eager because of an unexpected exception."""

    recorder: Recorder
    options: Options

    def pass_on(self, error: Exception) -> None:
        """
        Raises:
            Exception: `error`, if it is meant for the caller: an error of this package, or one that Dynamo raises to capture
                again.
        """
        if isinstance(error, (DynaxlaError, TorchDynamoException)):
            raise error

    def take(self, error: Exception, what: str, module: GraphModule) -> None:
        """Reports in metrics and log, with the traceback and a repro script, that a graph runs in eager.

        Args:
            what: name of the graph for the user: "a part".
            module: the graph.

        Raises:
            UnsupportedError: options say fallback="error".
            Exception: see `pass_on`.
        """
        self.pass_on(error)
        known = _known(error, what)
        if known is not None:
            self.leave(known, module)
            return
        message = f"{type(error).__name__}: {error}".strip()
        reason = FallbackReason(
            id=ReasonId.INTERNAL_ERROR,
            op=what,
            detail=message.partition("\n")[0][:500],
            hint="a bug of dynaxla or torch: please report it with the repro",
            repro=_repro(error, module),
        )
        self.leave(reason, module, error)

    def leave(self, reason: FallbackReason, module: GraphModule, error: Exception | None = None) -> None:
        """Reports in metrics and log that a graph runs in eager.

        Args:
            reason: the reason; its `op` is the kind of graph.
            error: the exception that caused it, if any.

        Raises:
            UnsupportedError: options say fallback="error".
        """
        calls = [node for node in module.graph.nodes if node.op.startswith("call_")]
        what = f"{reason.op} of {len(calls)} {'call' if len(calls) == 1 else 'calls'}"
        frames = (frame for node in calls if (frame := user_frame(node)) is not None)
        reason = replace(reason, op=what, frame=next(frames, None))
        if self.options.fallback == "error":
            raise UnsupportedError(reasons=(reason,)) from error
        self.recorder.add(eager_ops=len(calls))
        self.recorder.note(fallbacks=str(reason))
        logger.warning("%s", reason, exc_info=error)


def _known(error: Exception, what: str) -> FallbackReason | None:
    """The reason of an exception that says what torch or eager does not take; None for an unexpected one."""
    if isinstance(error, UntracedDrawError):
        return FallbackReason(ReasonId.RANDOM, what, detail=str(error).partition("\n")[0])
    if isinstance(error, EagerRefusal) or lacks_derivative(error):
        return FallbackReason(ReasonId.UNSUPPORTED_CALL, what, detail=str(error))
    if reads_number(error):
        return FallbackReason(ReasonId.READS_VALUE, what, detail=_NUMBER, hint=_AS_NUMBER)
    if (op := find_counting_op(error)) is not None:
        return FallbackReason(ReasonId.DATA_DEPENDENT, what, detail=f"{_COUNTED} {op}")
    if (op := find_uncaptured_op(error)) is not None:
        return FallbackReason(ReasonId.UNSUPPORTED_CALL, what, detail=f"{_UNCAPTURED} {op}")
    if is_overwritten(error):
        return FallbackReason(ReasonId.SIDE_EFFECT, what, detail=_OVERWRITTEN, hint=_COPY)
    if writes_to_strided_view(error):
        return FallbackReason(ReasonId.SIDE_EFFECT, what, detail=_STRIDED)
    return None


def _repro(error: Exception, module: GraphModule) -> str | None:
    try:
        return str(write_graph_repro(module, error))
    except Exception:  # a boundary too: the script is optional, and the graph may break writing it as well
        logger.warning("no repro could be written", exc_info=True)
        return None
