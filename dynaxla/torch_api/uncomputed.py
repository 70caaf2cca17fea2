"""A fake mode in which a program of the user's runs from end to end without computing, and modules whose weights are in it."""

from __future__ import annotations

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
from torch.utils._mode_utils import no_dispatch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException"]
# DataDependentOutputException: Python asked for the value of a fake tensor; `func` is the op.
# DynamicOutputShapeException: the sizes of an op's result depend on such a value; `func` is the op.
# UnsupportedOperatorException: an op has no fake kernel; `func` is the op.

KNOWN_ELEMENTS = 4096
"""The most elements of a tensor whose values are known in `UncomputedMode`."""

_PLAIN = (torch.Tensor, nn.Parameter, FakeTensor)
_Value = TypeVar("_Value")


class UncomputedMode(FakeTensorMode):
    """Makes the results of all ops fake: they have sizes, strides, a dtype and a device, but no memory and no values.

    Tensors of the user's are neither read nor written. The values of small ones are known until something writes to
    them: a program may read sizes and lengths from its arguments.

    Relies on `FakeTensorMode.validate_and_convert_non_fake_tensors`, which gets an op's arguments and makes those that are
    real fake; on `may_turn_const`, which says which results of ops on known values are known; and on `FakeTensor.constant`
    and `add_constant_storage_mapping`, by which torch keeps known values and forgets them at a write.

    Args:
        device: of tensors that are given on the device "meta".
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        self._device = device
        self._taken = WeakIdKeyDictionary()

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the fake tensor that stands for a tensor, always the same one; the tensor itself if it is of a subclass of
        torch's.

        Args:
            tensor: real, fake in any mode, or of the device "meta".
        """
        if self.is_our_fake(tensor) or type(tensor) not in _PLAIN:
            return tensor
        taken: torch.Tensor | None = self._taken.get(tensor)
        if taken is None:
            is_empty = isinstance(tensor, FakeTensor) or tensor.device.type == "meta"
            taken = self._taken[tensor] = self._describe(tensor) if is_empty else self._know(tensor)
        return taken

    def validate_and_convert_non_fake_tensors(
        self, func: Any, converter: Any, flat_args: Sequence[Any], args_spec: Any
    ) -> tuple[list[object], list[FakeTensor]]:
        """Takes the real tensors among an op's arguments, such as globals of the user's."""
        taken = [self.take(value) if isinstance(value, torch.Tensor) else value for value in flat_args]
        return super().validate_and_convert_non_fake_tensors(func, converter, taken, args_spec)

    def may_turn_const(self, t: torch.Tensor) -> bool:
        """Whether a result of an op on known values is known, too."""
        return t.numel() <= KNOWN_ELEMENTS and t.layout is torch.strided and t.device.type != "meta"

    def _know(self, tensor: torch.Tensor) -> torch.Tensor:
        fake = self.from_tensor(tensor)
        if tensor.numel() <= KNOWN_ELEMENTS and tensor.layout is torch.strided:
            with no_dispatch():
                fake.constant = tensor.detach().clone()
            self.fake_tensor_converter.add_constant_storage_mapping(fake)
        return fake

    def _describe(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor like one without values."""
        device = self._device if tensor.device.type == "meta" else tensor.device
        with self, torch.inference_mode(tensor.is_inference()):
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(made, tensor.requires_grad)
            return made.requires_grad_(tensor.requires_grad)


@contextmanager
def hold_uncomputed(mode: UncomputedMode, module: nn.Module) -> Iterator[None]:
    """Context in which a module holds, in place of its tensors, the fake ones that stand for them.

    Relies on `Module._parameters` and `Module._buffers`; other tensors are attributes, or in a list that is one.
    """
    holders = [
        holder for each in module.modules() for holder in (vars(each), vars(each)["_parameters"], vars(each)["_buffers"])
    ]
    before = [(holder, name, value) for holder in holders for name, value in holder.items() if _holds_tensor(value)]
    try:
        for holder, name, value in before:
            holder[name] = _take(mode, value)
        yield
    finally:
        for holder, name, value in before:
            holder[name] = value


def asks_for_memory(error: Exception) -> bool:
    """Whether an error is that of code which asked for a fake tensor's memory, as `numpy()` does. Relies on torch's messages."""
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in ("Cannot access data pointer of Tensor", "not supported for tensor subclasses")
    )


def _holds_tensor(value: object) -> bool:
    values: Any = value if type(value) in (list, tuple) else (value,)
    return any(isinstance(each, torch.Tensor) for each in values)


def _take(mode: UncomputedMode, value: _Value) -> _Value:
    if type(value) in (list, tuple):
        return type(value)(_take(mode, each) for each in value)  # type: ignore[call-arg, attr-defined]
    return mode.take(value) if isinstance(value, torch.Tensor) else value  # type: ignore[return-value]
