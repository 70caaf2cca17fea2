"""`python -m dynaxla compile`: a model's programs for a target that is not here, what they take there, a package of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaxla.errors import DynaxlaError, OptionError, ShardingError, TargetError
from dynaxla.precompile.model_factory import call_factory

if TYPE_CHECKING:
    from dynaxla.precompile.program_report import Compilation, ProgramReport

_DESCRIPTION = """Compiles every program of a model for a TPU topology, on a machine without a TPU, prints what each takes
there, and writes a package of them. Exit status: 0 if every program compiled and fits the chip, 1 if not, 2 for bad usage."""
_BUCKET = """dims that vary, and their buckets: tokens:1,mask:1=8,16,32 (these), pixels:0=2..64 (the default policy's, from
the bucket of 2 to 64); dims of one --bucket always have one size; may be given several times, for every combination"""

_SHARD = """how arguments and weights are sharded over the mesh: rules such as '*.q_proj.weight=model;input_ids=data', a file
of them, or tp_plan for a transformers model's own"""


def add_compile_command(commands: Any) -> None:
    """Adds the command `compile` to the subparsers of the package's own; its `run` takes what is parsed."""
    parser = commands.add_parser(
        "compile", help="compile a model for a TPU topology, without a TPU", description=_DESCRIPTION
    )
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a function without arguments that gives (model, args) or (model, args, kwargs); or FILE.py:FACTORY",
    )
    parser.add_argument("--target", required=True, help="a TPU topology, such as tpu:v5e:1x1; or cpu")
    parser.add_argument("--bucket", action="append", default=[], metavar="ARG:DIM[,...]=SIZES", help=_BUCKET)
    parser.add_argument("--train", action="store_true", help="compile the backward too, of the sum of all results")
    parser.add_argument("--mesh", metavar="AXIS=SIZE[,...]", help="partition programs over devices of the topology")
    parser.add_argument("--shard", default="", metavar="RULES", help=_SHARD)
    parser.add_argument("--options", default="{}", metavar="JSON", help="torch.compile's options, as a JSON object")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write a package into a folder that is not there yet")
    parser.add_argument("--json", action="store_true", help="print the whole report as JSON, and nothing else")
    parser.set_defaults(run=partial(_run, parser=parser))


def _run(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """0 if every program compiled and fits, 1 if not."""
    # What the model's own code prints is no part of the document.
    with redirect_stdout(sys.stderr) if given.json else nullcontext():
        compilation = _compile(given, parser)
    if compilation is None:
        return 1
    if given.json:
        written = str(given.out) if given.out and compilation.complete else None
        print(json.dumps({**compilation.document(), "package": written}, indent=2))
    else:
        print_table(compilation)
    return 0 if _told(compilation, given) else 1


def _compile(given: argparse.Namespace, parser: argparse.ArgumentParser) -> Compilation | None:
    """None, with a word on stderr, where the whole cannot be compiled."""
    options = _options(given.options, parser)
    try:
        called = call_factory(given.factory)
    except OptionError as error:
        parser.error(str(error))
    from dynaxla.precompile.compile_for_target import compile_and_report, plan_mesh
    from dynaxla.precompile.declared_dims import DeclaredDims

    model, args, kwargs = called.function, called.args, called.kwargs
    try:
        declared = [DeclaredDims.parse(text) for text in given.bucket]
        plan = plan_mesh(model, given.mesh, given.shard)
        return compile_and_report(model, args, kwargs, given.target, options, declared, given.train, given.out, plan)
    except (TargetError, OptionError, ShardingError) as error:
        parser.error(str(error))
    except (DynaxlaError, OSError) as error:
        print(error, file=sys.stderr)
    return None


def _options(text: str, parser: argparse.ArgumentParser) -> Mapping[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        parser.error(f"--options is no JSON: {error}")
    if not isinstance(options, dict):
        parser.error(f'--options is no JSON object, such as {{"bucketing": "require"}}: {text}')
    return options


def _told(compilation: Compilation, given: argparse.Namespace) -> bool:
    """Says on stderr what is amiss; whether nothing is."""
    for refusal in compilation.refused:
        print(f"{refusal.name} {dict(refusal.sizes) or ''} did not compile: {refusal.error}", file=sys.stderr)
    if not compilation.programs and not compilation.refused:
        print(f"{given.factory} has nothing that compiles", file=sys.stderr)
    if given.out and not compilation.complete:
        print(f"no package was written to {given.out}: not every program compiled and fits", file=sys.stderr)
    return compilation.complete


def print_table(compilation: Compilation) -> None:
    """A line for each program."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"compiled for {compilation.target}")
    table.add_column("program")
    table.add_column("sizes")
    headings = ("ops", "lowering s", "compile s", "GFLOP", "MB accessed", "FLOP/B", "least us", "bound by")
    memory = ("arguments", "outputs", "temporaries", "code", "MB on chip", "of HBM", "fits")
    for heading in (*headings, *memory):
        table.add_column(heading, justify="right")
    for report in compilation.programs:
        roofline, use = report.roofline, report.memory
        classes = (use.arguments_bytes, use.outputs_bytes, use.temporaries_bytes, use.code_bytes, use.total_bytes)
        table.add_row(
            report.name,
            " ".join(f"{name}={size}" for name, size in report.sizes.items()),
            str(report.ops),
            f"{report.lowering_s:.2f}",
            f"{report.compile_s:.2f}",
            f"{report.flops / 1e9:.4g}",
            f"{report.accessed_bytes / 1e6:.1f}",
            f"{report.intensity:.1f}",
            "" if roofline is None else f"{roofline.seconds * 1e6:.1f}",
            "" if roofline is None else roofline.bound,
            *(f"{size / 1e6:.1f}" for size in classes),
            f"{use.total_bytes / report.hbm_bytes:.2%}" if report.hbm_bytes else "",
            "yes" if report.fits else "NO",
        )
    Console(width=200).print(table)
    for report in compilation.programs:
        for line in list_communication(report):
            print(line)
    for line in (*compilation.eager, *compilation.exact_shapes):
        print(line)


def list_communication(report: ProgramReport) -> Iterator[str]:
    """Says what a program sends between devices: a line of the whole, and one for each kind of collective."""
    if report.devices == 1:
        return
    seconds, roofline = report.communication_s, report.roofline
    least = "" if seconds is None else f", at least {seconds * 1e6:.1f} us of communication"
    beside = "" if roofline is None else f" beside {roofline.compute_s * 1e6:.1f} us of compute"
    yield f"{report.name} on {report.devices} devices sends {report.sent_bytes / 1e6:.2f} MB per device{least}{beside}"
    for each, count in Counter(report.collectives).items():
        yield f"  {count:4} x {each}"
