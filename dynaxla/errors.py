"""Every error this package raises.

    DynaxlaError
    ├── OptionError (ValueError)                DX100  an option is unknown, of the wrong type, or contradicts another
    ├── VersionError (ImportError)              DX110  an installed library is outside the supported range
    ├── TargetError                             DX120  no such device or topology, or not here
    ├── BucketError (ValueError)                DX130  a size is above the declared maximum
    ├── FrozenError                             DX140  a frozen function would have to compile
    ├── ForkError                               DX150  a forked child cannot use the device that its parent holds
    ├── UnsupportedError                        DX200  options say fallback="error" and something cannot be compiled
    ├── LoweringError                           DX300  torch-mlir could not lower a graph
    │   ├── LoweringFailed                      DX301  it rejected the graph
    │   ├── LoweringCrashed                     DX302  it died
    │   ├── LoweringTimeout                     DX303  it took longer than the limit
    │   ├── LoweringOutOfMemory                 DX304  it wanted more memory than the limit
    │   └── LoweringUnavailable                 DX305  the process that lowers could not start
    ├── LinkError                               DX310  an op's body does not give what torch gives
    ├── CompileError                            DX320  XLA refused the program
    │   ├── CompileCrashed                      DX321  XLA's compiler died of it
    │   ├── CompileTimeout                      DX322  it took longer than the limit
    │   ├── CompileOutOfMemory                  DX323  it wanted more memory than the limit
    │   └── CompileUnavailable                  DX324  nothing can be compiled or loaded: no process, no memory mappings
    ├── ExecutionError                          DX400  a run failed
    ├── PackageError                            DX500  what was saved of a compiled function cannot be used, or cannot be saved
    └── ServingError                            DX700  a server did not serve a request
        ├── RequestRejected (ValueError)        DX710  the request can never be served as it is
        │   └── RequestTooLarge                 DX711  its size is above the largest that is served
        ├── QueueFull                           DX720  too many requests are waiting
        ├── DeadlineExceeded (TimeoutError)     DX730  its answer would come too late
        ├── NotServing                          DX740  the server is starting, draining or closed
        └── NotNumbers                          DX750  the model's results for a request are not numbers

Lowering, link and compile errors are caught: the ops at fault run in eager, with a reason. So do graphs and parts on which
an exception that is none of these was raised (partition/error_boundary.py). Under fallback="error" they reach the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self


class DynaxlaError(Exception):
    """Something this package cannot do.

    Attributes:
        id: stable identifier of the kind of error.
        explanation: what was wrong.
        hint: what to do about it.
        frame: the user's source line, if one is known.
        dump: where the details were written, if they were.
    """

    id: ClassVar[str] = "DX000"

    def __init__(self, explanation: str, hint: str = "", *, frame: str | None = None, dump: Path | None = None) -> None:
        self.explanation, self.hint, self.frame, self.dump = explanation, hint, frame, dump
        lines = [f"{self.id} {explanation}"]
        lines += [f"  {name}: {text}" for name, text in (("at", frame), ("hint", hint), ("details", dump)) if text]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the finished error: the kinds take different arguments, and none of them the text."""
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
        hint = "warm up with such sizes before dynaxla.freeze, or freeze with another on_miss"
        super().__init__(f"{explanation}, and nothing may compile after dynaxla.freeze", hint)


class ForkError(DynaxlaError):
    """Attributes:
    platform: JAX's name of whose device it is: "cuda", "tpu".
    """

    id = "DX150"

    def __init__(self, platform: str) -> None:
        self.platform = platform
        hint = 'start it by multiprocessing\'s "spawn" or "forkserver", or fork before the device is first used'
        super().__init__(f"this process was forked from one that holds the {platform} device, and cannot use it", hint)


class UnsupportedError(DynaxlaError):
    """Carries one reason per op that cannot be compiled; `str` of a reason is a readable paragraph."""

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
            hint="DYNAXLA_DEBUG=dump=DIR writes the module",
        )


class LoweringCrashed(LoweringError):
    id = "DX302"

    def __init__(self, exit_status: int, stderr_tail: str) -> None:
        self.exit_status = exit_status
        self.stderr_tail = stderr_tail
        last = stderr_tail.strip().splitlines()[-1:] or ["nothing"]
        super().__init__(
            f"torch-mlir died with exit status {exit_status}; the last it said: {last[0][:500]}",
            hint="the process that died was a child; a repro script was written if the op at fault was found",
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
        wanted = f"lowering wanted more than {limit_bytes / 2**30:.1f} GiB of memory"
        super().__init__(wanted, hint="raise options={'compiler_memory_bytes': ...}")


class LoweringUnavailable(LoweringError):
    id = "DX305"

    def __init__(self, exit_status: int, stderr_tail: str) -> None:
        super().__init__(*_not_started("lowers", exit_status, stderr_tail))


class LinkError(DynaxlaError):
    """Attributes:
    op: the overload whose body is at fault; empty where no single one is.
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
        return cls(f"XLA's compiler died with exit status {exit_status}; the last it said: {last[:500]}")


class CompileTimeout(CompileError):
    id = "DX322"

    def __init__(self, seconds: float) -> None:
        super().__init__(f"XLA took longer than {seconds:g} s", hint="raise options={'compile_timeout_s': ...}")


class CompileOutOfMemory(CompileError):
    id = "DX323"

    def __init__(self, limit_bytes: int) -> None:
        wanted = f"XLA's compiler wanted more than {limit_bytes / 2**30:.1f} GiB of memory"
        super().__init__(wanted, hint="raise options={'compiler_memory_bytes': ...}")


class CompileUnavailable(CompileError):
    id = "DX324"

    @classmethod
    def of(cls, exit_status: int, stderr_tail: str) -> Self:
        return cls(*_not_started("compiles", exit_status, stderr_tail))


def _not_started(does: str, exit_status: int, stderr_tail: str) -> tuple[str, str]:
    """Explanation and hint."""
    last = (stderr_tail.strip().splitlines()[-1:] or ["nothing"])[0][:500]
    return (
        f"the process that {does} ended with exit status {exit_status} before it took a request; the last it said: {last}",
        "it runs this Python with this process's sys.path: look for a module there that hides one of Python's own",
    )


class ExecutionError(DynaxlaError):
    id = "DX400"


class PackageError(DynaxlaError):
    id = "DX500"


class ServingError(DynaxlaError):
    id = "DX700"


class RequestRejected(ServingError, ValueError):
    id = "DX710"


class RequestTooLarge(RequestRejected):
    """Attributes:
    size, limit: the request's size and the largest that is served, in elements.
    """

    id = "DX711"

    def __init__(self, size: int, limit: int) -> None:
        self.size, self.limit = size, limit
        super().__init__(f"size {size} is above {limit}, the largest served", "send a shorter request, or split it")


class QueueFull(ServingError):
    """Attributes:
    waiting: requests in the queue.
    retry_after_s: seconds after which there is likely to be room.
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
    state: what the server does instead.
    """

    id = "DX740"

    def __init__(self, state: str, because: str = "") -> None:
        self.state = state
        hint = "wait until it is ready" if state == "starting" else "send it to another server"
        super().__init__(f"the server is {state} and takes no requests{because and f' ({because})'}", hint=hint)


class NotNumbers(ServingError):
    id = "DX750"
