"""`python -m dynaxla bench`: models on several backends side by side; `bench compare`: two records of it."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dynaxla.errors import DynaxlaError, OptionError
from dynaxla.isolation.disk import CACHE_VARIABLE, OFF

_DESCRIPTION = """Runs models on several backends in turn, in one process. Every backend's results are compared with the first
one's before it is timed. `bench compare A.json B.json` compares two records. Exit status: 0 if every backend gave right results
(of compare: and none became slower), 1 if not, 2 for bad usage."""
_WORKLOAD = """package.module:factory or file.py:factory, which gives (model, args) or (model, args, kwargs); hf:TYPE, a model
type, folder or name of transformers, with fields of its config (hf:bert,num_hidden_layers=2,batch=4,tokens=64); a built-in
model; all: every built-in model"""
_BACKENDS = """the first is the baseline: eager, inductor or another of torch's, dynaxla, device; with options behind a colon:
dynaxla:bucketing=off,compile=behind or device:mode=fused (default: eager inductor dynaxla)"""
_VARY = """dims that vary, and their sizes: tokens:1,mask:1=8..512 (log-uniform), tokens:1=8..512~60
(log-normal, the median 60), pixels:0=1,2,4 (these); may be given several
times"""


def add_bench_command(commands: Any) -> None:
    """Adds the command `bench` to the subparsers of the package's own; its `run` takes what is parsed."""
    parser = commands.add_parser("bench", help="measure models on several backends", description=_DESCRIPTION)
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD", help=_WORKLOAD)
    parser.add_argument(
        "--backends", nargs="+", default=["eager", "inductor", "dynaxla"], metavar="BACKEND", help=_BACKENDS
    )
    parser.add_argument("--vary", action="append", default=[], metavar="ARG:DIM[,...]=SIZES", help=_VARY)
    parser.add_argument("--requests", type=int, default=50, help="calls with sizes that vary (default: %(default)s)")
    parser.add_argument("--train", action="store_true", help="gradients of a weighted sum of all results, too")
    parser.add_argument("--tolerance", type=float, help="largest relative error of a result (default: by its dtype)")
    parser.add_argument("--no-starts", action="store_true", help="measure no first passes in processes of their own")
    parser.add_argument("--captures", action="store_true", help="measure a third start that finds Dynamo's captures")
    add_run_arguments(parser)
    parser.set_defaults(run=partial(run_bench, parser=parser))


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark takes, those of benchmarks/ too: how long to measure, and where to write."""
    parser.add_argument("--seconds", type=float, default=5.0, help="for the samples of a case (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="at least (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots")


def run_bench(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """The exit status."""
    try:
        if given.workloads[0] == "compare":
            return _compare(given.workloads[1:], given.html)
        return _measure(given)
    except OptionError as error:
        parser.error(str(error))
    except DynaxlaError as error:
        print(error, file=sys.stderr)
        return 1


def _compare(paths: Sequence[str], html: Path | None) -> int:
    from dynaxla.bench.html_report import write_report_page
    from dynaxla.bench.record_comparison import print_comparison
    from dynaxla.bench.records import BenchRecord

    if len(paths) != 2:
        raise OptionError(f"compare takes two records, not {len(paths)}", "write bench compare BEFORE.json AFTER.json")
    before, after = (BenchRecord.read(Path(path)) for path in paths)
    if html is not None:
        write_report_page(after, html, before)
    return 0 if print_comparison(before, after) else 1


@contextmanager
def _empty_caches() -> Iterator[None]:
    """Compilers find nothing of earlier runs, and leave nothing, unless the environment names a cache."""
    with tempfile.TemporaryDirectory() as folder:
        own = {CACHE_VARIABLE: OFF, "TORCHINDUCTOR_CACHE_DIR": folder}
        given = {name: value for name, value in own.items() if name not in os.environ}
        os.environ.update(given)
        try:
            yield
        finally:
            for name in given:
                del os.environ[name]


def _measure(given: argparse.Namespace) -> int:
    from dynaxla.bench.backends import BenchBackend
    from dynaxla.bench.bench_session import BenchSession
    from dynaxla.bench.built_in_models import BUILT_IN
    from dynaxla.bench.model_cases import ModelRequest
    from dynaxla.bench.workloads import check_workload

    backends = [BenchBackend.parse(text) for text in dict.fromkeys(given.backends)]
    names = [name for each in given.workloads for name in (BUILT_IN if each == "all" else [each])]
    for name in names:
        check_workload(name)  # all of them, before the first is measured
    shared = (given.vary, given.requests, given.train, given.tolerance)
    requests = [ModelRequest(name, *shared) for name in dict.fromkeys(names)]
    with _empty_caches(), BenchSession(given, len(requests)) as session:
        for request in requests:
            session.measure_model(request, backends, starts=not given.no_starts, captures=given.captures)
    return session.status
