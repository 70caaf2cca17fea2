"""Do ops that write give eager's memory on the device, however the tensor lies that they write to?

Of each op's samples the in-place variant, and the call with `out=`: into memory that is transposed, has gaps, or begins late.
Compared are all elements of the memory, those included that nothing should touch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from benchmarks.opinfo_compare import first_line, tensor_difference
from benchmarks.opinfo_samples import EAGER_ERRORS, SeesRandomOps, seed

Layout = Callable[[Tensor], Tensor]


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
    for write, own in islice(_writes(info, dtype), count):
        for layout in LAYOUTS if own.dim() else ():
            expected = layout(own)
            seed()
            try:
                with SeesRandomOps() as random:
                    write(expected, "cpu")
            except EAGER_ERRORS:
                continue
            if random.seen:
                continue
            ran += 1
            told = _compared(write, layout(own), expected)
            if told is not None:
                return told[0], f"{layout.__name__} {tuple(own.shape)}: {told[1]}"
    return ("right", "") if ran else ("not run", "eager takes none of the samples")


def _compared(write: Callable[[Tensor, str], object], given: Tensor, expected: Tensor) -> tuple[str, str] | None:
    there = _flat(given).to("dynaxla").as_strided(given.shape, given.stride(), given.storage_offset())
    seed()
    try:
        write(there, "dynaxla")
        found = _flat(there).cpu()
    except Exception as error:  # the sweep's result
        return "raised", f"{type(error).__name__}: {first_line(error)}"
    told = tensor_difference(found, _flat(expected), None, False)
    if told is None and there.stride() != expected.stride():
        told = f"strides {there.stride()}, eager's {expected.stride()}"
    return None if told is None else ("wrong", told)


def _flat(x: Tensor) -> Tensor:
    """All of the memory in which it lies."""
    return x.as_strided([x.untyped_storage().nbytes() // x.itemsize], [1], 0)


def _writes(info: Any, dtype: torch.dtype) -> Iterator[tuple[Callable[[Tensor, str], object], Tensor]]:
    """What writes to a tensor, with the tensor's value before it."""
    for sample in info.sample_inputs("cpu", dtype):
        if not isinstance(sample.input, Tensor) or sample.input.layout is not torch.strided:
            continue
        if info.inplace_variant is not None:
            yield _in_place(info.inplace_variant, sample), sample.input
        if info.supports_out:
            try:
                result = info.op(sample.input, *sample.args, **sample.kwargs)
            except EAGER_ERRORS:
                continue
            if isinstance(result, Tensor) and result.layout is torch.strided:
                yield _out(info.op, sample), torch.zeros_like(result)


def _in_place(op: Callable[..., Any], sample: Any) -> Callable[[Tensor, str], object]:
    return lambda x, device: op(x, *_on(sample.args, device), **_on(sample.kwargs, device))


def _out(op: Callable[..., Any], sample: Any) -> Callable[[Tensor, str], object]:
    return lambda x, device: op(*_on((sample.input, *sample.args), device), **{**_on(sample.kwargs, device), "out": x})


def _on(given: Any, device: str) -> Any:
    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().to(device)
        return torch.device(device) if isinstance(value, torch.device) else value

    return tree_map(moved, given)
