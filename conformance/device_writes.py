"""Compares the memory that ops write on the device with eager's, for written tensors of several layouts.

Each op's samples run as the in-place variant and with `out=`, on tensors that are transposed, have gaps, or have an
offset. All elements of the storage are compared, also those that the op must not write. Some of eager's kernels write
other elements than the op's result (they take every tensor for row-major), or change the result's strides: then the
op's result is right too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from conformance.opinfo_compare import first_line, tensor_difference
from conformance.opinfo_samples import EAGER_ERRORS, SeesRandomOps, seed

Layout = Callable[[Tensor], Tensor]
Write = Callable[[Tensor, str], object]


def transposed(value: Tensor) -> Tensor:
    """The same elements, the first dim innermost."""
    backwards = tuple(reversed(range(value.dim())))
    return value.permute(backwards).clone(memory_format=torch.contiguous_format).permute(backwards)


def with_gaps(value: Tensor) -> Tensor:
    """The same elements, every other one of a larger tensor's last dim, behind its first row."""
    sizes = [value.shape[0] + 1, *value.shape[1:]]
    sizes[-1] = sizes[-1] * 2 + 1
    whole = torch.ones(sizes, dtype=value.dtype)
    part = whole[1:, ..., 1::2] if value.dim() > 1 else whole[3::2]
    part.copy_(value)
    return part


LAYOUTS: tuple[Layout, ...] = (transposed, with_gaps)


def check_writes(info: Any, dtype: torch.dtype, count: int) -> tuple[str, str]:
    """What comes of an op's samples: "right", "wrong", "raised" or "not run", with a line."""
    seed()
    ran = 0
    for write, own, result in islice(_writes(info, dtype), count):
        for layout in LAYOUTS if own.dim() else ():
            expected, plain = layout(own), layout(own)
            seed()
            try:
                with SeesRandomOps() as random:
                    write(expected, "cpu")
                plain.copy_(result)
            except EAGER_ERRORS:
                continue
            if random.seen:
                continue
            ran += 1
            told = _compared(write, layout(own), (expected, plain))
            if told is not None:
                return told[0], f"{layout.__name__} {tuple(own.shape)}: {told[1]}"
    return ("right", "") if ran else ("not run", "eager takes none of the samples")


def _compared(write: Write, given: Tensor, right: tuple[Tensor, Tensor]) -> tuple[str, str] | None:
    there = _flat(given).to("dynaxla").as_strided(given.shape, given.stride(), given.storage_offset())
    seed()
    try:
        write(there, "dynaxla")
        found = _flat(there).cpu()
    except Exception as error:  # the sweep's result
        return "raised", f"{type(error).__name__}: {first_line(error)}"
    told = [tensor_difference(found, _flat(expected), None, False) for expected in right]
    return None if None in told else ("wrong", str(told[0]))


def _flat(x: Tensor) -> Tensor:
    """All of the memory in which it lies."""
    return x.as_strided([x.untyped_storage().nbytes() // x.itemsize], [1], 0)


def _writes(info: Any, dtype: torch.dtype) -> Iterator[tuple[Write, Tensor, Tensor]]:
    """What writes to a tensor, with the tensor's value before it and the op's result."""
    for sample in info.sample_inputs("cpu", dtype):
        if not isinstance(sample.input, Tensor) or sample.input.layout is not torch.strided:
            continue
        try:
            result = info.op(sample.input, *sample.args, **sample.kwargs)
        except EAGER_ERRORS:
            continue
        if not isinstance(result, Tensor) or result.layout is not torch.strided:
            continue
        if info.inplace_variant is not None and result.shape == sample.input.shape:
            yield _in_place(info.inplace_variant, sample), sample.input, result
        if info.supports_out:
            yield _out(info.op, sample), torch.zeros_like(result), result


def _in_place(op: Callable[..., Any], sample: Any) -> Write:
    return lambda x, device: op(x, *_on(sample.args, device), **_on(sample.kwargs, device))


def _out(op: Callable[..., Any], sample: Any) -> Write:
    return lambda x, device: op(*_on((sample.input, *sample.args), device), **{**_on(sample.kwargs, device), "out": x})


def _on(given: Any, device: str) -> Any:
    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(device)
        return torch.device(device) if isinstance(value, torch.device) or value == "cpu" else value

    return tree_map(moved, given)
