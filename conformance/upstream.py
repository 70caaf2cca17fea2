"""Runs PyTorch's own device-generic test files on the device and on the CPU, from a checkout that the user names.

    python -m conformance.upstream --tests DIR [--files FILE ...] [-k REGEX] [--sample N --seed S] [--one-dtype]
        [--limit SECONDS] [--wall-limit SECONDS] [--jobs N] [--log FILE] [--resume | --retry] [--record] [--table FILE]

Prints a table per file, and what contradicts the list of expected failures (`results/upstream_expected.tsv`), which makes
the exit code 1. Outcomes are appended to a log as they come, one JSON object a line; the latest of a test counts, so logs
can be joined by `cat`. `--record` adds those of the log to the record (`results/upstream_outcomes.tsv`). `--resume` goes on
from the record and the log: it runs only tests that both lack, `--retry` only those that fail, are slow or died by the
later of the two, the log. `--table docs/upstream.md` writes the page; with `--resume --sample 0` it does so without running
a test. Linux alone: CPU time is read from /proc.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import random
import re
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from conformance.ops_sweep import load
from conformance.upstream_record import RECORD, join_outcomes, read_record, write_record
from conformance.upstream_table import (
    EXPECTED,
    UNLIKE_THE_CPU,
    append_outcome,
    find_errors,
    read_expected,
    read_outcomes,
    write_outcomes,
    write_page,
    write_table,
)
from conformance.upstream_worker import DEVICE, NOT_RUN, Limits, Outcome, TestFile

FILES = (
    "test_torch.py",
    "test_binary_ufuncs.py",
    "test_unary_ufuncs.py",
    "test_reductions.py",
    "test_indexing.py",
    "test_shape_ops.py",
    "test_tensor_creation_ops.py",
    "test_view_ops.py",
    "test_type_promotion.py",
    "test_sort_and_select.py",
    "test_scatter_gather_ops.py",
    "test_segment_reductions.py",
    "test_masked.py",
    "test_autograd.py",
    "test_linalg.py",
    "test_nn.py",
    "test_modules.py",
    "test_optim.py",
    "test_foreach.py",
    "test_ops.py",
    "nn/test_convolution.py",
    "nn/test_dropout.py",
    "nn/test_embedding.py",
    "nn/test_multihead_attention.py",
    "nn/test_pooling.py",
    "test_complex.py",
    "test_content_store.py",
    "test_dlpack.py",
    "test_expanded_weights.py",
    "test_native_mha.py",
    "test_numpy_interop.py",
    "test_spectral_ops.py",
)
"""Files of tests/ in PyTorch's checkout."""

SEEDS = (0, 7)
"""Those by which the samples of the record were drawn."""


def sweep_file(options: argparse.Namespace, file: str, connection: Connection) -> None:
    """Runs the tests of a file that the options ask for. Appends outcomes to the log and sends the names of all tests."""
    try:
        tests = TestFile(options.tests, file)
    except Exception as error:  # the file as a whole is an outcome
        append_outcome(options.log, Outcome(file, "", NOT_RUN, f"import: {type(error).__name__}: {error}"[:300]))
        connection.send(None)
        return
    names = sorted(tests.tests)
    done = {outcome.test: outcome.status for outcome in read_known(options) if outcome.file == file}
    chosen = choose(names, file, options)
    left = [name for name in chosen if (done.get(name) in UNLIKE_THE_CPU if options.retry else name not in done)]
    if options.one_dtype:
        left = take_one_of_each(draw(left, file, options.seed), done)
    for outcome in tests.run(left, Limits(options.limit, options.wall_limit)):
        append_outcome(options.log, outcome)
    connection.send(names)


def read_known(options: argparse.Namespace) -> list[Outcome]:
    """The outcomes that this run has or goes on from: those of the log and, behind it, of the record."""
    record = read_record(options.outcomes) if options.resume or options.retry else []
    return join_outcomes(record, read_outcomes(options.log))


def choose(names: Sequence[str], file: str, options: argparse.Namespace) -> list[str]:
    """The tests that the options ask for, in random order where they ask for a sample: a larger one has the smaller."""
    wanted = [name for name in names if re.search(options.k, name)]
    return wanted if options.sample is None else draw(wanted, file, options.seed)[: options.sample]


def draw(names: Sequence[str], file: str, seed: int) -> list[str]:
    shuffled = list(names)
    random.Random(f"{seed} {file}").shuffle(shuffled)
    return shuffled


def take_drawn(outcomes: Sequence[Outcome], names: Mapping[str, Sequence[str]]) -> list[Outcome]:
    """The outcomes of tests that were drawn at random: of each file, by each seed, as many of the first as were tried.

    The others were chosen, where behaviour might differ, and say nothing of those that were not tried.
    """
    tried, drawn = {(outcome.file, outcome.test) for outcome in outcomes}, set[tuple[str, str]]()
    for file, all_names in names.items():
        for seed in SEEDS:
            drawn.update(takewhile(tried.__contains__, ((file, name) for name in draw(all_names, file, seed))))
    return [outcome for outcome in outcomes if (outcome.file, outcome.test) in drawn]


def kind_of(name: str) -> str:
    """What the tests of a method, and of an op where it has many, have in common: all but the device and the dtype."""
    return name.partition(f"_{DEVICE}")[0]


def take_one_of_each(names: Sequence[str], done: Collection[str]) -> list[str]:
    """The first test of each kind of which none is done, in alphabetical order."""
    known, firsts = set(map(kind_of, done)), dict[str, str]()
    for name in names:
        firsts.setdefault(kind_of(name), name)
    return sorted(name for kind, name in firsts.items() if kind not in known)


def tell_choice(outcomes: Sequence[Outcome], names: Mapping[str, Sequence[str]], seed: int) -> str:
    """Says which tests of each file the outcomes are of: all, a sample drawn by the seed, the first, or others."""
    choices: dict[str, list[str]] = {}
    for file, all_names in names.items():
        tried = {outcome.test for outcome in outcomes if outcome.file == file}
        if len(tried) == len(all_names):
            choice = "All tests"
        elif tried == set(draw(all_names, file, seed)[: len(tried)]):
            choice = f"{len(tried)} tests drawn at random (`--sample {len(tried)} --seed {seed}`)"
        elif tried == set(all_names[: len(tried)]):
            choice = f"The first {len(tried)} tests"
        elif set(map(kind_of, tried)) == set(map(kind_of, all_names)):
            choice = "At least one test of those that differ in dtype alone (`--one-dtype`)"
        else:
            choice = f"{len(tried)} chosen tests"
        choices.setdefault(choice, []).append(file)
    return " ".join(f"{choice} of {', '.join(files)}." for choice, files in choices.items())


def sweep(options: argparse.Namespace) -> dict[str, list[str]]:
    """Runs all files, `options.jobs` at once, each in a process of its own. The names of the tests of those imported."""
    waiting, running, names = list(options.files), dict[Any, tuple[str, Any]](), dict[str, list[str]]()
    while waiting or running:
        while waiting and len(running) < options.jobs:
            file = waiting.pop(0)
            here, there = mp.Pipe(duplex=False)
            process = mp.get_context("fork").Process(target=sweep_file, args=(options, file, there))
            process.start()
            there.close()
            running[here] = file, process
        for here in wait(list(running)):
            file, process = running.pop(here)
            try:
                found = here.recv()
            except EOFError:
                raise SystemExit(f"the process of {file} ended") from None
            process.join()
            if found is not None:
                names[file] = found
                print(f"{file}: done", flush=True)
    return {file: names[file] for file in options.files if file in names}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="folder test/ of a checkout of PyTorch")
    parser.add_argument("--files", nargs="+", default=FILES, help="relative to that folder")
    parser.add_argument("-k", default="", help="tests whose class and name match")
    parser.add_argument("--sample", type=int, help="so many tests of each file, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one-dtype", action="store_true", help="one test of those that differ in dtype alone")
    parser.add_argument("--limit", type=float, default=20.0, help="CPU seconds for a test on each device")
    parser.add_argument("--wall-limit", type=float, default=1200.0, help="seconds by the clock, for a test that waits")
    parser.add_argument("--jobs", type=int, default=1, help="files at once")
    parser.add_argument("--log", type=Path, default=Path("upstream.jsonl"))
    going_on = parser.add_mutually_exclusive_group()
    going_on.add_argument("--resume", action="store_true", help="go on from record and log; else the log is begun anew")
    going_on.add_argument("--retry", action="store_true", help="run those again that are not as on the CPU")
    parser.add_argument("--record", action="store_true", help="add the outcomes of the log to the record")
    parser.add_argument("--outcomes", type=Path, default=RECORD, help="the record")
    parser.add_argument("--expected", type=Path, default=EXPECTED)
    parser.add_argument("--table", type=Path, help="write the page there")
    options = parser.parse_args(arguments)
    options.log, options.outcomes = options.log.resolve(), options.outcomes.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    begun = (
        [outcome for outcome in read_outcomes(options.log) if outcome.test] if options.resume or options.retry else []
    )
    write_outcomes(options.log, begun)
    load()
    names = sweep(options)
    outcomes = [outcome for outcome in read_known(options) if outcome.file in options.files]
    if options.record:
        write_record(join_outcomes(read_record(options.outcomes), read_outcomes(options.log)), options.outcomes)
    expected = read_expected(options.expected)
    totals = {file: len(names.get(file, ())) for file in options.files}
    print(write_table(outcomes, totals))
    if options.table is not None:
        how = f"This table has {len(outcomes)} of {sum(totals.values())} tests, with torch {torch.__version__}. "
        drawn = take_drawn(outcomes, names)
        how += f"{len(drawn)} were drawn at random, or are of files that were run whole. "
        how += tell_choice(outcomes, names, options.seed)
        how = textwrap.fill(how, 120, break_long_words=False, break_on_hyphens=False)
        options.table.write_text(
            write_page(outcomes, totals, expected, options.limit, how, drawn=drawn), encoding="utf-8"
        )
    errors = find_errors(outcomes, expected, names)
    print(*errors, sep="\n")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
