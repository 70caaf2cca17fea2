"""Lists the calls for which eager raises, by the error inputs of torch's own op database, and that do not raise here.

    python -m conformance.error_inputs [device | compiled] [--only REGEX]

"device" runs each call op by op on the device, "compiled" through torch.compile on the host. Prints the calls that gave
a result, and the counts. Of errors that depend on values (an index out of range, an invalid probability) compiled
graphs raise none: docs/device.md.
"""

from __future__ import annotations

import argparse
import logging
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import dynaxla

RAISES = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AttributeError, AssertionError)


def calls(only: str) -> Iterator[tuple[str, Any, Any]]:
    """Name, op and sample of every call for which eager raises, without sparse tensors."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if op.error_inputs_func is None or not re.search(only, op.name):
            continue
        for number, given in enumerate(op.error_inputs("cpu")):
            sample = given.sample_input
            tensors = [
                x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)
            ]
            if all(x.layout is torch.strided for x in tensors):
                yield f"{op.name} {number}", op.op, sample


def raised(op: Any, sample: Any, how: str) -> str | None:
    """The words of what a call raised, or None."""
    args = (sample.input, sample.args, sample.kwargs)

    def run(first: Any, rest: Any, named: Any) -> Any:
        return op(first, *rest, **named)

    if how == "compiled":
        torch._dynamo.reset()
        run = torch.compile(run, backend="dynaxla")
    try:
        run(*(_on_device(args) if how == "device" else args))
    except RAISES as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return None


def _on_device(args: Any) -> Any:
    """The arguments on the device, with their strides; those that share memory still do."""
    storages: dict[int, torch.Tensor] = {}

    def move(x: torch.Tensor) -> torch.Tensor:
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())  # type: ignore[call-overload]
        moved = storages.setdefault(x.untyped_storage().data_ptr(), whole.to("dynaxla"))
        typed = moved if moved.dtype is x.dtype else moved.view(x.dtype)
        return typed.as_strided(x.shape, x.stride(), x.storage_offset())

    return tree_map_only(torch.Tensor, move, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", nargs="?", default="device", choices=("device", "compiled"))
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    logging.disable()
    warnings.simplefilter("ignore")
    if options.how == "device":
        dynaxla.use()
    counts: Counter[str] = Counter()
    for name, op, sample in calls(options.only):
        expected = raised(op, sample, "eager")
        if expected is None:
            continue
        found = raised(op, sample, options.how)
        counts["raises" if found else "gives something"] += 1
        if found is None:
            print(f"{name}\t{expected[:160]}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))


if __name__ == "__main__":
    main()
