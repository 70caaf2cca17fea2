"""What becomes of a call that would compile, once the user has frozen a compiled function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Literal, get_args

from torch.utils.weak import WeakIdKeyDictionary

from dynaxla.bucket_policy import BucketPolicy
from dynaxla.errors import OptionError
from dynaxla.torch_api.capturing import captured_code, captured_for
from dynaxla.torch_api.dynamo import backend_of, called_backend, forget, name_of

OnMiss = Literal["compile", "error", "eager", "next_bucket", "background"]


class FunctionPolicy:
    """Says what a call does whose program is not compiled yet; one for each call of torch.compile.

    Attributes:
        on_miss: "compile" compiles it and waits; "error" raises; "eager" runs the captured graph in eager PyTorch;
            "next_bucket" runs the smallest larger program there is, else eager; "background" does so while the right
            one is compiled.
        waits: while warm-up calls the function, whether a call waits for a program that is compiled behind it; else None.
        declared: while warm-up calls the function, the policies of the sizes that vary, by the sizes of this call; else None.
    """

    __slots__ = ("__weakref__", "_uncompiled", "declared", "on_miss", "waits")

    def __init__(self) -> None:
        self.on_miss: OnMiss = "compile"
        self.declared: Mapping[int, BucketPolicy] | None = None
        self.waits: bool | None = None
        self._uncompiled: set[CodeType] = set()

    def change(self, on_miss: OnMiss) -> None:
        """Changes what happens. Graphs that were left uncompiled are forgotten, so that Dynamo captures them again."""
        self.on_miss = on_miss
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
    """The gates of all calls of torch.compile, found by the backend object that torch makes for each."""

    _gates: MutableMapping[object, FunctionPolicy] = field(default_factory=WeakIdKeyDictionary)

    def capturing(self) -> FunctionPolicy:
        """The gate of the function whose graph Dynamo is handing over; one of its own outside of Dynamo."""
        backend = captured_for()
        return FunctionPolicy() if backend is None else self._of(backend)

    def calling(self) -> FunctionPolicy | None:
        """The gate of the compiled function that is being called; None in a backward pass.

        Functions compiled alike share the graphs that Dynamo captured, so a graph does not know who calls it.
        """
        backend = _own(called_backend())
        return None if backend is None else self._of(backend)

    def of(self, compiled: Callable[..., object]) -> FunctionPolicy:
        """The gate of what torch.compile returned.

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
        return self._gates.setdefault(backend, FunctionPolicy())


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
