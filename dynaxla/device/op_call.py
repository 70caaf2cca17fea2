"""What a call of an op is, for the table of programs: its parts without the values that are inputs of a program."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.storage import DeviceStorage
from dynaxla.device.view_layout import Ints, ViewLayout, view_layout_of
from dynaxla.torch_api.private_device import get_attached_memory
from dynaxla.torch_api.pytree import tree_leaves
from dynaxla.types import DEVICE_TYPE, TensorSpec

MOST_LYINGS = 1 << 14


class DevicesDiffer(RuntimeError):
    """Tensors of two devices meet in one call; torch raises a RuntimeError of this text for its own devices."""

    def __init__(self, device: torch.device, is_indexed: bool = False) -> None:
        text = "Expected all tensors to be on the same device, but found at least two devices"
        indexed = f"indices should be either on cpu or on the same device as the indexed tensor ({device})"
        super().__init__(indexed if is_indexed else f"{text}, {DEVICE_TYPE}:0 and {device}!")


class OnlyStrided(NotImplementedError):
    """What was to be made or used is a tensor that the device does not keep."""

    def __init__(self, what: object) -> None:
        super().__init__(
            f"{what}: tensors of {DEVICE_TYPE} are strided or sparse; make and use quantized and strided nested ones "
            "on the CPU, and move what is dense (of nested ones layout=torch.jagged is taken)"
        )


def check_index(device: torch.device | None) -> None:
    """Raises:
    RuntimeError: the device is another than number 0, or than the number that torchrun gave this process on its host: by
        that, too, a process names its device.
    """
    if device is not None and device.index and str(device.index) != os.environ.get("LOCAL_RANK"):
        raise RuntimeError(
            f"{device} is none: torch's Python hooks know one device of a type; "
            f"dynaxla.use() chooses which device of the platform {DEVICE_TYPE}:0 is"
        )


@dataclass(frozen=True, slots=True, eq=False)
class InternedLayout:
    """How a tensor lies: one value for all equal ones, so that it is compared by its identity."""

    layout: ViewLayout
    is_plain: bool = field(init=False)
    is_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_plain", self.layout.is_plain)
        object.__setattr__(self, "is_whole", self.layout.is_whole)


Lyings = dict[Any, tuple[InternedLayout, Ints]]

TENSOR, HOST, NUMBER, LIST, PLAIN, DEVICE = range(6)
"""What a part of a call begins with. Behind it stand: which memory, and a `InternedLayout`; a dtype; a type; parts;
type and value;
nothing. The part of None is None."""

Part = tuple[Any, ...] | None


@dataclass(slots=True)
class OpInvocation:
    """A call, read.

    Attributes:
        known: its op.
        layouts: those of the process, one value for all equal ones.
        parts: of the arguments by position.
        named: those by name.
        tensors: of the device, in order.
        memories: theirs, each once.
        starts: where the windows of the tensors start, in order.
        numbers: plain ones that are inputs.
        hosts: tensors of the host that have no dims.
        generator: that the user gave, or None.
    """

    known: FunctionalForm
    layouts: Lyings
    parts: tuple[Part, ...] = ()
    named: tuple[tuple[str, Part], ...] = ()
    tensors: list[torch.Tensor] = field(default_factory=list)
    memories: list[DeviceStorage] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    hosts: list[torch.Tensor] = field(default_factory=list)
    generator: torch.Generator | None = None

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Reads the arguments.

        Raises:
            DevicesDiffer: a tensor of the host that has dims is no index, or a tensor of the host is written to.
        """
        lifts = self.known.lifts
        for name in self.known.written:
            place = self.known.names.index(name)
            target = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(target, torch.Tensor) and target.device.type != DEVICE_TYPE:
                raise self._differ(target)
        placed = self.known.from_host
        if placed:
            args = [_to_device(value) if place in placed else value for place, value in enumerate(args)]
            kwargs = {name: _to_device(value) if name in placed else value for name, value in kwargs.items()}
        self.parts = tuple([self._part(value, place in lifts) for place, value in enumerate(args)])
        if kwargs:
            given = [(name, self._part(value, name in lifts)) for name, value in kwargs.items()]
            self.named = tuple([each for each in given if each[1] is not None])

    def _part(self, value: Any, lifts: bool) -> Part:
        if value is None:
            return None
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        kind = type(value)
        if lifts and (kind is float or (kind is int and -(2**63) <= value < 2**63)):
            self.numbers.append(value)
            return (NUMBER, kind)
        if kind is list or kind is tuple:
            return (LIST, tuple([self._part(each, lifts) for each in value]))
        if kind is float and (value == 0 or value != value):
            return (PLAIN, kind, repr(value))  # zeros are equal, and no NaN is
        if kind is torch.device and value.type == DEVICE_TYPE:
            check_index(value)
            return (DEVICE,)
        if isinstance(value, torch.Generator):
            self.generator = value
            return None
        return (PLAIN, kind, value)

    def _tensor(self, tensor: torch.Tensor) -> Part:
        memory = get_attached_memory(tensor.untyped_storage())
        if memory is None:
            return self._of_host(tensor)
        if tensor.is_neg() or tensor.is_conj():
            return self._tensor(resolve_lazy_bits(tensor))
        self.tensors.append(tensor)
        placed, starts = locate_view(self.layouts, memory.spec, tensor)
        self.starts.extend(starts)
        for place, known in enumerate(self.memories):
            if known is memory:
                return (TENSOR, place, placed)
        self.memories.append(memory)
        return (TENSOR, len(self.memories) - 1, placed)

    def _of_host(self, tensor: torch.Tensor) -> Part:
        if tensor.device.type == "cpu" and tensor.dim() == 0:
            self.hosts.append(tensor)
            return (HOST, tensor.dtype)
        raise self._differ(tensor)

    def _differ(self, tensor: torch.Tensor) -> DevicesDiffer:
        return DevicesDiffer(tensor.device, is_indexed="indices" in self.known.from_host)


def _to_device(value: Any) -> Any:
    """An argument with its tensors of the host that have dims on the device."""
    if isinstance(value, (list, tuple)):
        return [_to_device(each) for each in value]
    is_of_host = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.dim() > 0
    return value.to(DEVICE_TYPE) if is_of_host else value


def leaf_parts(part: Part) -> Iterator[tuple[Any, ...]]:
    """The parts of a part, in the order in which they were read."""
    if part is not None and part[0] == LIST:
        for each in part[1]:
            yield from leaf_parts(each)
    elif part is not None:
        yield part


def find_targets(known: FunctionalForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes to."""
    places = [(name, known.names.index(name)) for name in known.written]
    given = tree_leaves([args[place] if place < len(args) else kwargs.get(name) for name, place in places])
    return [each for each in given if isinstance(each, torch.Tensor)]


def find_lazy_targets(known: FunctionalForm, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """What a call writes to of which the memory holds conjugates or negatives."""
    return [each for each in find_targets(known, args, kwargs) if each.is_conj() or each.is_neg()]


def resolve_lazy_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its own elements, and not their conjugates or negatives."""
    if tensor.is_conj():
        tensor = torch.conj_physical(tensor.conj())
    if tensor.is_neg():
        tensor = torch.neg(torch.ops.aten._neg_view.default(tensor))
    return tensor


def locate_view(layouts: Lyings, memory: TensorSpec, tensor: torch.Tensor) -> tuple[InternedLayout, Ints]:
    """How a tensor lies in a memory, and where its window starts."""
    seen = (memory.shape, memory.dtype, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
    found = layouts.get(seen)
    if found is None:
        layout, starts = view_layout_of(
            memory, TensorSpec.from_tensor(tensor), tensor.stride(), int(tensor.storage_offset())
        )
        if len(layouts) > MOST_LYINGS:
            layouts.clear()
        placed, _ = layouts.setdefault(layout, (InternedLayout(layout), ()))
        found = layouts[seen] = placed, starts
    return found
