"""Random programs with sizes as values, run by padded programs in eager: many sizes a program, forward and backward.

    nice -n 19 python -m tests.bucketing.sized_runs --cases 20000 --seed 1

A case is a program at a pair of sizes, forward or backward. Every failure is shrunk and printed as a program to run; the last
line goes to the record (tests/bucketing/sized_runs.tsv).
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.compiler import set_stance

import dynaxla
from dynaxla.isolation.disk import CACHE_VARIABLE, OFF
from tests.bucketing.differences import difference, results
from tests.bucketing.eager_programs import eager_programs
from tests.bucketing.poison import faults
from tests.bucketing.random_sized import ERRORS, SizedProgram, Sizes, draw
from tests.random_graphs.predicted_layouts import predicted_layouts
from tests.random_graphs.random_programs import Program, is_defined, make_inputs, run_lines
from tests.same_layout import assert_same_layout
from tests.tolerances import RELATIVE

RECORD = Path(__file__).with_suffix(".tsv")
FIRST: Sizes = {"s": 5, "t": 7}
MOST = 24
CAPTURING = 5
"""At how many sizes Dynamo may capture a program anew: that takes a thousand times as long as a case."""
TIES = ("topk", "kthvalue", "sort", "median", "mode", "max", "min")
"""Ops of which nobody says to which of several equal elements a gradient goes."""
NOISE = 16.0  # units in the last place by which inputs are moved to see whether a gradient is well defined


@dataclass(frozen=True)
class Run:
    """A program and how it is compiled and called.

    Attributes:
        sizes: the first differ from each other and from the fixed dims, so that Dynamo takes no two for the same.
    """

    drawn: SizedProgram
    sizes: tuple[Sizes, ...]
    dynamic: bool | None
    options: dict[str, Any]
    backward: bool


@dataclass
class Tally:
    """What a number of runs gave.

    Attributes:
        refused: how often each reason kept a graph from buckets or an op from being compiled.
    """

    programs: int = 0
    cases: int = 0
    wrong: int = 0
    errors: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def line(self, seeds: str) -> str:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        reasons = "; ".join(f"{count} {reason}" for reason, count in self.refused.most_common())
        return "\t".join(
            map(str, (date.today(), commit, seeds, self.programs, self.cases, self.wrong, self.errors, reasons))
        )


class Wrong(AssertionError):
    """Numbers differ from eager's."""


def draw_run(random: Random, count: int) -> Run | None:
    """A program and `count` pairs of sizes; None where none was found."""
    trials = [FIRST, *({"s": random.randint(2, MOST), "t": random.randint(2, MOST)} for _ in range(3))]
    drawn = draw(random, trials)
    if not drawn.program.outputs:
        return None
    more = [{"s": random.randint(2, MOST), "t": random.randint(2, MOST)} for _ in range(count - len(trials))]
    options = {} if random.random() < 0.5 else {"buckets": dynaxla.Explicit((8, 20, MOST))}
    specs = drawn.program.inputs
    smooth = all(spec.values != "special" for spec in specs) and any(s.dtype.is_floating_point for s in specs)
    return Run(drawn, (*trials, *more), random.choice((True, True, True, None)), options, smooth)


def cases(run: Run, **compiled_by: Any) -> Iterator[str]:
    """Runs a program at every size; one item, "forward" or "backward", for each case that agrees with eager.

    What Dynamo would capture anew after the first sizes runs in eager and is no case.

    Args:
        run: the program.
        compiled_by: another backend.

    Raises:
        Wrong: numbers differ.
        Exception: anything that compiling or running raised.
    """
    torch._dynamo.reset()
    function = run.drawn.program.function()
    compiled_by = compiled_by or {"backend": "dynaxla", "options": run.options}
    with eager_programs() as runs, torch._dynamo.config.patch(recompile_limit=64):
        compiled = torch.compile(function, dynamic=run.dynamic, **compiled_by)
        for number, sizes in enumerate(run.sizes):
            with set_stance("default" if number < CAPTURING else "eager_on_recompile"):
                before = runs.count
                for found in _at(run, sizes, compiled):
                    if runs.count > before:
                        yield found


def _at(run: Run, sizes: Sizes, compiled: Callable[..., Any]) -> Iterator[str]:
    program = run.drawn.at(sizes)
    function = program.function()
    eager_inputs, inputs = _inputs(program, run.backward), _inputs(program, run.backward)
    try:
        expected, wanted = results(function, eager_inputs)
    except ERRORS:
        return  # eager takes no such sizes
    actual, got = results(compiled, inputs)
    for mine, eager, name in zip(actual, expected, program.outputs, strict=True):
        if (found := difference(mine, eager)) and _is_defined(program):
            raise Wrong(f"{name} at {sizes}: {found}")
    yield "forward"
    for place, (mine, eager) in enumerate(zip(got, wanted, strict=True)):
        found = difference(mine, eager)
        if found and _has_gradient(program):
            raise Wrong(f"gradient of x{place} at {sizes}: {found}")
    if any(grad is not None for grad in wanted):
        yield "backward"
    try:
        assert_same_layout(actual, expected, inputs, eager_inputs, partial(predicted_layouts, program))
    except AssertionError as error:
        raise Wrong(f"at {sizes}: {error}") from error


def _inputs(program: Program, backward: bool) -> list[Tensor]:
    return [x.requires_grad_(backward and x.is_floating_point()) for x in make_inputs(program.inputs)]


def _is_defined(program: Program) -> bool:
    return is_defined(program, run_lines(program), runs=4)


def _has_gradient(program: Program) -> bool:
    """Whether the gradients stay as they are when inputs move by a few units in the last place, and ties part."""
    ties = any(op in line.text for line in program.lines for op in TIES)
    narrow = any(".float()" in line.text for line in program.lines)
    _, eager = results(program.function(), _inputs(program, True))
    for seed in range(16 if ties else 4):  # noise breaks a tie to the same side half of the time
        random = torch.Generator().manual_seed(seed)
        moved = [_moved(x.detach(), random, ties, narrow) for x in _inputs(program, True)]
        _, other = results(program.function(), [x.requires_grad_(x.is_floating_point()) for x in moved])
        for mine, grad in zip(other, eager, strict=True):
            if mine is None or grad is None:
                continue
            if (
                not torch.isfinite(grad).all()
                or (mine - grad).abs().max() > 0.3 * RELATIVE[grad.dtype] * grad.abs().max()
            ):
                return False
    return True


def _moved(x: Tensor, random: torch.Generator, zeros: bool, narrow: bool) -> Tensor:
    """The tensor with noise, of float32 if that is what a program computes in.

    Zeros stay zeros, at which an op may have a gradient by definition, unless they are to move.
    """
    if not x.is_floating_point():
        return x
    step = NOISE * torch.finfo(torch.float32 if narrow else x.dtype).eps
    shift = (torch.rand(x.shape, generator=random, dtype=torch.float64) * 2 - 1) * step
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if 0 not in x.stride() else torch.empty_like(x)
    return made.copy_((x.double() * (1 + shift) + zeros * (x == 0) * shift).to(x.dtype))


def failure(run: Run) -> Exception | None:
    before = dynaxla.read_metrics()
    try:
        for _ in cases(run):
            pass
    except Exception as error:
        return error
    failed = faults(before, dynaxla.read_metrics())
    return RuntimeError(failed[0]) if failed else None


def is_torchs_own(run: Run) -> bool:
    """Whether it fails without a backend of ours, too."""
    try:
        for _ in cases(run, backend="aot_eager"):
            pass
    except Exception:
        return True
    return False


def shrink(run: Run, error: Exception) -> Run:
    """The run with as few lines, outputs and sizes as still fail alike."""
    for candidate in _smaller(run):
        if type(failure(candidate)) is type(error):
            return shrink(candidate, error)
    return run


def _smaller(run: Run) -> Iterator[Run]:
    program = run.drawn.program
    if len(run.sizes) > 2:
        half = max(len(run.sizes) // 2, 2)
        yield replace(run, sizes=(run.sizes[0], *run.sizes[half:]))
        yield replace(run, sizes=run.sizes[:half])
    smaller = [replace(program, outputs=(name,)) for name in program.outputs] if len(program.outputs) > 1 else []
    for place, line in enumerate(program.lines):
        if line.result not in program.outputs:
            smaller.append(replace(program, lines=program.lines[:place] + program.lines[place + 1 :]))
        elif len(program.outputs) == 1 and place == len(program.lines) - 1:
            smaller += [replace(program, lines=program.lines[:-1], outputs=(r,)) for r in line.reads if r[0] == "v"]
    for candidate in smaller:
        sized = replace(run.drawn, program=candidate)
        try:
            sized.at(FIRST).function()(*make_inputs(sized.at(FIRST).inputs))
        except (*ERRORS, NameError):
            continue
        yield replace(run, drawn=sized)


def told(run: Run, error: Exception) -> str:
    """A failure as a reader can run it."""
    small = shrink(run, error)
    specs = [(shape, spec.dtype, spec.layout, spec.values, spec.seed) for shape, spec in
             zip(small.drawn.shapes, small.drawn.program.inputs, strict=True)]  # fmt: skip
    return (
        f"{type(error).__name__}: {str(error)[:600]}\n  shrunk: {failure(small)!s:.600}\n  inputs {specs}\n"
        f"  sizes {small.sizes}, dynamic={small.dynamic}, options={small.options}, backward={small.backward}\n"
        f"{small.drawn.program.source()}"
    )


def run_many(seed: int, wanted: int, sizes: int, tell: Callable[[str], None]) -> Tally:
    """Runs programs until there are so many cases, or until it is interrupted."""
    tally = Tally()
    number = 0
    with suppress(KeyboardInterrupt):
        while tally.cases < wanted:
            number += 1
            run = draw_run(Random(f"{seed} {number}"), sizes)
            if run is not None:
                tally.programs += 1
                _count(run, tally, tell)
    return tally


def _count(run: Run, tally: Tally, tell: Callable[[str], None]) -> None:
    before = dynaxla.read_metrics()
    error: Exception | None = None
    try:
        for _ in cases(run):
            tally.cases += 1
    except Exception as raised:
        error = raised
    after = dynaxla.read_metrics()
    lines = [*after.exact_shapes[len(before.exact_shapes) :], *after.fallbacks[len(before.fallbacks) :]]
    tally.refused.update(map(reason_of, lines))
    failed = faults(before, after)
    if error is None and failed:
        error = RuntimeError(failed[0])
    if error is None:
        return
    tally.cases += 1
    if is_torchs_own(run):
        tally.refused["torch's own, with aot_eager too: " + reason_of(str(error).partition("\n")[0])] += 1
        return
    if isinstance(error, Wrong):
        tally.wrong += 1
    else:
        tally.errors += 1
    tell(told(run, error))


def reason_of(line: str) -> str:
    """A refusal without its sizes, nodes and places."""
    said = line.split("; at ")[0].replace(
        "cannot run on padded values, so its part is compiled per exact shape", "exact"
    )
    said = re.sub(r"the size .*", "the size ...", said)
    said = re.sub(r"^(?!aten)\w+?(_\d+)? exact", "a size exact", said)
    return re.sub(r"\d+|\[.*\]|\(.*\)", "N", said)[:110]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", type=int, default=120, help="pairs of sizes of a program")
    parser.add_argument("--record", action="store_true", help="append a line to the record")
    wanted = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ[CACHE_VARIABLE] = OFF  # what eager PyTorch runs is no executable
    tally = run_many(wanted.seed, wanted.cases, wanted.sizes, lambda text: print(text, "\n", flush=True))
    line = tally.line(str(wanted.seed))
    print(line, f"{time.process_time():.0f} s of processor time", flush=True)
    if wanted.record:
        with RECORD.open("a") as record:
            record.write(line + "\n")


if __name__ == "__main__":
    main()
