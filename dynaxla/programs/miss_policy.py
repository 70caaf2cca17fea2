"""Miss policies: what a call does whose program is not there. Each compiled function has one, and `freeze` swaps it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType
from typing import Any, Literal, Protocol, get_args

from torch.utils.weak import WeakIdKeyDictionary

from dynaxla.bucket_policy import BucketPolicy
from dynaxla.bucketing.shape_keys import ShapeKey
from dynaxla.errors import FrozenError, OptionError
from dynaxla.torch_api.dynamo import backend_of, called_backend, forget, name_of
from dynaxla.torch_api.dynamo_capture import captured_code, get_capturing_backend

OnMiss = Literal["compile", "error", "eager", "next_bucket", "background"]
Values = tuple[int, ...]


class MissedPart(Protocol):
    """A part, as the policies need it in a call whose program is not there.

    What takes the call's arguments gives the part's results.
    """

    def count_miss(self) -> None:
        """Counts the call in `Metrics.misses`."""
        ...

    def compile(self, key: ShapeKey, values: Values, args: Sequence[Any]) -> list[Any]:
        """Compiles the program in the call, and runs it."""
        ...

    def compile_in_background(
        self, key: ShapeKey, values: Values, args: Sequence[Any], *, waits: bool
    ) -> list[Any] | None:
        """Has the program compiled in the background, and runs in a larger bucket's if that is cheaper than eager.

        Args:
            waits: whether to wait for the program; None is returned once it is there, for the call to be made anew.
        """
        ...

    def run_larger(self, values: Values, args: Sequence[Any]) -> list[Any]:
        """Runs the program of the smallest larger bucket that is there, else in eager."""
        ...

    def run_eager(self, values: Values, args: Sequence[Any]) -> list[Any]: ...

    def explain_miss(self, key: ShapeKey) -> str:
        """Which program the call needs, and which are there, for an error's text."""
        ...


class MissPolicy(ABC):
    """What calls do whose program is not there.

    Attributes:
        compiles_graphs: whether a graph that Dynamo captures is compiled.
    """

    compiles_graphs = True

    @abstractmethod
    def serve(self, part: MissedPart, key: ShapeKey, values: Values, args: Sequence[Any]) -> list[Any] | None:
        """The part's results for a call's arguments; None if the call is to be made anew, as the program came meanwhile."""

    def serve_graph(self, graph: Callable[..., Any], args: Sequence[Any]) -> Any:
        """The results of a graph that is not compiled."""
        return graph(*args)

    def during_warmup(self, waits: bool) -> MissPolicy:
        """The policy while warm-up calls the function.

        Args:
            waits: whether calls wait for programs that are compiled in the background.
        """
        return self

    @property
    def on_mesh(self) -> MissPolicy:
        """The policy in a process that made a mesh."""
        return self


@dataclass(frozen=True, slots=True)
class CompileInCall(MissPolicy):
    """Compiles in the call.

    Attributes:
        counts: whether such calls are misses of a frozen function.
    """

    counts: bool = False

    def serve(self, part: MissedPart, key: ShapeKey, values: Values, args: Sequence[Any]) -> list[Any]:
        if self.counts:
            part.count_miss()
        return part.compile(key, values, args)

    def during_warmup(self, waits: bool) -> MissPolicy:
        return self if waits else CompileInBackground()


@dataclass(frozen=True, slots=True)
class CompileInBackground(MissPolicy):
    """Runs what is there while the program is compiled in the background.

    Attributes:
        counts: whether such calls are misses of a frozen function.
        waits: whether calls wait for their programs, as in a warm-up.
    """

    counts: bool = False
    waits: bool = False

    def serve(self, part: MissedPart, key: ShapeKey, values: Values, args: Sequence[Any]) -> list[Any] | None:
        if self.counts:
            part.count_miss()
        return part.compile_in_background(key, values, args, waits=self.waits)

    def during_warmup(self, waits: bool) -> MissPolicy:
        return replace(self, waits=waits)

    @property
    def on_mesh(self) -> MissPolicy:
        """Compiles in the call. What ran op by op meanwhile would give results that are sharded otherwise than the program's,
        and whatever reads these would be compiled for such shardings, too, which do not come again."""
        return CompileInCall(self.counts)


class CompileNothing(MissPolicy):
    """Compiles nothing: every call whose program is not there counts as a miss, and gets a substitute."""

    compiles_graphs = False

    def serve(self, part: MissedPart, key: ShapeKey, values: Values, args: Sequence[Any]) -> list[Any]:
        part.count_miss()
        return self.substitute(part, key, values, args)

    @abstractmethod
    def substitute(self, part: MissedPart, key: ShapeKey, values: Values, args: Sequence[Any]) -> list[Any]:
        """The part's results for a call's arguments, without a new program."""


class RunLargerBucket(CompileNothing):
    """Runs the program of a larger bucket, else in eager."""

    def substitute(self, part: MissedPart, key: ShapeKey, values: Values, args: Sequence[Any]) -> list[Any]:
        return part.run_larger(values, args)


class RunEager(CompileNothing):
    """Runs in eager."""

    def substitute(self, part: MissedPart, key: ShapeKey, values: Values, args: Sequence[Any]) -> list[Any]:
        return part.run_eager(values, args)


class RaiseFrozen(CompileNothing):
    """Raises FrozenError."""

    def substitute(self, part: MissedPart, key: ShapeKey, values: Values, args: Sequence[Any]) -> list[Any]:
        raise FrozenError(f"a call needs a program for {part.explain_miss(key)}")

    def serve_graph(self, graph: Callable[..., Any], args: Sequence[Any]) -> Any:
        raise FrozenError("Dynamo captured a new graph")


DEFAULTS: Mapping[str, MissPolicy] = {"now": CompileInCall(), "behind": CompileInBackground()}
"""By the option `compile`."""

FROZEN: Mapping[OnMiss, MissPolicy | None] = {
    "compile": None,
    "error": RaiseFrozen(),
    "eager": RunEager(),
    "next_bucket": RunLargerBucket(),
    "background": CompileInBackground(counts=True),
}
"""By the argument `on_miss` of `freeze`; None: as the option `compile` says."""


class FunctionPolicy:
    """What calls of one compiled function do on a miss; one for each call of torch.compile.

    Attributes:
        waits: while warm-up calls the function, whether a call waits for a program that is compiled in the background; else
            None.
        declared: while warm-up calls the function, the policies of the sizes that vary, by the sizes of this call; else None.
    """

    __slots__ = ("__weakref__", "_frozen", "_uncompiled", "declared", "waits")

    def __init__(self) -> None:
        self.declared: Mapping[int, BucketPolicy] | None = None
        self.waits: bool | None = None
        self._frozen: MissPolicy | None = None
        self._uncompiled: set[CodeType] = set()

    def on_miss(self, default: MissPolicy) -> MissPolicy:
        """The policy of a call that is under way.

        Args:
            default: that of a function that is not frozen.
        """
        policy = self._frozen or default
        return policy if self.waits is None else policy.during_warmup(self.waits)

    def freeze(self, on_miss: OnMiss) -> None:
        """Changes the policy. Graphs that were left uncompiled are forgotten, so that Dynamo captures them again."""
        self._frozen = FROZEN[on_miss]
        while self._uncompiled:
            forget(self._uncompiled.pop())

    def leave_uncompiled(self) -> Callable[[], None]:
        """Remembers that the graph Dynamo is handing over is left uncompiled. Returns what makes Dynamo forget it at once."""
        code = captured_code()
        assert code is not None, "only a graph that Dynamo hands over can be left uncompiled"
        self._uncompiled.add(code)
        return partial(forget, code)


@dataclass(frozen=True, slots=True)
class FunctionPolicies:
    """The policies of all calls of torch.compile, found by the backend object that torch makes for each."""

    _policies: MutableMapping[object, FunctionPolicy] = field(default_factory=WeakIdKeyDictionary)

    def find_capturing(self) -> FunctionPolicy:
        """The policy of the function whose graph Dynamo is handing over; one of its own outside of Dynamo."""
        backend = get_capturing_backend()
        return FunctionPolicy() if backend is None else self._of(backend)

    def find_called(self) -> FunctionPolicy | None:
        """The policy of the compiled function that is being called; None in a backward pass.

        Functions compiled alike share the graphs that Dynamo captured, so a graph does not know who calls it.
        """
        backend = _own(called_backend())
        return None if backend is None else self._of(backend)

    def of(self, compiled: Callable[..., object]) -> FunctionPolicy:
        """The policy of what torch.compile returned.

        Raises:
            OptionError: it is something else.
        """
        backend = _own(backend_of(compiled))
        if backend is None:
            raise OptionError(
                f"{compiled!r} is not compiled by dynaxla", 'give what torch.compile(..., backend="dynaxla") returned'
            )
        return self._of(backend)

    def _of(self, backend: object) -> FunctionPolicy:
        return self._policies.setdefault(backend, FunctionPolicy())


def is_compiled(function: object) -> bool:
    """Whether calls of a function or module go to this package by way of torch.compile."""
    return _own(backend_of(function)) is not None


def check_on_miss(on_miss: object) -> None:
    """Raises OptionError unless it is one of `OnMiss`."""
    if on_miss not in get_args(OnMiss):
        raise OptionError(f"on_miss={on_miss!r} is not known", f"write one of {', '.join(get_args(OnMiss))}")


def _own(backend: object) -> object:
    """A backend object if it is this package's; else None."""
    return backend if name_of(backend) == "dynaxla" else None
