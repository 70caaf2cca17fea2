"""Sparse tensors of the device: their parts are dense tensors of the device, and the host computes what they take part in."""

from __future__ import annotations

import copy
import gc
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

import dynaxla
from dynaxla.device.registration import device_in_use
from dynaxla.observe.usage import CrossedBytes
from tests.tolerances import assert_close

D = "dynaxla"
DENSE = torch.tensor([[0.0, 1, 0, 0], [2, 0, 3, 0], [0, 0, 0, 4], [5, 0, 0, 6]])
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((2, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 2)),
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def on_device(value: Any) -> Any:
    return tree_map(lambda x: x.to(D) if isinstance(x, Tensor) else D if x == torch.device("cpu") else x, value)


def assert_same(actual: Any, expected: Any) -> None:
    """Compares what two calls gave: layouts, devices, dtypes, sizes and parts."""
    mine, form = tree_flatten(actual)
    theirs, other = tree_flatten(expected)
    assert form == other
    for a, b in zip(mine, theirs, strict=True):
        if not isinstance(b, Tensor):
            assert a == b
            continue
        assert (a.device.type, a.layout, a.dtype, a.shape) == (D, b.layout, b.dtype, b.shape)
        a = a.detach().cpu()
        if b.layout is torch.sparse_coo:
            assert (a.is_coalesced(), a.sparse_dim()) == (b.is_coalesced(), b.sparse_dim())
            a, b = a.coalesce(), b.coalesce()
        assert_close(a.to_dense() if a.layout is not torch.strided else a, b.detach().to_dense())


@pytest.mark.parametrize("form", FORMS)
def test_a_sparse_tensor_is_made_moved_and_made_dense(form: str) -> None:
    make = FORMS[form]
    mine, eagers = make(DENSE.to(D)), make(DENSE)
    for made in (mine, eagers.to(D), mine.clone(), copy.deepcopy(mine), mine.to(D, torch.float64).float()):
        assert_same(made, eagers)
        assert torch.equal(made.to_dense().cpu(), DENSE)
    assert_same((mine * 2).to_dense(), DENSE * 2)
    assert f"layout=torch.sparse_{form}" in repr(mine)
    file = io.BytesIO()
    torch.save(mine, file)
    file.seek(0)
    assert_same(torch.load(file), eagers)


def test_the_parts_are_of_the_device() -> None:
    places, values = torch.tensor([[0, 1, 1], [2, 0, 2]], device=D), torch.tensor([3.0, 4, 5], device=D)
    made = torch.sparse_coo_tensor(places, values, (2, 3))
    assert (made._indices().device.type, made._values().device.type) == (D, D)
    assert (made._nnz(), made.sparse_dim(), made.dense_dim(), made.is_coalesced()) == (3, 2, 0, False)
    values.mul_(2)  # the parts are those tensors
    assert made.to_dense().tolist() == [[0, 0, 6], [8, 0, 10]]
    rows = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([1.0, 2]), device=D)
    assert rows.crow_indices().tolist() == [0, 1, 2]
    assert rows.col_indices().device.type == D


def test_writes_reach_sparse_and_dense_tensors() -> None:
    for device in ("cpu", D):
        sparse, dense = DENSE.to(device).to_sparse(), torch.ones(4, 4, device=device)
        held = sparse
        sparse.mul_(3)
        dense.add_(sparse)
        assert torch.equal(held.to_dense().cpu(), DENSE * 3)
        assert torch.equal(dense.cpu(), DENSE * 3 + 1)
        held.zero_()
        assert held.to_dense().sum().item() == 0
        rows = DENSE.to(device).to_sparse_csr()
        rows.mul_(2)
        assert torch.equal(rows.to_dense().cpu(), DENSE * 2)
        rows.add_(torch.ones(4, 4, device=device).to_sparse_csr())  # which has elements where `rows` has none
        assert torch.equal(rows.to_dense().cpu(), DENSE * 2 + 1)
        held.sparse_resize_((5, 5), 2, 0)
        assert held.shape == (5, 5)


def test_gradients_pass_through_sparse_tensors() -> None:
    found = []
    for device in ("cpu", D):
        x, w = DENSE.clone().to(device).requires_grad_(), torch.arange(8.0, device=device).view(4, 2).requires_grad_()
        (torch.sparse.mm(x.to_sparse(), w) ** 2).sum().backward()
        found.append((x.grad.to_dense().cpu(), w.grad.cpu()))
    for mine, eagers in zip(*found, strict=True):
        assert torch.equal(mine, eagers)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_gradients_of_reduced_products(reduce: str) -> None:
    found = []
    for device in ("cpu", D):
        rows = DENSE.clone().to(device).to_sparse_csr().requires_grad_()
        x = torch.arange(12.0, device=device).view(4, 3).requires_grad_()
        (torch.sparse.mm(rows, x, reduce) ** 2).sum().backward()
        found.append((rows.grad.to_dense().cpu(), x.grad.cpu()))
    for mine, eagers in zip(*found, strict=True):
        assert torch.equal(mine, eagers)


@pytest.mark.parametrize("optimizer", [torch.optim.SparseAdam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_of_embeddings(optimizer: type[torch.optim.Optimizer], bag: bool) -> None:
    torch.manual_seed(0)
    net = torch.nn.EmbeddingBag(12, 4, sparse=True, mode="sum") if bag else torch.nn.Embedding(12, 4, sparse=True)
    words = torch.tensor([[1, 2, 2], [7, 11, 1]])
    trained = []
    for device in ("cpu", D):
        own = copy.deepcopy(net).to(device)
        step = optimizer(own.parameters(), lr=0.1)
        for _ in range(3):
            step.zero_grad()
            own(words.to(device)).square().sum().backward()
            assert own.weight.grad.layout is torch.sparse_coo
            step.step()
        trained.append(own.weight.detach().cpu())
    assert_close(trained[1], trained[0])


def test_a_compiled_function_breaks_around_sparse_tensors() -> None:
    f = torch.compile(lambda x: (x.to_sparse() * 2).to_dense() + x.sum(), backend="dynaxla")
    assert torch.equal(f(DENSE.to(D)).cpu(), DENSE * 2 + DENSE.sum())


def test_tensors_of_the_host_do_not_mix_with_sparse_ones() -> None:
    for call in (
        lambda: torch.sparse.mm(DENSE.to_sparse(), torch.ones(4, 2, device=D)),
        lambda: torch.sparse.mm(DENSE.to(D).to_sparse(), torch.ones(4, 2)),
        lambda: DENSE.to(D).sparse_mask(DENSE.to_sparse()),
        lambda: torch.sparse_coo_tensor(torch.zeros(1, 2, dtype=torch.int64), torch.ones(2, device=D), (2,)),
    ):
        with pytest.raises(RuntimeError, match=r"same device|backend of"):
            call()


def test_ops_of_sparse_tensors_are_counted_as_the_hosts() -> None:
    made, name = DENSE.to(D).to_sparse(), "aten.mul_.Tensor"
    before = dynaxla.read_metrics()
    made.mul_(2)
    after = dynaxla.read_metrics()
    assert after.host_ops[name] == before.host_ops.get(name, 0) + 1
    bytes_before = before.host_bytes.get(name, CrossedBytes())
    bytes_each = 6 * (2 * 8 + 4)  # six elements, their rows and columns
    crossed = after.host_bytes[name]
    assert crossed.to_host - bytes_before.to_host == crossed.to_device - bytes_before.to_device == bytes_each


def test_sparse_tensors_keep_nothing() -> None:
    x = DENSE.to(D)

    def use() -> None:
        made = x.to_sparse() * 2
        made.mul_(2)
        (made.to_dense() + x.to_sparse_csr().to_dense()).cpu()

    use()
    gc.collect()
    before = len(device_in_use().memories)
    for _ in range(20):
        use()
    gc.collect()
    assert len(device_in_use().memories) == before


WITHOUT_DISPATCH = """
import torch, dynaxla
from torch.utils._mode_utils import no_dispatch

x = torch.arange(6.0, device=dynaxla.use("cpu")).view(2, 3)
for mode in ("eager", "fused"):
    with dynaxla.device_mode(mode), no_dispatch():
        print((x * 3 + (x.T @ x).sum()).tolist())
"""


def test_ops_run_where_torch_dispatches_nothing() -> None:
    """torch's own fallback of fake tensors calls ops so, as of `to_sparse`; tracing one ended the process."""
    child = subprocess.run([sys.executable, "-c", WITHOUT_DISPATCH], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout == "[[153.0, 156.0, 159.0], [162.0, 165.0, 168.0]]\n" * 2


LAYOUTS = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _ops() -> Iterator[Any]:
    for info in op_db:
        if torch.float32 in info.dtypes and any(map(info.supports_sparse_layout, LAYOUTS)):
            yield pytest.param(info, id=info.formatted_name)


def _calls(info: Any, layout: torch.layout) -> Iterator[tuple[Any, ...]]:
    """Calls with samples of torch's database, of which few ops have sparse ones: else the first input is made sparse."""
    try:
        samples = list(islice(info.sample_inputs_sparse(layout, "cpu", torch.float32), 12))
    except NotImplementedError:
        samples = list(islice(info.sample_inputs("cpu", torch.float32), 12))
    blocks = {"blocksize": (1, 1)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    for sample in samples:
        first = sample.input
        if isinstance(first, Tensor) and first.layout is torch.strided and first.dim() == 2:
            first = first.to_sparse(layout=layout, **blocks)
        yield first, sample.args, sample.kwargs


@pytest.mark.parametrize("info", _ops())
def test_as_the_cpu(info: Any) -> None:
    compared = 0
    for layout in filter(info.supports_sparse_layout, LAYOUTS):
        for call in _calls(info, layout):
            try:
                expected = info.op(call[0], *call[1], **call[2])
            except (RuntimeError, NotImplementedError, ValueError, IndexError):
                continue
            mine = on_device(call)
            assert_same(info.op(mine[0], *mine[1], **mine[2]), expected)
            compared += 1
    if not compared:
        pytest.skip("the CPU computes none of the samples")
