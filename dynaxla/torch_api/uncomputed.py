"""A program of the user's run from end to end on fake tensors, without computing, and its errors."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakIdKeyDictionary

from dynaxla.torch_api.transforms import let_parts_run

KNOWN_ELEMENTS = 4096
"""The most elements of a tensor whose values are known."""

_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
_Value = TypeVar("_Value")


class UncomputedTensors:
    """Fake tensors in place of a program's own, and a mode in which it runs on them: results of ops have sizes, strides, a
    dtype and a device, but no memory and no values.

    Tensors of the user's are neither read nor written. The values of small ones are known until something writes to
    them: a program may read sizes and lengths from its arguments.

    Relies on `FakeTensorMode.validate_and_convert_non_fake_tensors`, which gets an op's arguments and makes those that are
    real fake, and on `may_turn_const`, which says which results of ops on known values are known: one mode gets its own (not a
    class of its own, as torch looks up fakes of higher-order calls by the mode's class); on `FakeTensor.constant` and
    `add_constant_storage_mapping`, by which torch keeps known values and forgets them at a write; and on
    `_allow_unsafe_data_ptr_access`, without which code that reads memory raises.

    Args:
        device: of tensors that are given on the device "meta".

    Attributes:
        mode: that programs run in.
    """

    def __init__(self, device: torch.device) -> None:
        self.mode: Any = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self.mode._allow_unsafe_data_ptr_access = False
        let_parts_run(self.mode)
        self.mode.validate_and_convert_non_fake_tensors = self._convert  # type: ignore[method-assign]
        self.mode.may_turn_const = _may_be_known  # type: ignore[method-assign, assignment]
        self._device = device
        self._taken = WeakIdKeyDictionary()

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the fake tensor that stands for a tensor, always the same one; the tensor itself if it is of a subclass of
        torch's.

        Args:
            tensor: real, fake in any mode, or of the device "meta".
        """
        if self.mode.is_our_fake(tensor) or type(tensor) not in _PLAIN:
            return tensor
        taken: torch.Tensor | None = self._taken.get(tensor)
        if taken is None:
            is_empty = isinstance(tensor, FakeTensor) or tensor.device.type == "meta"
            taken = self._taken[tensor] = self._describe(tensor) if is_empty else self._know(tensor)
        return taken

    def copy(self, value: _Value) -> _Value:
        """Returns a copy of an object in which the tensors are taken; the object itself if it cannot be copied."""
        if isinstance(value, torch.Tensor):
            return self.take(value)  # type: ignore[return-value]
        try:
            with self.mode, _TakenCopies(self):
                return copy.deepcopy(value)
        except TypeError:  # it has no copy, such as a lock
            return value

    def _convert(
        self, func: Any, converter: Any, flat_args: Sequence[Any], args_spec: Any
    ) -> tuple[list[object], list[FakeTensor]]:
        """Takes the real tensors among an op's arguments, such as globals of the user's."""
        taken = [self.take(value) if isinstance(value, torch.Tensor) else value for value in flat_args]
        return FakeTensorMode.validate_and_convert_non_fake_tensors(self.mode, func, converter, taken, args_spec)

    def _know(self, tensor: torch.Tensor) -> torch.Tensor:
        fake: torch.Tensor = self.mode.from_tensor(tensor)
        if _may_be_known(tensor):
            with no_dispatch():
                fake.constant = tensor.detach().clone()  # type: ignore[attr-defined]
            self.mode.fake_tensor_converter.add_constant_storage_mapping(fake)
        return fake

    def _describe(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like one without values."""
        device = self._device if tensor.device.type == "meta" else tensor.device
        with self.mode, torch.inference_mode(tensor.is_inference()):
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(made, tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)


class _TakenCopies(TorchFunctionMode):
    """Copies of tensors are what stands for them. Relies on `Tensor.__deepcopy__` asking function modes."""

    def __init__(self, tensors: UncomputedTensors) -> None:
        super().__init__()
        self._tensors = tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self._tensors.take(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def hold_uncomputed(tensors: UncomputedTensors, module: nn.Module) -> Iterator[None]:
    """Context in which a module holds, in place of its tensors, the fake ones that stand for them. At its end all attributes
    are as they were.

    Relies on `Module._parameters` and `Module._buffers`; other tensors are attributes, or in a list that is one.
    """
    holders = [holder for each in module.modules() for holder in (vars(each), each._parameters, each._buffers)]
    before = [(holder, dict(holder)) for holder in holders]
    try:
        for holder, held in before:
            holder.update({name: _take(tensors, value) for name, value in held.items() if _holds_tensor(value)})
        yield
    finally:
        for holder, held in before:
            holder.clear()
            holder.update(held)


def _may_be_known(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() <= KNOWN_ELEMENTS and tensor.device.type != "meta"


def find_asked_value(error: Exception) -> str | None:
    """Returns what asked for the value of a fake tensor, if an error is raised for that; else None.

    Relies on torch's two classes of such errors, whose `func` is the op, and on the messages of conversions.
    """
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return str(error.func)
    return "a conversion" if any(text in str(error) for text in _CONVERSIONS) else None


def find_missing_kernel(error: Exception) -> str | None:
    """Returns the op, if an error is raised because it has no fake kernel; else None.

    Relies on `UnsupportedOperatorException`, whose `func` is the op, and on the message of `torch.library.custom_op`.
    """
    if isinstance(error, UnsupportedOperatorException):
        return str(error.func)
    found = _NO_KERNEL.search(str(error))
    return None if found is None else found[1]


_CONVERSIONS = (
    "Cannot access data pointer of Tensor",
    "is not supported for tensor subclasses",
    "passed to FakeTensor.__format__",
)
_NO_KERNEL = re.compile(r"There was no fake impl registered for <CustomOpDef\((.*?)\)>")


def _holds_tensor(value: object) -> bool:
    values: Any = value if type(value) in (list, tuple) else (value,)
    return any(isinstance(each, torch.Tensor) for each in values)


def _take(tensors: UncomputedTensors, value: _Value) -> _Value:
    if type(value) in (list, tuple):
        return type(value)(_take(tensors, each) for each in value)  # type: ignore[call-arg, attr-defined]
    return tensors.take(value) if isinstance(value, torch.Tensor) else value  # type: ignore[return-value]
