"""Every error this package raises.

    DynaxlaError
    ├── OptionError (ValueError)                DX100  an option is unknown, of the wrong type, or contradicts another
    ├── VersionError (ImportError)              DX110  an installed library is outside the supported range
    ├── TargetError                             DX120  the device or topology does not exist, or is not available here
    ├── BucketError (ValueError)                DX130  a size is above the declared maximum
    ├── FrozenError                             DX140  a frozen function would have to compile
    ├── ForkError                               DX150  a forked child cannot use a device that its parent uses
    ├── ShardingError (ValueError)              DX160  a mesh or a sharding does not fit the devices or the tensor
    ├── NotComputedError                        DX170  compiling for a device elsewhere computes nothing, and a value is needed
    ├── ProfileError                            DX180  the devices cannot be profiled in this process
    ├── UnsupportedError                        DX200  options say fallback="error", and an op or a graph cannot be compiled
    ├── LoweringError                           DX300  torch-mlir could not lower a graph
    │   ├── LoweringFailed                      DX301  torch-mlir rejected the graph
    │   ├── LoweringCrashed                     DX302  torch-mlir crashed
    │   ├── LoweringTimeout                     DX303  torch-mlir took longer than the limit
    │   ├── LoweringOutOfMemory                 DX304  torch-mlir needed more memory than the limit
    │   └── LoweringUnavailable                 DX305  the process for lowering could not start, or was ended from outside
    ├── LinkError                               DX310  the results of an op's body differ from torch's
    ├── CompileError                            DX320  XLA rejected the program
    │   ├── CompileCrashed                      DX321  XLA's compiler crashed
    │   ├── CompileTimeout                      DX322  XLA's compiler took longer than the limit
    │   ├── CompileOutOfMemory                  DX323  XLA's compiler needed more memory than the limit
    │   └── CompileUnavailable                  DX324  nothing can be compiled or loaded: no process, no memory mappings
    ├── ExecutionError                          DX400  a run failed
    ├── DivergenceError                         DX410  options say verify_action="raise", and results are not eager's
    ├── ComparisonError (ValueError)            DX420  two results have no common structure, or no reference can be computed
    ├── PackageError                            DX500  a compiled function cannot be saved, or its saved form cannot be used
    ├── DistributedError (RuntimeError)          DX600  processes cannot compute together
    │   ├── ProcessLost                         DX610  a process ended, or did not come
    │   ├── ProgramsDiffer                      DX620  two processes wait for each other with different programs
    │   └── ValuesDiffer                        DX630  processes give different values for one tensor of a mesh
    └── ServingError                            DX700  a server did not serve a request
        ├── RequestRejected (ValueError)        DX710  the request is invalid and can never be served
        │   └── RequestTooLarge                 DX711  the request's size is above the largest served
        ├── QueueFull                           DX720  too many requests are queued
        ├── DeadlineExceeded (TimeoutError)     DX730  the answer would come after the request's deadline
        ├── NotServing                          DX740  the server is starting, draining or closed
        └── NotNumbers                          DX750  the model's results for a request are not numbers

Lowering, link and compile errors are caught: the ops that caused them run in eager, with a reason. So do graphs and parts that
raised any other exception (partition/error_boundary.py). Under fallback="error" all of these reach the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self


class DynaxlaError(Exception):
    """Base class of the package's errors.

    Attributes:
        id: stable identifier of the kind of error.
        explanation: the cause.
        hint: what the user can do about it.
        frame: the user's source line, if known.
        dump: file with the details, if one was written.
    """

    id: ClassVar[str] = "DX000"

    def __init__(self, explanation: str, hint: str = "", *, frame: str | None = None, dump: Path | None = None) -> None:
        self.explanation, self.hint, self.frame, self.dump = explanation, hint, frame, dump
        lines = [f"{self.id} {explanation}"]
        lines += [f"  {name}: {text}" for name, text in (("at", frame), ("hint", hint), ("details", dump)) if text]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the finished error: the subclasses take different arguments, none of which is the message."""
        return self._revive, (self.args, self.__dict__)

    @classmethod
    def _revive(cls, args: tuple[Any, ...], attributes: dict[str, Any]) -> Self:
        error = cls.__new__(cls)
        error.args = args
        error.__dict__.update(attributes)
        return error


class OptionError(DynaxlaError, ValueError):
    id = "DX100"


class VersionError(DynaxlaError, ImportError):
    id = "DX110"


class TargetError(DynaxlaError):
    id = "DX120"


class BucketError(DynaxlaError, ValueError):
    id = "DX130"


class FrozenError(DynaxlaError):
    id = "DX140"

    def __init__(self, explanation: str) -> None:
        hint = "warm up with such arguments before dynaxla.freeze, or freeze with another on_miss"
        super().__init__(f"{explanation}, and nothing may compile after dynaxla.freeze", hint)


class ForkError(DynaxlaError):
    """Attributes:
    platform: JAX's name of the device's platform: "cuda", "tpu".
    """

    id = "DX150"

    def __init__(self, platform: str) -> None:
        self.platform = platform
        hint = 'start it by multiprocessing\'s "spawn" or "forkserver", or fork before the device is first used'
        super().__init__(f"this process was forked from one that holds the {platform} device, and cannot use it", hint)


class ShardingError(DynaxlaError, ValueError):
    id = "DX160"


class NotComputedError(DynaxlaError):
    """Compiling for a device elsewhere computes nothing, and the program needs a value to go on."""

    id = "DX170"


class ProfileError(DynaxlaError):
    id = "DX180"


class UnsupportedError(DynaxlaError):
    """Has one reason for each op that cannot be compiled; `str` of a reason is its text for the user."""

    id = "DX200"

    def __init__(self, reasons: Sequence[object]) -> None:
        self.reasons = tuple(reasons)
        listed = "\n".join(str(reason) for reason in self.reasons)
        hint = "options={'fallback': 'eager'} runs them in eager PyTorch"
        super().__init__(f"{len(self.reasons)} op(s) cannot be compiled:\n{listed}", hint)


class LoweringError(DynaxlaError):
    id = "DX300"


class LoweringFailed(LoweringError):
    id = "DX301"

    def __init__(self, stage: str, diagnostics: str) -> None:
        self.stage = stage
        self.diagnostics = diagnostics
        super().__init__(
            f"torch-mlir rejected the graph in its {stage} stage: {diagnostics.strip()[:1000]}",
            hint="DYNAXLA_DEBUG=dump=DIR writes its module to a file",
        )


class LoweringCrashed(LoweringError):
    id = "DX302"

    def __init__(self, exit_status: int, stderr_tail: str) -> None:
        self.exit_status = exit_status
        self.stderr_tail = stderr_tail
        last = stderr_tail.strip().splitlines()[-1:] or ["nothing"]
        super().__init__(
            f"torch-mlir died with exit status {exit_status}; its last output: {last[0][:500]}",
            hint="only a child process died; a repro script was written if the op that causes it was found",
        )


class LoweringTimeout(LoweringError):
    id = "DX303"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"lowering took longer than {seconds:g} s", hint="raise options={'lowering_timeout_s': ...}")


class LoweringOutOfMemory(LoweringError):
    id = "DX304"

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        wanted = f"lowering needed more than {limit_bytes / 2**30:.1f} GiB of memory"
        super().__init__(wanted, hint="raise options={'compiler_memory_bytes': ...}")


class LoweringUnavailable(LoweringError):
    id = "DX305"


class LinkError(DynaxlaError):
    """Attributes:
    op: the overload whose body caused the error; empty if it is not known.
    """

    id = "DX310"

    def __init__(
        self, explanation: str, hint: str = "", *, op: str = "", frame: str | None = None, dump: Path | None = None
    ) -> None:
        self.op = op
        super().__init__(explanation, hint, frame=frame, dump=dump)


class CompileError(DynaxlaError):
    id = "DX320"


class CompileCrashed(CompileError):
    id = "DX321"

    @classmethod
    def of(cls, exit_status: int, stderr_tail: str) -> Self:
        said = [line for line in stderr_tail.splitlines() if "Check failed" in line or "LLVM ERROR" in line]
        last = (said or stderr_tail.strip().splitlines() or ["nothing"])[-1]
        return cls(f"XLA's compiler died with exit status {exit_status}; its last output: {last[:500]}")


class CompileTimeout(CompileError):
    id = "DX322"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"XLA took longer than {seconds:g} s", hint="raise options={'compile_timeout_s': ...}")


class CompileOutOfMemory(CompileError):
    id = "DX323"

    def __init__(self, limit_bytes: int) -> None:
        wanted = f"XLA's compiler needed more than {limit_bytes / 2**30:.1f} GiB of memory"
        super().__init__(wanted, hint="raise options={'compiler_memory_bytes': ...}")


class CompileUnavailable(CompileError):
    id = "DX324"


class ExecutionError(DynaxlaError):
    id = "DX400"


class DivergenceError(DynaxlaError):
    id = "DX410"


class ComparisonError(DynaxlaError, ValueError):
    id = "DX420"


class PackageError(DynaxlaError):
    id = "DX500"


class DistributedError(DynaxlaError, RuntimeError):
    id = "DX600"


class ProcessLost(DistributedError):
    """Attributes:
    ranks: of the processes that are lost; empty if they are not known.
    """

    id = "DX610"

    def __init__(self, ranks: tuple[int, ...], because: str) -> None:
        self.ranks = ranks
        named = f"rank {', '.join(map(str, ranks))}" if ranks else "another process"
        super().__init__(f"{named} is lost: {because}", "look at its own output; start all processes again")


class ProgramsDiffer(DistributedError):
    """Attributes:
    rank, other: two processes that wait for each other.
    """

    id = "DX620"

    def __init__(self, rank: int, program: str, other: int, others: str) -> None:
        self.rank, self.other = rank, other
        hint = "all processes must run the same programs, of the same sizes, in the same order, and read split tensors together"
        super().__init__(f"rank {rank} waits with {program}, rank {other} with {others}", hint)

    @classmethod
    def among(cls, rank: int, other: int, count: int) -> Self:
        """Of two processes that ran other programs, or sizes, by their `count`th."""
        return cls(rank, "its programs", other, f"other programs, or sizes, among its first {count}")


class ValuesDiffer(DistributedError):
    """Attributes:
    rank, other: two processes that gave other values for one tensor, seed or number.
    """

    id = "DX630"

    def __init__(self, rank: int, other: int, which: str) -> None:
        self.rank, self.other = rank, other
        hint = (
            "all processes give the same weights, seeds and numbers: torch.manual_seed with one number in all of them"
        )
        super().__init__(f"rank {rank} and rank {other} put other values on the mesh: {which}", hint)

    @classmethod
    def among(cls, rank: int, other: int, count: int) -> Self:
        """Of two processes whose first `count` values are not the same."""
        return cls(rank, other, f"among their first {count} tensors, seeds and numbers")


class ServingError(DynaxlaError):
    id = "DX700"


class RequestRejected(ServingError, ValueError):
    id = "DX710"


class RequestTooLarge(RequestRejected):
    """Attributes:
    size, limit: the request's size and the largest served size, in elements.
    """

    id = "DX711"

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"size {size} is above {limit}, the largest served", "send a shorter request, or split it")


class QueueFull(ServingError):
    """Attributes:
    waiting: number of requests in the queue.
    retry_after_s: seconds after which the queue is likely to have room.
    """

    id = "DX720"

    def __init__(self, waiting: int, retry_after_s: float) -> None:
        self.waiting, self.retry_after_s = waiting, retry_after_s
        super().__init__(f"{waiting} requests are waiting already", hint=f"send it again in {retry_after_s:.3g} s")


class DeadlineExceeded(ServingError, TimeoutError):
    id = "DX730"

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        super().__init__(f"not answered within {deadline_s:g} s", "give it more time, or send fewer requests at once")


class NotServing(ServingError):
    """Attributes:
    state: the server's state: "starting", "draining", "closed".
    """

    id = "DX740"

    def __init__(self, state: str, because: str = "") -> None:
        self.state = state
        hint = "wait until it is ready" if state == "starting" else "send it to another server"
        super().__init__(f"the server is {state} and takes no requests{because and f' ({because})'}", hint=hint)


class NotNumbers(ServingError):
    id = "DX750"


def make_raising(error: Exception) -> Callable[..., Any]:
    """Makes a function that raises an error; without its traceback, to which every call would add its frames."""

    def fail(*args: Any) -> Any:
        raise error.with_traceback(None)

    return fail
