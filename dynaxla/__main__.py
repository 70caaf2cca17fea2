"""`python -m dynaxla`: compile a model for a target that is not here and say what it takes there; look into the cache."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dynaxla.cache.command import add_cache_command
from dynaxla.errors import DynaxlaError, OptionError, TargetError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; gives the exit status of the command, 2 for bad usage."""
    parser = _parser()
    given = parser.parse_args(arguments)
    status: int = given.run(given)
    return status


def _compile(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """0 if every program compiled and fits, 1 if not."""
    try:
        factory = _find(given.factory)
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    built = factory()  # what it raises is the user's own, and reaches them with its traceback
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not isinstance(built[1], tuple):
        parser.error(f"{given.factory} must give (model, args) or (model, args, kwargs), args a tuple")
    from dynaxla.ahead.aot import compile_for_target

    try:
        reports = compile_for_target(*built, target=given.target)
    except (TargetError, OptionError) as error:
        parser.error(str(error))
    except DynaxlaError as error:
        print(error, file=sys.stderr)
        return 1
    if not reports:
        print(f"{given.factory} has nothing that compiles", file=sys.stderr)
        return 1
    _print_table(reports, given.target)
    return 0 if all(report.fits for report in reports) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dynaxla", description="PyTorch on XLA")
    commands = parser.add_subparsers(dest="command", required=True)
    compile_command = commands.add_parser(
        "compile", help="compile a model's graphs for a TPU topology, on a machine without a TPU"
    )
    compile_command.add_argument(
        "factory",
        metavar="MODULE:FACTORY",
        help="a function without arguments that gives (model, args) or (model, args, kwargs)",
    )
    compile_command.add_argument("--target", required=True, help="a TPU topology, such as tpu:v5e:1x1")
    compile_command.set_defaults(run=partial(_compile, parser=parser))
    add_cache_command(commands)
    return parser


def _find(factory: str) -> Callable[[], Any]:
    """Imports what MODULE:FACTORY names.

    Raises:
        ValueError: not of that form, or not a function.
        ImportError, AttributeError: there is no such module or no such name in it.
    """
    name, _, attribute = factory.partition(":")
    if not name or not attribute:
        raise ValueError(f"{factory!r} is not of the form package.module:factory")
    sys.path.insert(0, "")
    found = getattr(importlib.import_module(name), attribute)
    if not callable(found):
        raise ValueError(f"{factory} is no function, but {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _print_table(reports: Sequence[Any], target: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"compiled for {target}")
    table.add_column("program")
    for heading in ("ops", "lowering s", "compile s", "GFLOP", "MB accessed", "MB on chip", "of HBM", "fits"):
        table.add_column(heading, justify="right")
    for report in reports:
        table.add_row(
            report.name,
            str(report.ops),
            f"{report.lowering_s:.2f}",
            f"{report.compile_s:.2f}",
            f"{report.flops / 1e9:.3f}",
            f"{report.accessed_bytes / 1e6:.1f}",
            f"{report.memory.total_bytes / 1e6:.1f}",
            f"{report.memory.total_bytes / report.hbm_bytes:.2%}",
            "yes" if report.fits else "NO",
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
