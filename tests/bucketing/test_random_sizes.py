"""Random programs at random sizes, with junk in the padding: eager's results, from buckets or from exact shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import dynaxla
from tests.bucketing.poison import faults, poison
from tests.bucketing.random_sized import ERRORS, SizedProgram, Sizes, draw
from tests.random_graphs.predicted_layouts import predicted_layouts
from tests.random_graphs.random_programs import make_inputs
from tests.same_layout import assert_same_layout
from tests.tolerances import assert_close

EXAMPLES = 8 if settings.get_current_profile_name() == "quick" else settings.default.max_examples // 3
"""So few, since each is several programs of XLA."""
FIRST: Sizes = {"s": 5, "t": 7}


@dataclass(frozen=True)
class Trials:
    """The sizes that a program runs at, and their buckets.

    Attributes:
        sizes: the first two differ from each other and from the fixed dims, so that Dynamo takes no two for the same.
        options: those of torch.compile.
    """

    sizes: list[Sizes]
    options: dict[str, Any]

    @classmethod
    def draw(cls, random: Random) -> Trials:
        """A few sizes in buckets that mostly differ, or many in the four pairs of two buckets."""
        few = random.random() < 0.5
        others = [{"s": random.randint(2, 20), "t": random.randint(2, 20)} for _ in range(3 if few else 19)]
        return cls([FIRST, *others], {} if few else {"buckets": dynaxla.Explicit((8, 20))})


def check(drawn: SizedProgram, trials: Trials) -> None:
    torch._dynamo.reset()
    before = dynaxla.read_metrics()
    compiled = torch.compile(drawn.program.function(), backend="dynaxla", dynamic=True, options=trials.options)
    for sizes in trials.sizes:
        program = drawn.at(sizes)
        eager_inputs, inputs = make_inputs(program.inputs), make_inputs(program.inputs)
        expected = program.function()(*eager_inputs)
        actual = compiled(*inputs)
        for mine, eager, name in zip(actual, expected, program.outputs, strict=True):
            try:
                assert_close(mine, eager)
            except AssertionError as error:
                raise AssertionError(f"{name} at {sizes}: {error}") from error
        assert_same_layout(actual, expected, inputs, eager_inputs, partial(predicted_layouts, program))
    failed = faults(before, dynaxla.read_metrics())
    assert not failed, failed


def failure(drawn: SizedProgram, trials: Trials) -> Exception | AssertionError | None:
    try:
        check(drawn, trials)
    except Exception as error:
        return error
    return None


def shrink(drawn: SizedProgram, trials: Trials, error: BaseException) -> SizedProgram:
    """The program with as few lines and outputs as still fail with this type of error."""
    program = drawn.program
    smaller = [replace(program, outputs=(name,)) for name in program.outputs] if len(program.outputs) > 1 else []
    for place, line in enumerate(program.lines):
        if line.result in program.outputs and len(program.outputs) == 1 and place == len(program.lines) - 1:
            smaller += [replace(program, lines=program.lines[:-1], outputs=(r,)) for r in line.reads if r[0] == "v"]
        elif line.result not in program.outputs:
            smaller.append(replace(program, lines=program.lines[:place] + program.lines[place + 1 :]))
    for candidate in smaller:
        sized = replace(drawn, program=candidate)
        try:
            sized.at(FIRST).function()(*make_inputs(sized.at(FIRST).inputs))
        except (*ERRORS, NameError):
            continue
        if type(failure(sized, trials)) is type(error):
            return shrink(sized, trials, error)
    return drawn


@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
@torch._dynamo.config.patch(recompile_limit=64)  # beyond it Dynamo runs a function in eager
@settings(max_examples=EXAMPLES, phases=(Phase.reuse, Phase.generate))
@given(random=st.randoms(use_true_random=True))
@torch.no_grad()
def test_random_program_at_random_sizes(random: Random, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    trials = Trials.draw(random)
    drawn = draw(random, trials.sizes)
    if not drawn.program.outputs:
        return
    error = failure(drawn, trials)
    if error is not None:
        small = shrink(drawn, trials, error)
        raise AssertionError(f"{error}\n{small.shapes}\n{small.program.inputs}\n{small.program.source()}") from error
