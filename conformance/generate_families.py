"""Runs transformers' `generate`, unmodified, with a compiled `net.forward`; counts programs, captures and exact shapes.

`python -m conformance.generate_families [--families NAMES] [--ways NAMES] [--xla]` prints a line for each model family
and each use of `generate`. The line says whether the tokens are eager's, how many programs 20 requests of 5 to 200
tokens and 64 new ones took, how many of these in the second half, how many captures, which parts are compiled per exact
shape, and how many ops run in eager. The models are small and random. As only numbers and counts matter, not times,
eager PyTorch runs the programs, with junk in their padding; `--xla` compiles them with XLA instead. `--why` prints the
function and the sizes of each program.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

import dynaxla
from dynaxla.observe.compile_timing import CompileTiming
from tests.bucketing.eager_programs import eager_programs
from tests.generation.families import FAMILIES
from tests.generation.ways import LENGTHS, NEW_TOKENS, WAYS, count


@contextmanager
def told() -> Iterator[None]:
    """Inside, every program that is made is printed."""

    def tell(self: CompileTiming, what: str, why: str) -> None:
        print(f"      {what}: {why}", flush=True)

    with mock.patch.object(CompileTiming, "tell", tell):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--requests", type=int, default=len(LENGTHS))
    parser.add_argument("--new", type=int, default=NEW_TOKENS)
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--why", action="store_true")
    options = parser.parse_args()
    executing = nullcontext if options.xla else eager_programs
    for name in options.families:
        for way in options.ways:
            torch._dynamo.reset()
            started = time.perf_counter()
            try:
                with told() if options.why else nullcontext():
                    found = count(
                        FAMILIES[name],
                        WAYS[way],
                        dynaxla.recorder(),
                        executing,
                        LENGTHS[: options.requests],
                        options.new,
                    )
            except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as error:
                found = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
            print(f"{name} {way}: {found} [{time.perf_counter() - started:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
