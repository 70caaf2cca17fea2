"""`python -m dynaxla`: compile a model for a target that is not here, and say what it takes there."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from dynaxla.errors import DynaxlaError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; 0 if every program compiled and fits, 1 if not, 2 for bad usage."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        function, args, kwargs = _build(given.factory)
    except (ValueError, ImportError, AttributeError) as error:
        parser.error(str(error))
    from dynaxla.aot import compile_for_target

    try:
        reports = compile_for_target(function, args, kwargs, target=given.target)
    except DynaxlaError as error:
        print(error, file=sys.stderr)
        return 1
    _print_table(reports, given.target)
    return 0 if reports and all(report.fits for report in reports) else 1


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
    return parser


def _build(factory: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Imports and calls the factory.

    Raises:
        ValueError: not of the form MODULE:FACTORY, or the factory gives something else than a model and arguments.
    """
    name, _, attribute = factory.partition(":")
    if not name or not attribute:
        raise ValueError(f"{factory!r} is not of the form package.module:factory")
    sys.path.insert(0, "")
    built = getattr(importlib.import_module(name), attribute)()
    if not isinstance(built, tuple) or len(built) not in (2, 3) or not isinstance(built[1], tuple):
        raise ValueError(f"{factory} must give (model, args) or (model, args, kwargs), args a tuple")
    return built[0], built[1], built[2] if len(built) == 3 else {}


def _print_table(reports: Sequence[Any], target: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"compiled for {target}")
    for heading in ("program", "ops", "lowering s", "compile s", "GFLOP", "MB accessed", "MB on chip", "of HBM", "fits"):
        table.add_column(heading, justify="left" if heading == "program" else "right")
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
