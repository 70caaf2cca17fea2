"""Compares training of the zoo's architectures through torch.compile(backend="dynaxla") with training in eager.

    python -m conformance.training_sweep [--only REGEX] [--missing] [--again STATUS ...] [--limit SECONDS] [--out FILE]

Each architecture runs in a forked process of its own, with a time limit: five steps of AdamW in float32, in training
mode with dropout at zero, compiled and in eager from the same weights. The results replace the architectures' lines in
`results/training.tsv`, from which docs/training.md is written.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing as mp
import os
import re
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch._dynamo.utils import counters

import dynaxla
from conformance.ops_sweep import load
from conformance.quiet import be_quiet
from conformance.sweep_record import Status
from conformance.training_record import (
    NOT_TRAINED,
    RESULTS,
    SENSITIVE,
    WIDE_LIMIT,
    Training,
    read_trainings,
    write_trainings,
)
from dynaxla.observe.recorder import Metrics
from tests.zoo.architecture import Architecture
from tests.zoo.registry import ARCHITECTURES
from tests.zoo.training import Trained, shaken, train, trainee
from tests.zoo.training_check import LIMIT, Differences, compare

_OP_AND_REASON = re.compile(r"(?P<what>.*?)(?:; at .*)?$")


def examine(architecture: Architecture) -> Training:
    """Trains in eager, in eager at float64, and compiled."""
    eager, exact = train(trainee(architecture)), _train_exactly(architecture)
    before = dynaxla.read_metrics()
    counters.clear()
    found = compare(_train_compiled(architecture, torch.float32), eager)
    training = Training(
        architecture.name,
        architecture.family,
        Status.CORRECT.value,
        found.loss,
        found.gradients[0],
        found.state[0],
        math.nan if exact is None else compare(eager, exact).gradients[0],
        parameters=len(eager.gradients),
        zeros=found.zeros,
        without=sum(gradient is None for gradient in eager.gradients.values()),
    )
    training = _with_counts(training, before, dynaxla.read_metrics())
    return training if found.worst <= LIMIT else _judged(training, architecture, found, eager, exact)


def _train_exactly(architecture: Architecture) -> Trained | None:
    """In eager and float64; None where an op of the network does not take that."""
    try:
        return train(trainee(architecture, torch.float64))
    except RuntimeError as error:
        if "got Double" not in str(error):
            raise
        return None


def _train_compiled(architecture: Architecture, dtype: torch.dtype) -> Trained:
    return train(trainee(architecture, dtype), lambda loss: torch.compile(loss, backend="dynaxla"))


def _judged(
    training: Training, architecture: Architecture, found: Differences, eager: Trained, exact: Trained | None
) -> Training:
    """A difference above the limit is wrong, unless eager itself differs so much after one rounding: then float64 tells."""
    detail = _explained(found)
    alone = compare(train(shaken(trainee(architecture))), eager)
    if alone.worst <= LIMIT or exact is None:
        return replace(training, status=Status.WRONG.value, detail=detail)
    torch._dynamo.reset()
    wide = compare(_train_compiled(architecture, torch.float64), exact)
    status = SENSITIVE if wide.worst <= WIDE_LIMIT else Status.WRONG.value
    detail = f"{detail}; eager, from weights off by one rounding: {_explained(alone)}; in float64: {wide.worst:.1e}"
    return replace(training, status=status, detail=detail)


def _explained(found: Differences) -> str:
    worst = {"loss": (found.loss, ""), "gradient of": found.gradients, "after training,": found.state}
    return "; ".join(
        f"{what} {name} {error:.1e}".replace("  ", " ") for what, (error, name) in worst.items() if not error <= LIMIT
    )


def _with_counts(training: Training, before: Metrics, after: Metrics) -> Training:
    lines = after.fallbacks[len(before.fallbacks) :]
    breaks = [f"graph break: {reason.splitlines()[0]}" for reason in counters["graph_break"]]
    return replace(
        training,
        graphs=after.graphs - before.graphs,
        executables=after.compiles - before.compiles,
        eager="; ".join(dict.fromkeys([*map(_without_place, lines), *breaks])),
    )


def _without_place(line: str) -> str:
    """A fallback's line without the place in the model's source, which is another's."""
    matched = _OP_AND_REASON.match(line.splitlines()[0])
    assert matched is not None, line
    return matched["what"]


def examine_apart(architecture: Architecture, limit_s: float) -> Training:
    """In a process of its own, which may die or take too long."""
    here, there = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=_work, args=(architecture, there))
    process.start()
    there.close()
    status, detail = Status.TIMED_OUT, f"{limit_s:.0f} s"
    try:
        if here.poll(limit_s):
            found: Training = here.recv()
            return found
    except EOFError:
        status, detail = Status.DIED, "the process ended"
    finally:
        process.kill()
        process.join()
        here.close()
    return Training(architecture.name, architecture.family, status.value, detail=detail)


def _work(architecture: Architecture, connection: Connection) -> None:
    be_quiet()
    try:
        training = examine(architecture)
    except Exception as error:  # what cannot be trained is a line of the results, not the end of the sweep
        detail = f"{type(error).__name__}: {error}"[:300]
        training = Training(architecture.name, architecture.family, Status.RAISED.value, detail=detail)
    connection.send(training)
    connection.close()


def sorted_as_the_zoo(trainings: Mapping[str, Training]) -> list[Training]:
    names = [architecture.name for architecture in ARCHITECTURES if architecture.name not in NOT_TRAINED]
    return [trainings[name] for name in names if name in trainings]


def wanted(options: argparse.Namespace, known: Mapping[str, Training]) -> list[Architecture]:
    named = [x for x in ARCHITECTURES if re.search(options.only, x.name) and x.name not in NOT_TRAINED]
    if options.missing:
        return [x for x in named if x.name not in known]
    if options.again:
        return [x for x in named if x.name in known and known[x.name].status in options.again]
    return named


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="architectures whose name matches")
    parser.add_argument("--missing", action="store_true", help="only what the results lack")
    parser.add_argument(
        "--again", nargs="+", default=[], choices=[*(x.value for x in Status), SENSITIVE], help="only these statuses"
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for an architecture")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    trainings = read_trainings(options.out)
    load()
    import diffusers  # noqa: F401
    import transformers  # noqa: F401

    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache  # failures that the user's cache remembers are none of the sweep's
        for architecture in wanted(options, trainings):
            began = time.perf_counter()
            training = examine_apart(architecture, options.limit)
            print(f"{time.perf_counter() - began:.0f} s\t{training.line()}", flush=True)
            trainings[architecture.name] = training
            write_trainings(sorted_as_the_zoo(trainings), options.out)


if __name__ == "__main__":
    main()
