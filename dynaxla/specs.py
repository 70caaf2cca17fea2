"""Plain values that describe tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor whose last dim is innermost; an empty dim counts as one place, as in torch."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(sizes[dim], 1)
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor of fixed sizes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return elements * self.dtype.itemsize

    def __str__(self) -> str:
        name = _SHORT.get(self.dtype, str(self.dtype).removeprefix("torch."))
        return f"{name}[{','.join(map(str, self.shape))}]"
