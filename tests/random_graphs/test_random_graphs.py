"""Random programs of torch calls: whatever eager does, the compiled function does the same or raises as eager does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.random_graphs.predicted_layouts import predicted_layouts
from tests.random_graphs.random_calls import FAMILIES, Call, Chooser, draw_inputs
from tests.random_graphs.random_programs import Line, Program, is_defined, make_inputs, run_lines
from tests.same_layout import assert_same_sharing, assert_same_strides
from tests.tolerances import assert_close

EAGER_ERRORS = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)
ATTEMPTS_PER_LINE = 3


def draw_program(random: Random) -> tuple[Program, Line | None]:
    """A program whose results are well defined, and perhaps a line for which eager raises behind it."""
    program = Program(draw_inputs(Chooser(random, {})))
    env = run_lines(program)
    wrong: Line | None = None
    length = random.randint(3, 12)
    for _ in range(ATTEMPTS_PER_LINE * length):
        if len(program.lines) == length:
            break
        drawn = random.choice(FAMILIES)(Chooser(random, env))
        if drawn is None:
            continue
        line = drawn.line(f"v{len(program.lines)}") if isinstance(drawn, Call) else drawn
        longer = Program(program.inputs, (*program.lines, line))
        try:
            made = run_lines(longer)
        except EAGER_ERRORS:
            wrong = line
            continue
        if is_defined(longer, made):
            program, env = longer, made
    program = replace(program, outputs=_outputs(random, program, env))
    return program, wrong if wrong is not None and _raises(program, wrong) else None


def _raises(program: Program, line: Line) -> bool:
    """Whether shapes and dtypes alone are reason enough for the error: some errors only a kernel knows."""
    longer = replace(program, lines=(*program.lines, line), outputs=(line.result,))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in make_inputs(program.inputs)]
        try:
            longer.function()(*fakes)
        except Exception:
            return True
    return False


def _outputs(random: Random, program: Program, env: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """What nothing else reads, and some of the rest."""
    read = {name for line in program.lines for name in line.reads if name != line.result}
    return tuple(name for name in env if name not in read or random.randrange(4) == 0)


def check(program: Program, backend: str = "dynaxla") -> None:
    function = program.function()
    expected_inputs = make_inputs(program.inputs)
    expected = function(*expected_inputs)
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for before in (0, 0, 5):  # elements in front of each input in its storage, on which nothing guards
        inputs = make_inputs(program.inputs, before)
        actual = compiled(*inputs)
        for mine, eager in zip((*actual, *inputs), (*expected, *expected_inputs), strict=True):
            assert_close(mine, eager)
    if backend == "dynaxla":
        assert_same_strides(actual, expected, partial(predicted_layouts, program))
    assert_same_sharing(actual, expected, inputs, expected_inputs)


def check_raises(program: Program, wrong: Line) -> None:
    longer = Program(program.inputs, (*program.lines, wrong), (*program.outputs, wrong.result))
    with pytest.raises(Exception):  # noqa: B017, PT011 - Dynamo wraps some of the errors in its own
        torch.compile(longer.function(), backend="dynaxla", fullgraph=True)(*make_inputs(longer.inputs))


def failure(program: Program) -> Exception | AssertionError | None:
    """How the compiled program fails; None if it does not, or if capture alone, run op by op, raises what eager does not.

    What capture alone computes wrongly is a failure: nothing but torch.compile was asked for.
    """
    torch._dynamo.reset()
    try:
        check(program)
    except Exception as error:
        return None if _capture_fails(program) else error
    return None


def _capture_fails(program: Program) -> bool:
    torch._dynamo.reset()
    try:
        check(program, "aot_eager")
    except AssertionError:
        return False
    except Exception:
        return True
    return False


def shrink(program: Program, error: Exception) -> Program:
    """The program with as few lines and outputs as still fail with this type of error."""
    for smaller in _smaller(program):
        if type(failure(smaller)) is type(error):
            return shrink(smaller, error)
    return program


def _smaller(program: Program) -> Iterator[Program]:
    candidates = [replace(program, outputs=(name,)) for name in program.outputs] if len(program.outputs) > 1 else []
    for place, line in reversed(list(enumerate(program.lines))):
        lines = program.lines[:place] + program.lines[place + 1 :]
        candidates.append(replace(program, lines=lines))
        candidates += [
            replace(program, lines=lines, outputs=(name,)) for name in line.reads if program.outputs == (line.result,)
        ]
    for candidate in candidates:
        try:
            candidate.function()(*make_inputs(candidate.inputs))
        except (*EAGER_ERRORS, NameError):
            continue
        yield candidate


@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
@settings(phases=(Phase.reuse, Phase.generate))
@given(random=st.randoms(use_true_random=True))
@torch.no_grad()
def test_random_program(random: Random) -> None:
    program, wrong = draw_program(random)
    error = failure(program)
    if error is not None:
        small = shrink(program, error)
        raise AssertionError(f"{error}\n{small.inputs}\n{small.source()}") from error
    if wrong is not None:
        torch._dynamo.reset()
        check_raises(program, wrong)
