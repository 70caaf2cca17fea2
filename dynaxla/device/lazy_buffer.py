"""Results of collected ops, which stand in memories where buffers stand, until the ops are run."""

from __future__ import annotations

from typing import Protocol

from dynaxla.errors import ExecutionError
from dynaxla.mesh import Sharding
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.mesh_devices import MeshDevices


class LazyOps(Protocol):
    """Ops that are run together."""

    def finish(self) -> None:
        """Runs them, and gives all results that somebody holds their buffers or their errors."""
        ...


def drop_traceback(error: ExecutionError) -> ExecutionError:
    """The same error, which does not hold what it was raised through: the tensors of the caller among that."""
    return ExecutionError(error.explanation, error.hint)


class LazyBuffer:
    """A result of collected ops. Who holds it wants it: one that nobody holds is not computed.

    Attributes:
        trace: the ops; None as soon as they were run.
        step: the op, by its number.
        result: of its results which.
        sharding: as what it replaces is sharded, which was written in place; None: it replaces nothing over a mesh.
    """

    __slots__ = ("__weakref__", "_buffer", "_error", "result", "sharding", "step", "trace")

    def __init__(self, trace: LazyOps, step: int, result: int) -> None:
        self.trace: LazyOps | None = trace
        self.step = step
        self.result = result
        self.sharding: Sharding | None = None
        self._buffer: Buffer | None = None
        self._error: ExecutionError | None = None

    def settle(self, outcome: Buffer | ExecutionError, devices: MeshDevices | None) -> None:
        """What the run gave.

        Args:
            devices: of the process, where it has several.
        """
        if isinstance(outcome, ExecutionError):
            self._error = drop_traceback(outcome)
        elif devices is None or self.sharding is None:
            self._buffer = outcome
        else:
            self._buffer = devices.reshard(outcome, self.sharding)
        self.trace = None

    @property
    def known(self) -> Buffer | None:
        """The buffer, if it is there."""
        return self._buffer

    def buffer(self) -> Buffer:
        """The buffer; runs the ops if they were not run yet.

        Raises:
            ExecutionError: their run failed.
        """
        trace = self.trace
        if trace is not None:
            trace.finish()
        if self._error is not None:
            raise drop_traceback(self._error)  # what is raised holds the frames that it came through, and so this
        return self._buffer
