"""The exception tree is what its docstring draws, and every message says what to do."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from dynaxla import errors
from dynaxla.diagnostics import FallbackReason, ReasonId
from dynaxla.errors import (
    CompileError,
    DynaxlaError,
    LinkError,
    LoweringCrashed,
    LoweringError,
    LoweringFailed,
    LoweringOutOfMemory,
    LoweringTimeout,
    OptionError,
    UnsupportedError,
)

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, DynaxlaError) and value.__module__ == errors.__name__
]
EXAMPLES = [
    OptionError("bad", "good"),
    UnsupportedError([FallbackReason(ReasonId.CUSTOM_OP, "pkg.op.default", ("float32",), "a.py:3 in f: op(x)")]),
    LoweringError("broken"),
    LoweringFailed("stablehlo", "failed to legalize"),
    LoweringCrashed(-6, "one\ntwo\n"),
    LoweringTimeout(0.5),
    LoweringOutOfMemory(3 << 30),
    LinkError("body", frame="a.py:3", dump=Path("x")),
    CompileError("refused"),
]
_DRAWN = re.compile(r"^    (?P<lead>[│├└─ ]*)(?P<name>\w+)(?: \((?P<mixin>\w+)\))?(?: +(?P<id>DX\d+)  \S.*)?$", re.M)


def _drawn_tree() -> list[tuple[str, str, str | None, str | None]]:
    """(class, parent, mixin, id) of every line of the drawing."""
    found = []
    path: list[str] = []
    for match in _DRAWN.finditer(errors.__doc__ or ""):
        depth = len(match["lead"]) // 4
        path = [*path[:depth], match["name"]]
        if depth:
            found.append((match["name"], path[depth - 1], match["mixin"], match["id"]))
    return found


def test_the_drawn_tree_is_the_tree() -> None:
    drawn = _drawn_tree()
    assert len(drawn) == len(CLASSES) - 1, "the drawing was not understood"
    actual = [
        (kind.__name__, kind.__bases__[0].__name__, kind.__bases__[1].__name__ if kind.__bases__[1:] else None, kind.id)
        for kind in CLASSES
        if kind is not DynaxlaError
    ]
    assert sorted(drawn, key=str) == sorted(actual, key=str)


def test_ids_are_unique() -> None:
    ids = [kind.__dict__["id"] for kind in CLASSES]
    assert len(set(ids)) == len(ids)


def test_a_message_has_id_place_hint_and_details() -> None:
    full = LinkError("the body is wrong", "report it", frame="model.py:3 in forward: x.sort()", dump=Path("d"))
    assert str(full).splitlines() == [
        "DX310 the body is wrong",
        "  at: model.py:3 in forward: x.sort()",
        "  hint: report it",
        "  details: d",
    ]
    assert str(CompileError("refused")) == "DX320 refused"


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_messages_start_with_the_id_and_survive_pickling(error: DynaxlaError) -> None:
    assert str(error).startswith(f"{type(error).id} {error.explanation}")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_unsupported_error_lists_every_reason() -> None:
    reasons = [
        FallbackReason(ReasonId.CUSTOM_OP, "pkg.first.default", ("float32",), "model.py:3 in forward: first(x)"),
        FallbackReason(ReasonId.RANDOM, "aten.rand.default"),
    ]
    error = UnsupportedError(reasons)
    assert error.reasons == tuple(reasons)
    assert "2 op(s)" in error.explanation
    for reason in reasons:
        assert str(reason) in str(error)
    assert "fallback" in error.hint


def test_lowering_errors_keep_what_was_seen() -> None:
    failed = LoweringFailed("torch backend", "  " + "x" * 5000)
    assert (failed.stage, len(failed.diagnostics)) == ("torch backend", 5002)
    assert len(str(failed)) < 1500
    crashed = LoweringCrashed(-6, "first\nthe last line\n")
    assert "-6" in str(crashed)
    assert "the last line" in str(crashed)
    assert "first" not in str(crashed)
    assert "nothing" in str(LoweringCrashed(-9, ""))
    assert "0.5 s" in str(LoweringTimeout(0.5))
    assert "3.0 GiB" in str(LoweringOutOfMemory(3 << 30))
