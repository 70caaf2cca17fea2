"""Where an exception of this package's own ends: what it stopped runs in eager PyTorch, which says so.

Everywhere else an `except` names what it expects. At these borders alone every `Exception` is caught: capturing and
compiling are a detour to numbers that eager gives as well, so a fault on the way must not be the end of the user's
program. Nothing wrong can come of it, as what is caught has given no result. There is one border per stage:

- a graph of Dynamo's, while it is captured (`backend.py`): Dynamo's graph runs in eager, autograd included;
- a graph of AOTAutograd's, while it is rewritten and cut (`backend.py`): that graph runs in eager;
- a call, while it is padded (`bucketing/padded_graph.py`): its part is compiled per exact shape;
- a part, while its sizes are looked at and it is padded, lowered, compiled and run (`partition/part_runner.py`): the
part runs in
  eager. A part has no effect but its results (writes into inputs and eager ops are between parts, no buffer is given away), so
  that it may run again;
- a program that is compiled in the background (`async_compile/service.py`): they go on without it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from dynaxla.diagnostics import FallbackReason, ReasonId, user_frame
from dynaxla.errors import DynaxlaError, UnsupportedError
from dynaxla.observe.recorder import Recorder
from dynaxla.observe.repro import write_graph_repro
from dynaxla.options import Options
from dynaxla.torch_api.dynamo import TorchDynamoException

logger = logging.getLogger("dynaxla")


@dataclass(frozen=True, slots=True)
class Boundary:
    """Reports what runs in eager because of an exception that nobody expected."""

    recorder: Recorder
    options: Options

    def take(self, error: Exception, what: str, module: GraphModule) -> None:
        """Says in metrics and log, with the traceback and a script, that a graph runs in eager.

        Args:
            what: the graph, to be read by the user: "a part".
            module: the graph.

        Raises:
            UnsupportedError: options say fallback="error".
            Exception: the given one, if it is meant for the caller: an error of this package, or one that Dynamo raises to
                capture anew.
        """
        if isinstance(error, (DynaxlaError, TorchDynamoException)):
            raise error
        said = f"{type(error).__name__}: {error}".strip()
        reason = FallbackReason(
            id=ReasonId.INTERNAL_ERROR,
            op=what,
            detail=said.partition("\n")[0][:500],
            hint="a fault of dynaxla's or torch's own, worth reporting with the repro",
            repro=_repro(error, module),
        )
        self.leave(reason, module, error)

    def leave(self, reason: FallbackReason, module: GraphModule, error: Exception | None = None) -> None:
        """Says in metrics and log that a graph runs in eager.

        Args:
            reason: why, with what kind of graph for its op.
            error: what stopped it, if that is an exception.

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
        self.recorder.note_fallback(str(reason))
        logger.warning("%s", reason, exc_info=error)


def _repro(error: Exception, module: GraphModule) -> str | None:
    try:
        return str(write_graph_repro(module, error))
    except Exception:  # here too: the script is a service, and a graph that broke one thing may break another
        logger.warning("no repro could be written", exc_info=True)
        return None
