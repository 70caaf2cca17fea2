"""`python -m dynaxla explain`: where the time of a model's calls goes, and what to change, in order."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from dynaxla.errors import DynaxlaError
from dynaxla.precompile.model_factory import call_factory

FAILING = ("graph-break", "fallback", "recompile", "exact-shape")

_DESCRIPTION = """Compiles a model, calls it some times, and prints what costs time and what to change, in order. Exit status: 1
if something that --fail-on names was found, 2 for bad usage."""


def add_explain_command(commands: Any) -> None:
    """Adds the command `explain` to the subparsers of the package's own; its `run` takes what is parsed."""
    parser = commands.add_parser(
        "explain", help="say where the time of a model's calls goes, and what to change", description=_DESCRIPTION
    )
    parser.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a function without arguments that gives (model, args) or (model, args, kwargs); or FILE.py:FACTORY",
    )
    parser.add_argument("--calls", type=int, default=4, help="how many calls")
    parser.add_argument("--train", action="store_true", help="differentiate the sum of all results in each call")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page")
    parser.add_argument("--fail-on", default="", metavar="KIND[,...]", help=f"of {', '.join(FAILING)}")
    parser.set_defaults(run=partial(_run, parser=parser))


def _run(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from dynaxla.explaining.explanation import explain  # it imports torch and JAX

    wanted = [kind for kind in given.fail_on.split(",") if kind]
    if unknown := [kind for kind in wanted if kind not in FAILING]:
        parser.error(f"--fail-on {unknown[0]}: one of {', '.join(FAILING)}")
    try:
        call = call_factory(given.factory)
        found = explain(call.function, *call.args, calls=given.calls, backward=given.train, **call.kwargs)
    except DynaxlaError as error:
        parser.error(str(error))
    print(found.to_json() if given.json else found)
    if given.html is not None:
        found.write_html(given.html)
    failing = [each for each in found.findings if each.kind in wanted]
    for each in failing:
        print(f"{each.kind}: {each.what}; at {each.where or 'no line'}", file=sys.stderr)
    return 1 if failing else 0
