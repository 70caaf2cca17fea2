"""Runs torch-mlir's passes in a child process. `python -m dynaxla.lowering.lowering_worker FD` is the child."""

from __future__ import annotations

import sys

from dynaxla.errors import LoweringCrashed, LoweringFailed, LoweringOutOfMemory, LoweringTimeout, LoweringUnavailable
from dynaxla.isolation.children import (
    ChildDied,
    ChildOutOfMemory,
    ChildProcess,
    ChildTookTooLong,
    ChildUnavailable,
    serve,
)
from dynaxla.lowering import torch_mlir_passes
from dynaxla.lowering.torch_mlir_passes import LoweredModule, LoweringRejected
from dynaxla.options import Limits


class LoweringWorker:
    """Runs torch-mlir's passes; safe from several threads."""

    def __init__(self, *, inject_faults: bool = False) -> None:
        self.child = ChildProcess("dynaxla.lowering.lowering_worker", inject_faults=inject_faults)

    def lower(self, module: bytes, version: str, limits: Limits) -> bytes:
        """Lowers a serialized module of the torch dialect to a StableHLO portable artifact of that version.

        Raises:
            LoweringFailed: torch-mlir rejected the module.
            LoweringCrashed: the child died.
            LoweringTimeout: it took longer than the limit.
            LoweringOutOfMemory: it needed more memory than the limit.
            LoweringUnavailable: the child process cannot be started, or was ended from outside twice.
        """
        try:
            reply: LoweredModule | LoweringRejected = self.child.ask((module, version), limits)
        except ChildUnavailable as error:
            raise LoweringUnavailable(f"the process that lowers {error.why}", error.hint) from None
        except ChildDied as error:
            raise LoweringCrashed(error.exit_status, error.stderr_tail) from None
        except ChildTookTooLong:
            raise LoweringTimeout(limits.seconds) from None
        except ChildOutOfMemory:
            raise LoweringOutOfMemory(limits.memory_bytes) from None
        if isinstance(reply, LoweringRejected):
            raise LoweringFailed(reply.stage, reply.diagnostics)
        return reply.artifact


if __name__ == "__main__":
    serve(sys.argv[1:], lambda request: torch_mlir_passes.lower(*request))
