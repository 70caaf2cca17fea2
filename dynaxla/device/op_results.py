"""From what programs of ops give to what the ops give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.op_call import find_targets, resolve_lazy_bits
from dynaxla.device.op_programs import OpProgramSignature
from dynaxla.device.storage import DeviceStorage
from dynaxla.device.trace_op import NumberResult
from dynaxla.torch_api.private_device import copy_view_metadata
from dynaxla.torch_api.pytree import tree_map_only


def share_results(program: OpProgramSignature, outputs: Sequence[DeviceStorage]) -> None:
    """Two outputs may be one result."""
    owners: dict[int, DeviceStorage] = {}
    for made, memory in zip(program.outputs, outputs, strict=True):
        if made.source.result is not None:
            owner = owners.setdefault(made.source.result, memory)
            if owner is not memory:
                memory.have_as(owner)


def bind_writes(memory: DeviceStorage, new: DeviceStorage) -> None:
    """What an op writes has what it made."""
    if new.held is memory.held:
        return
    memory.rebind(new.held, made_by=new.made_by)
    if new.is_shared:
        memory.have_as(new)


def resize_output(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Makes a tensor of `out=` the result, which has other sizes, with torch's warning if the tensor has elements."""
    stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    torch.ops.aten._resize_output_.default(stand_in, result.shape, stand_in.device)
    copy_view_metadata(tensor, result)


def collect_returns(known: FunctionalForm, plain: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives: its own results, and the parameters that it gives back."""
    rest = iter(plain)
    found = []
    for name in known.returned:
        if name is None:
            found.append(next(rest))
            continue
        place = known.names.index(name)
        found.append(args[place] if place < len(args) else kwargs.get(name))
    if not found:
        return None
    return found[0] if len(found) == 1 else tuple(found)


def run_on_plain(
    run: Callable[..., Any],
    known: FunctionalForm,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    lazy: Sequence[torch.Tensor],
) -> Any:
    """What a call gives that writes to memory of conjugates or negatives of elements: it writes to copies without these bits,
    which are copied back.

    Args:
        run: runs an op.
        lazy: the targets with such bits.
    """
    plain = [resolve_lazy_bits(target) for target in lazy]
    copies = {id(target): copy for target, copy in zip(lazy, plain, strict=True)}
    given = tree_map_only(torch.Tensor, lambda tensor: copies.get(id(tensor), tensor), (tuple(args), dict(kwargs)))
    made = run(known, *given)
    for target, copy in zip(lazy, plain, strict=True):
        if target.shape != copy.shape:
            target.resize_(copy.shape)
        target.copy_(copy)
    targets = {id(copy): target for target, copy in zip(lazy, plain, strict=True)}
    return tree_map_only(torch.Tensor, lambda result: targets.get(id(result), result), made)


def count_writes(known: FunctionalForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises the versions of the tensors that a call wrote to."""
    torch.autograd.graph.increment_version(find_targets(known, args, kwargs))


def wrap_output(place: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """A result of `TracedGraph.results`, of the outputs."""
    if isinstance(place, list):
        return [wrap_output(each, tensors) for each in place]
    if isinstance(place, NumberResult):
        return place.value
    return None if place is None else tensors[place]
