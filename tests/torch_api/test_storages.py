"""What the wall relies on of the memory of tensors."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from dynaxla.torch_api import storages
from tests.torch_api.boundary import boundary


@boundary("storages.is_zero_tensor")
def test_zeros_without_memory_are_told_apart() -> None:
    assert storages.is_zero_tensor(torch._efficientzerotensor((3,)))
    assert not storages.is_zero_tensor(torch.zeros(3))


@boundary("storages.data_address", "storages.storage_key")
def test_memory_has_an_address_and_a_name() -> None:
    x = torch.ones(4)
    assert storages.data_address(x) == x.data_ptr()
    assert storages.data_address(x[1:]) == x.data_ptr() + 4
    assert storages.storage_key(x.untyped_storage()) == storages.storage_key(x[1:].untyped_storage())
    assert storages.storage_key(x.untyped_storage()) != storages.storage_key(x.clone().untyped_storage())


@boundary("storages.mark", "storages.is_marked", "storages.data_address")
def test_a_mark_lasts_until_the_first_write_by_whatever_alias() -> None:
    x = torch.ones(64)
    alias, address = x.data[2:], storages.data_address(x)
    assert not storages.is_marked(x)
    for write in (lambda: alias.mul_(2), lambda: x.add_(1), lambda: alias.data.numpy().fill(7)):
        assert storages.mark(x)
        assert storages.is_marked(x)
        assert storages.is_marked(alias)
        float((x + 1).sum())
        assert storages.data_address(x) == address
        assert storages.is_marked(x), "a read leaves the mark"
        write()
        assert not storages.is_marked(x)
        assert storages.data_address(x) == address, "with one owner nothing moves"


@boundary("storages.mark")
def test_memory_that_torch_does_not_own_cannot_be_marked() -> None:
    assert not storages.mark(torch.from_numpy(np.ones(3)))


@boundary("storages.count_owners")
def test_owners_of_a_storage_are_tensors_exports_and_its_object() -> None:
    x = nn.Parameter(torch.ones(4))
    x.sum().backward()
    storage = x.untyped_storage()
    assert storages.count_owners(storage) == 2
    for export in (torch.Tensor.numpy, torch.from_dlpack, storages.to_capsule):
        made = export(x.detach())
        assert storages.count_owners(storage) == 3
        del made
        assert storages.count_owners(storage) == 2


@boundary("storages.has_equal_bytes")
def test_equal_bytes_are_more_than_equal_numbers() -> None:
    nan, zero = torch.full((2, 3), torch.nan), torch.zeros(2, 3)
    assert storages.has_equal_bytes(nan, nan.t().contiguous().t())
    assert not storages.has_equal_bytes(zero, -zero)
    assert not storages.has_equal_bytes(zero.to(torch.complex128), -zero.to(torch.complex128))
    i = torch.full((2, 3), 1j)
    assert storages.has_equal_bytes(i.conj(), i.conj().resolve_conj())
    assert storages.has_equal_bytes(i.conj().imag, -i.imag)


@boundary("storages.move_memory")
def test_moved_memory_keeps_version_and_what_graphs_saved() -> None:
    x = nn.Parameter(torch.from_numpy(np.arange(3.0)))
    y = x**2
    version, address = x._version, x.data_ptr()
    storages.move_memory(x)
    y.sum().backward()
    assert (x._version, x.untyped_storage().resizable()) == (version, True)
    assert x.data_ptr() != address
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 2.0, 4.0]


@boundary("storages.storage_key")
def test_a_storage_can_be_watched_until_it_goes() -> None:
    gone: list[int] = []
    x = torch.ones(4)
    weakref.finalize(x.untyped_storage(), gone.append, 1)
    alias = x[1:]
    del x
    gc.collect()
    assert not gone, "the storage's object lives as long as its memory"
    del alias
    gc.collect()
    assert gone == [1]


@boundary("storages.version_of")
def test_versions_count_writes() -> None:
    x = torch.ones(3)
    before = storages.version_of(x)
    x[1:].mul_(2)
    assert storages.version_of(x) == before + 1
    x.data.mul_(2)
    assert storages.version_of(x) == before + 1
    with torch.inference_mode():
        made = torch.ones(3)
    with pytest.raises(RuntimeError, match="version counter"):
        storages.version_of(made)


@boundary("storages.to_capsule", "storages.from_capsule")
def test_memory_crosses_by_dlpack() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    made = storages.from_capsule(storages.to_capsule(x))
    assert storages.data_address(made) == storages.data_address(x)
    assert made.tolist() == x.tolist()
    storages.mark(x)
    storages.to_capsule(x)
    assert not storages.is_marked(x), "an export may be written to"


@boundary("storages.copy_all")
def test_tensors_are_copied_to_others_of_any_strides() -> None:
    given = [torch.randn(3, 4).t(), torch.randn(5, dtype=torch.complex64).conj(), torch.arange(2)]
    made = [torch.zeros(4, 3), torch.zeros(5, dtype=torch.complex64), torch.zeros(2, dtype=torch.int64)]
    storages.copy_all(made, given)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(made, given, strict=True))


@boundary("storages.list_parts")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
def test_a_sparse_tensor_has_parts(layout: str) -> None:
    dense = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    block = (2, 2) if layout in ("bsr", "bsc") else None
    sparse = dense.to_sparse(layout=getattr(torch, f"sparse_{layout}"), blocksize=block)
    values, *indices = storages.list_parts(sparse)
    assert values[values != 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert all(part.dtype is torch.int64 and part.device == dense.device for part in indices)


@boundary("storages.list_parts")
def test_parts_of_a_tensor_that_is_not_coalesced() -> None:
    sparse = torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True)
    assert [part.tolist() for part in storages.list_parts(sparse)] == [[1.0, 2.0], [[0, 0]]]


@boundary("storages.borrow_memory", "storages.data_address")
def test_borrowed_memory_is_seen_and_not_freed() -> None:
    x = torch.arange(6, dtype=torch.int32)
    borrowed = storages.borrow_memory(x.data_ptr(), (3, 2), (2, 1), torch.int32)
    assert torch.equal(borrowed, x.view(3, 2))
    x += 1
    assert torch.equal(borrowed, x.view(3, 2))
    del borrowed
    gc.collect()
    assert x.tolist() == [1, 2, 3, 4, 5, 6]


class _Own(torch.Tensor):
    pass


@boundary("storages.is_plain")
def test_plain_tensors_lie_in_their_memory() -> None:
    x = torch.randn(2, 3, dtype=torch.complex64)
    with torch.inference_mode():
        inference = torch.ones(2)
    for plain in (x, x.t(), x.real, torch.ones(2), torch.ones(2, requires_grad=True), torch.nn.Parameter(x), inference):
        assert storages.is_plain(plain)
    assert not any(map(storages.is_plain, (x.conj(), x.conj().imag, torch.ones(2).to_sparse(), x.as_subclass(_Own), 2)))
    assert not any(map(storages.is_plain, (torch.ones(2, device="meta"), torch._efficientzerotensor((2,)))))
    seen: list[bool] = []
    torch.func.vmap(lambda y: seen.append(storages.is_plain(y)) or y)(torch.ones(2, 2))
    torch.func.grad(lambda y: seen.append(storages.is_plain(y)) or y.sum())(torch.ones(2))
    assert seen == [False, False]


@boundary("storages.make_check")
def test_a_check_knows_tensors_like_its_own() -> None:
    x, y = torch.randn(3, 4), torch.tensor(1)
    check = storages.make_check([x, y])
    assert check(torch.randn(3, 4), torch.tensor(2))
    assert check(x.view(12)[:12].view(3, 4), y)
    others = (
        torch.randn(4, 3).t(),
        torch.randn(4, 3),
        torch.randn(3, 4, 1),
        torch.randn(3, 8)[:, ::2],
        x.double(),
        x.int(),
        x.detach().requires_grad_(),
        torch.nn.Parameter(x, requires_grad=False),
        x.as_subclass(_Own),
        torch._neg_view(x),
        torch.empty(3, 4, device="meta"),
        x.to_sparse(),
        torch._efficientzerotensor((3, 4)),
        None,
        3,
    )
    for other in others:
        assert not check(other, y)
        assert not check(x, other)
    with torch.inference_mode():
        assert not check(torch.randn(3, 4), y)
    assert storages.make_check([])()
