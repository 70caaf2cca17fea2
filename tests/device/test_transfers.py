"""Tensors come to the device and back as they were, and what happens to one copy is not seen in the other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.padded_buffers import BufferCopies
from dynaxla.device.registration import device_in_use
from dynaxla.diagnostics import FallbackReason, ReasonId
from dynaxla.runtime import xla
from dynaxla.runtime.pjrt_clients import HostTransferClient
from dynaxla.runtime.transfers import download, upload

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
MOVED = (torch.float8_e4m3fn, torch.float8_e5m2)
NOT_COMPUTED = (torch.complex32, torch.float8_e4m3fnuz, torch.uint16, torch.uint64)
"""No program takes these; they are kept as bytes."""


def _filled(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return (torch.randn(sizes) * 3).abs().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES + MOVED + NOT_COMPUTED, ids=str)
def test_values_of_every_dtype_return(dtype: torch.dtype) -> None:
    for x in (_filled(dtype, 3, 4), _filled(dtype), _filled(dtype, 0, 2), _filled(dtype, 2, 3, 4).transpose(0, 2)):
        there = x.to("dynaxla")
        assert (there.device.type, there.dtype, there.shape) == ("dynaxla", dtype, x.shape)
        assert there.stride() == x.stride()
        back = there.cpu()
        assert back.dtype is dtype
        torch.testing.assert_close(_bits(back), _bits(x))


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("device", ["cpu", "dynaxla"])
def test_torch_warns_of_complex_halves(device: str) -> None:
    torch.set_warn_always(True)
    try:
        with pytest.warns(UserWarning, match="ComplexHalf support is experimental"):
            torch.empty(3, dtype=torch.complex32, device=device)
    finally:
        torch.set_warn_always(False)


@pytest.mark.parametrize("dtype", NOT_COMPUTED, ids=str)
def test_a_tensor_without_elements_has_any_strides(dtype: torch.dtype) -> None:
    assert torch.empty_strided((0,), (2,), dtype=dtype).to("dynaxla").cpu().shape == (0,)


def test_copies_are_copies() -> None:
    x = torch.ones(1000)
    there = x.to("dynaxla")
    x.zero_()
    assert there.sum().item() == 1000
    back = there.cpu()
    back.zero_()
    assert there.sum().item() == 1000
    there.zero_()
    assert back.sum() == 0


def test_memory_of_numpy_is_copied_too() -> None:
    array = np.arange(100, dtype=np.float32)
    there = torch.from_numpy(array).to("dynaxla")
    array[:] = 0
    assert there.sum().item() == 4950


def test_dtypes_change_on_the_way() -> None:
    x = torch.randn(4, 5)
    assert torch.equal(x.to("dynaxla", torch.float64).cpu(), x.double())
    assert torch.equal(x.to("dynaxla").to("cpu", torch.int32), x.int())
    assert torch.equal(x.to("dynaxla").half().cpu(), x.half())
    target = torch.empty(4, 5, dtype=torch.float64)
    target.copy_(x.to("dynaxla"))
    assert torch.equal(target, x.double())


def test_copies_into_what_is_there() -> None:
    x, there = torch.randn(3, 4), torch.zeros(5, 4, device="dynaxla")
    there[1:4].copy_(x)
    there[0].copy_(torch.arange(4), non_blocking=True)
    there[4] = torch.tensor(7.0)
    expected = torch.cat([torch.arange(4.0)[None], x, torch.full((1, 4), 7.0)])
    assert torch.equal(there.cpu(), expected)
    there.copy_(there.new_ones(4))
    assert torch.equal(there.cpu(), torch.ones(5, 4))


def test_conjugates_and_negatives_are_what_they_stand_for() -> None:
    x = torch.randn(3, 4, dtype=torch.complex64)
    there = x.to("dynaxla")
    assert torch.equal(there.conj().cpu().resolve_conj(), x.conj().resolve_conj())
    assert torch.equal(x.conj().to("dynaxla").cpu().resolve_conj(), x.conj().resolve_conj())
    assert torch.equal(there.conj().imag.cpu(), x.conj().imag)
    assert torch.equal((there.conj() * 2).cpu(), (x.conj() * 2).resolve_conj())


def _writes(x: Tensor) -> list[Tensor]:
    """What is written through views of conjugates and negatives, one way at a time."""
    made = []

    def fresh() -> Tensor:
        made.append(x.clone())
        return made[-1]

    fresh().conj().mul_(1j)
    fresh().conj().copy_(torch.full_like(x, 2j))
    fresh().conj().imag.fill_(2)
    fresh().conj()[0] = 5 + 1j
    fresh().mH[0].add_(1j)
    torch.mul(x, 2, out=fresh().conj())
    fresh().conj()[torch.arange(x.shape[0], device=x.device) > 0] = 3j
    y = fresh()
    y[1:].conj().zero_()
    y.conj().neg_()
    made += _written_by_products(x, fresh)
    return made


def _written_by_products(x: Tensor, fresh: Callable[[], Tensor]) -> list[Tensor]:
    """Ops whose kernels torch hands conjugates and negatives as they are."""
    torch.mm(x, x, out=fresh().conj())
    torch.mm(x.conj(), x, out=fresh().mH)
    fresh().conj().addmm_(x, x.mH)
    torch.addmm(x, x, x, out=fresh().conj())
    fresh().conj()[None].baddbmm_(x[None], x[None])
    torch.bmm(x[None], x[None], out=fresh()[None].conj())
    torch.dot(x[0], x[1].conj(), out=fresh()[0, 0].conj())
    torch.vdot(x[0], x[1].conj(), out=fresh()[0, 0].conj())
    fresh().conj().conj_physical_()
    factor = x.triu() + 3 * torch.eye(3, device=x.device)
    torch.linalg.solve_triangular(factor, x, upper=True, out=fresh().mH)
    for given in (factor, factor.conj()):
        into = fresh()
        torch.linalg.solve_triangular(given, into, upper=True, out=into)
        into = fresh().conj()
        torch.linalg.solve_triangular(given, into, upper=True, out=into)
    negative = torch._neg_view(x.real.clone())
    torch.mm(x.real, x.imag, out=negative)
    larger = torch.zeros(0, dtype=x.dtype, device=x.device).conj()
    torch.mm(x, x, out=larger)
    returned = torch.mm(x, x, out=(out := fresh().conj()))
    assert returned is out
    return [negative, torch._neg_view(x.real.clone()).neg_(), larger.resolve_conj()]


def test_ops_on_the_host_read_conjugates_and_negatives() -> None:
    x = torch.randn(3, 3, dtype=torch.complex64)
    known = FunctionalForm.of(torch.ops.aten.mul.Tensor)
    reason = FallbackReason(ReasonId.UNSUPPORTED_CALL, known.name, detail="it is asked for")
    for bits in (torch.Tensor.conj, lambda each: torch._neg_view(each), lambda each: torch._neg_view(each.conj())):
        found = device_in_use().eager.run_on_host(known, (bits(x.to("dynaxla")), 2j), {}, reason)
        assert torch.equal(found.cpu(), bits(x) * 2j)


def test_writes_through_conjugates_and_negatives() -> None:
    x = torch.randn(3, 3, dtype=torch.complex64)
    for found, expected in zip(_writes(x.to("dynaxla")), _writes(x), strict=True):
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.float32])
def test_reads_that_need_not_wait(dtype: torch.dtype | None) -> None:
    """They do: torch would ask its C++ hooks for pinned memory."""
    x = torch.randn(3, 4)
    there = x.to("dynaxla")
    assert torch.equal(there.to("cpu", dtype, non_blocking=True), x.to(dtype or x.dtype))
    assert torch.equal(there.to(device="cpu", dtype=dtype, non_blocking=True, copy=True), x.to(dtype or x.dtype))
    assert torch.equal(torch.empty(3, 4).copy_(there, non_blocking=True), x)


def test_numbers_are_read() -> None:
    x = torch.tensor([[1.5, -2.0], [3.0, 4.0]], device="dynaxla")
    assert x[0, 1].item() == -2.0
    assert x.tolist() == [[1.5, -2.0], [3.0, 4.0]]
    assert bool(x[0, 0] > 1)
    assert int(x[1, 1]) == 4
    assert repr(x) == repr(x.cpu())[:-1] + ", device='dynaxla:0')"
    assert torch.tensor([1 + 2j], device="dynaxla").tolist() == [1 + 2j]


def test_numpy_wants_the_host() -> None:
    x = torch.ones(2, device="dynaxla")
    with pytest.raises(TypeError, match="can't convert dynaxla:0 device type tensor to numpy"):
        x.numpy()
    assert x.cpu().numpy().tolist() == [1, 1]


def test_factories() -> None:
    made = {
        "zeros": torch.zeros(2, 3, device="dynaxla"),
        "ones": torch.ones(2, 3, dtype=torch.int32, device="dynaxla:0"),
        "full": torch.full((2,), 0.5, device="dynaxla"),
        "arange": torch.arange(2, 9, 3, device="dynaxla"),
        "linspace": torch.linspace(0, 1, 5, device="dynaxla"),
        "eye": torch.eye(3, device="dynaxla"),
        "tensor": torch.tensor([1, 2], device="dynaxla"),
        "zeros_like": torch.zeros_like(torch.ones(2, device="dynaxla")),
        "new_full": torch.ones(2, device="dynaxla").new_full((2, 2), 3),
    }
    expected = {
        "zeros": torch.zeros(2, 3),
        "ones": torch.ones(2, 3, dtype=torch.int32),
        "full": torch.full((2,), 0.5),
        "arange": torch.arange(2, 9, 3),
        "linspace": torch.linspace(0, 1, 5),
        "eye": torch.eye(3),
        "tensor": torch.tensor([1, 2]),
        "zeros_like": torch.zeros(2),
        "new_full": torch.full((2, 2), 3.0),
    }
    for name, tensor in made.items():
        assert tensor.device.type == "dynaxla", name
        torch.testing.assert_close(tensor.cpu(), expected[name])


def test_there_is_one_device() -> None:
    with pytest.raises(RuntimeError, match="one device of a type"):
        torch.ones(2, device="dynaxla:1")


def test_a_default_device() -> None:
    with torch.device("dynaxla"):
        x = torch.ones(3, requires_grad=True)
        (x * torch.arange(3)).sum().backward()
    assert x.grad is not None
    assert x.grad.device.type == "dynaxla"
    assert x.grad.tolist() == [0, 1, 2]


@pytest.mark.parametrize("elements", [0, 3, 1 << 16])
def test_what_was_read_of_a_client_of_a_cpus_name_is_nobody_elses(elements: int) -> None:
    """jaxlib hands out the memory of any client that calls its platform "cpu"."""
    plugin = xla.load().xla_client.make_cpu_client(asynchronous=True)
    client = HostTransferClient(plugin, plugin.devices()[0], "cpu")
    x = torch.arange(float(elements))
    buffer = upload(client, x)
    assert buffer.device == client.device
    assert not client.shares_host_memory
    download(client, buffer).fill_(-1)
    assert torch.equal(download(client, buffer), x)
    if elements:  # a program's result lies where PJRT put it
        made = BufferCopies(client).copy(buffer)
        download(client, made).fill_(-1)
        assert torch.equal(download(client, made), x)
        assert torch.equal(download(client, BufferCopies(client).cut(buffer, [elements - 1])), x[:-1])


def test_plain_numbers_are_copied() -> None:
    """torch hands them to the kernel as they are."""
    for dtype in DTYPES:
        for number in (True, 3, 0.1, 2**40 if dtype.itemsize == 8 and not dtype.is_complex else 2):
            x, there = torch.zeros(2, dtype=dtype), torch.zeros(2, dtype=dtype, device="dynaxla")
            assert there.copy_(number).cpu().tolist() == x.copy_(number).tolist()
    there = torch.zeros(2, dtype=torch.complex64, device="dynaxla").copy_(1j)
    assert there.tolist() == [1j, 1j]
    assert torch.zeros(1, device="dynaxla").copy_(float("nan")).isnan().item()
