"""Memory that nobody wrote, lazy clones, and tensors that pass through DLPack."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import dlpack

D = "dynaxla"

NEW: dict[str, Callable[[Tensor], Tensor]] = {
    "empty": lambda x: torch.empty(3, 2, dtype=x.dtype, device=x.device),
    "empty_strided": lambda x: torch.empty_strided((2, 3), (1, 2), dtype=x.dtype, device=x.device),
    "empty_permuted": lambda x: torch.empty_permuted((2, 3), (1, 0), dtype=x.dtype, device=x.device),
    "empty_like": torch.empty_like,
    "new_empty": lambda x: x.new_empty(4),
    "new_empty_strided": lambda x: x.new_empty_strided((2, 2), (2, 1)),
    "resize_": lambda x: x.clone().resize_(7),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
@pytest.mark.parametrize("name", NEW)
def test_new_memory_is_filled(name: str, dtype: torch.dtype) -> None:
    made = {}
    torch.use_deterministic_algorithms(True)
    try:
        for device in ("cpu", D):
            made[device] = NEW[name](torch.zeros(2, 2, dtype=dtype, device=device))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.allclose(made[D].cpu(), made["cpu"], equal_nan=True)
    assert made[D].stride() == made["cpu"].stride()


def test_new_memory_is_not_filled_where_that_is_off() -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        assert not torch.empty(3, device=D).isnan().any()
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


def test_resize_takes_a_memory_format() -> None:
    for x in (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5, device=D)):
        assert x.resize_(2, 3, 4, 5, memory_format=torch.channels_last).stride() == (60, 1, 15, 3)
        assert x.resize_(2, 3, 4, 5).stride() == (60, 1, 15, 3)
        assert x.resize_(2, 3, 5, 4).stride() == (60, 20, 4, 1)


def test_lazy_clone() -> None:
    x = torch.arange(6.0, device=D).reshape(2, 3).t()
    clone = torch._lazy_clone(x)
    assert clone.stride() == x.stride()
    clone.add_(1)
    assert x.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert clone.tolist() == [[1, 4], [2, 5], [3, 6]]


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "capsule": lambda x: torch.from_dlpack(dlpack.to_dlpack(x)),
    "tensor": torch.from_dlpack,
    "method": lambda x: torch.from_dlpack(x.__dlpack__()),
    "device": lambda x: torch.from_dlpack(x, device=D),
    "asarray": lambda x: torch.asarray(dlpack.to_dlpack(x)),
    "asarray, not copied": lambda x: torch.asarray(dlpack.to_dlpack(x), copy=False, device=x.device, dtype=x.dtype),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_dlpack_shares_memory(way: Callable[[Tensor], Tensor]) -> None:
    x = torch.arange(12.0, device=D).reshape(3, 4)
    for view in (x, x[1:, 1:], x.t(), x[2, 3], x[:0]):
        found = way(view)
        assert (found.device, found.shape, found.tolist()) == (view.device, view.shape, view.tolist())
        assert (found + 1).tolist() == (view + 1).tolist()
    row = way(x[1])
    row.zero_()
    assert x[1].tolist() == [0, 0, 0, 0]
    x.add_(1)
    assert row.tolist() == [1, 1, 1, 1]
    del x
    assert row.tolist() == [1, 1, 1, 1]


def test_dlpack_copies_to_the_host() -> None:
    x = torch.arange(3.0, device=D)
    copy = torch.from_dlpack(x, device="cpu")
    copy.zero_()
    assert np.from_dlpack(x, device="cpu").tolist() == x.tolist() == [0, 1, 2]
    with pytest.raises(BufferError, match="by a copy alone"):
        x.__dlpack__(dl_device=(dlpack.DLDeviceType.kDLCPU, 0), copy=False)
    with pytest.raises((RuntimeError, BufferError), match="Unsupported device"):
        np.from_dlpack(x)
    assert torch.from_dlpack(np.ones(2)).tolist() == [1, 1]


LIKE_ANOTHER: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in ("empty_like", "ones_like", "zeros_like", "rand_like", "randn_like")},
    "full_like": lambda x, **options: torch.full_like(x, 3.0, **options),
    "randint_like": lambda x, **options: torch.randint_like(x, 3, **options),
    "new_empty": lambda x, **options: x.new_empty(4, **options),
    "new_zeros": lambda x, **options: x.new_zeros(4, **options),
    "new_ones": lambda x, **options: x.new_ones(4, **options),
    "new_full": lambda x, **options: x.new_full((4,), 3.0, **options),
    "new_tensor": lambda x, **options: x.new_tensor([1.0], **options),
}


@pytest.mark.parametrize("name", LIKE_ANOTHER)
def test_a_tensor_like_another_is_where_it_is_asked_for(name: str) -> None:
    make = LIKE_ANOTHER[name]
    there = torch.ones(2, 3, device=D).t()
    here = make(there, device="cpu", dtype=torch.float64)
    like = make(there.cpu(), dtype=torch.float64)
    assert (here.device.type, here.dtype, here.stride()) == ("cpu", like.dtype, like.stride())
    assert make(here, device=D).device == make(there).device == there.device
    assert make(there, device="meta").device.type == "meta"
    if name in ("ones_like", "zeros_like", "full_like"):
        compiled = torch.compile(lambda x: make(x, device="cpu") + 1, backend="dynaxla")(there)
        assert compiled.device.type == "cpu"
        assert torch.equal(compiled, make(there.cpu()) + 1)
