"""`python -m dynaxla`: compile for a target that is not here; compare backends; explain; look into the cache; serve."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dynaxla.bench.bench_command import add_bench_command
from dynaxla.cache.cache_command import add_cache_command
from dynaxla.explaining.explain_command import add_explain_command
from dynaxla.precompile.compile_command import add_compile_command
from dynaxla.serving.llm.serve_command import add_serve_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; gives the exit status of the command, 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="python -m dynaxla", description="PyTorch on XLA")
    commands = parser.add_subparsers(dest="command", required=True)
    add_compile_command(commands)
    add_bench_command(commands)
    add_explain_command(commands)
    add_cache_command(commands)
    add_serve_command(commands)
    given = parser.parse_args(arguments)
    status: int = given.run(given)
    return status


if __name__ == "__main__":
    sys.exit(main())
