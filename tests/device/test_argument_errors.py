"""What eager raises because of values or of shared memory, the device raises too: for all overloads, by their schemas."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dynaxla
from dynaxla.device.argument_checks import MOST_PLACES
from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.registration import device_in_use
from dynaxla.device.storage import storage_of
from dynaxla.ops.value_bounds import bounds_of
from dynaxla.torch_api.overloads import OpOverload, aten_ops, parameters
from tests.lists import quick

D = "dynaxla"
aten = torch.ops.aten
Call = Callable[[str], Any]

UNCHECKED = frozenset(
    """
    _cslt_sparse_mm_search _embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_sparse_backward
    _embedding_bag_per_sample_weights_backward _index_put_impl_ _unsafe_index _unsafe_index_put _unsafe_masked_index
    _unsafe_masked_index_put_accumulate embedding_backward embedding_bag embedding_dense_backward embedding_sparse_backward
    """.split()
)
"""Ops with indices that are made of checked ones, follow a checked forward, or promise that the indices are right."""


FOUND_LATE = "found by the device while it ran"


def run(call: Call, device: str) -> tuple[str, Any, list[str]]:
    """What a call gives, or the class and the first line of its error; and its warnings of a resized output."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = call(device)
            if device == D:
                torch.dynaxla.synchronize()  # a device with its own memory finds wrong values while it runs
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            _forget_others()
            return type(error).__name__, str(error).partition("\n")[0], []
        values = result.tolist() if isinstance(result, Tensor) else None
        return "gives", values, [str(w.message) for w in warned if "was resized" in str(w.message)]


def _forget_others() -> None:
    """Takes what else the device found wrong in a call: a read raises one error."""
    for _ in range(4):
        with suppress(IndexError, RuntimeError):
            torch.dynaxla.synchronize()


def assert_as_on_the_cpu(call: Call) -> str:
    expected, found = run(call, "cpu"), run(call, D)
    if found != expected:
        assert not device_in_use().client.shares_host_memory
        # The classes of eager's kernels differ for one and the same fault.
        assert expected[0] in ("IndexError", "RuntimeError")
        assert FOUND_LATE in found[1]
    return expected[0]


# Values


def indexing_overloads() -> Iterator[OpOverload]:
    """Overloads of one tensor with an index, in place, with `out=` and without."""
    for op in aten_ops().values():
        names = {parameter.name: str(parameter.type) for parameter in parameters(op)}
        if "self" in names and names.get("index") == "Tensor" and "Dimname" not in str(op._schema):
            yield op


def call_with_index(op: OpOverload, index: list[int]) -> Call:
    """Calls an op on six elements, as three rows where it takes rows."""
    name = op._schema.name.partition("::")[2].removesuffix("_")
    is_of_elements = name in ("take", "put") or name.startswith(("gather", "scatter"))

    def call(device: str) -> Any:
        at, x = torch.tensor(index, device=device), torch.arange(6.0, device=device).reshape(3, 2)
        value = torch.tensor(7.0, device=device) if "_Tensor" in op._overloadname else 7.0
        src = torch.full((2, 1 if is_of_elements else 2), 0.5, device=device)
        given = {
            "self": x,
            "dim": 0,
            "index": at[:, None] if is_of_elements else at,
            "value": value,
            "source": src,
            "src": src,
            "reduce": "add" if name == "scatter" else "amax",
            "out": torch.empty(0, device=device),
            "grad": x[:2, :1],
            "sparse_grad": False,
        }
        wanted = {p.name for p in parameters(op)}
        return op(**{name: value for name, value in given.items() if name in wanted})

    return call


INDEXING = {str(op).removeprefix("aten."): op for op in indexing_overloads() if bounds_of(str(op)) is not None}


@pytest.mark.parametrize("name", quick(INDEXING, "index_add_.default", "gather.out", "scatter.value", "take.default"))
def test_an_index_out_of_range(name: str) -> None:
    op = INDEXING[name]
    assert assert_as_on_the_cpu(call_with_index(op, [0, 6])) != "gives"
    for index in ([0, -7], [0, -1], [2, 1]):
        assert_as_on_the_cpu(call_with_index(op, index))


def test_every_op_with_an_index_is_checked() -> None:
    for op in aten_ops().values():
        names = {p.name for p in parameters(op) if "Tensor" in str(p.type) and "Dimname" not in str(op._schema)}
        packet = op._schema.name.partition("::")[2]
        if names & {"index", "indices"} and packet.startswith(
            ("index", "gather", "scatter", "take", "put", "emb", "_emb")
        ):
            is_made_of_others = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
            assert (bounds_of(str(op)) is not None) != (packet in UNCHECKED or is_made_of_others), op


def x(device: str, *sizes: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(sizes).numel(), device=device).reshape(sizes)


def at(device: str, *values: Any) -> Tensor:
    return torch.tensor(values, device=device)


VALUES: dict[str, Call] = {
    "index": lambda d: x(d, 3)[at(d, 0, 5)],
    "index of two dims": lambda d: x(d, 3, 4)[at(d, 0, 1), at(d, 3, 4)],
    "a list": lambda d: x(d, 3)[[0, 5]],
    "a negative list": lambda d: x(d, 3)[[0, -4]],
    "a host index": lambda d: x(d, 3)[torch.tensor([0, 5])],
    "a part of an index": lambda d: x(d, 3)[at(d, 9, 0, 9, 5)[1::2]],
    "setitem": lambda d: x(d, 3).__setitem__([0, 5], 0.0),
    "index_put": lambda d: torch.index_put(x(d, 3), (at(d, 0, 5),), x(d, 2), accumulate=True),
    "int32": lambda d: x(d, 3)[at(d, 0, 5).int()],
    "embedding": lambda d: F.embedding(at(d, 0, 3), x(d, 3, 2)),
    "a negative embedding": lambda d: F.embedding(at(d, 0, -1), x(d, 3, 2)),
    "renormed embedding": lambda d: F.embedding(at(d, 0, 3), x(d, 3, 2), max_norm=1.0),
    "embedding_bag": lambda d: F.embedding_bag(at(d, [0, 5]), x(d, 3, 2)),
    "bags that begin late": lambda d: F.embedding_bag(at(d, 0, 1), x(d, 3, 2), at(d, 1)),
    "bags that end late": lambda d: F.embedding_bag(at(d, 0, 1), x(d, 3, 2), at(d, 0, 3)),
    "bags before others": lambda d: F.embedding_bag(at(d, 0, 1, 2), x(d, 3, 2), at(d, 0, 2, 1), mode="sum"),
    "binary_cross_entropy": lambda d: F.binary_cross_entropy(x(d, 3), x(d, 3) / 3),
    "binary_cross_entropy, targets": lambda d: F.binary_cross_entropy(x(d, 3) / 3, x(d, 3)),
    "multilabel_margin_loss": lambda d: F.multilabel_margin_loss(x(d, 2), at(d, 0, 2)),
    "max_unpool": lambda d: F.max_unpool1d(x(d, 1, 1, 2), at(d, [[0, 4]]), 2),
    "histc": lambda d: torch.histc(x(d, 3) * torch.nan),
    "floor_divide": lambda d: at(d, 3, 4) // at(d, 1, 0),
    "a number divided": lambda d: 3 // at(d, 1, 0),
    "div_": lambda d: at(d, 3, 4).div_(at(d, 1, 0), rounding_mode="trunc"),
    "remainder": lambda d: at(d, 3, 4) % at(d, 1, 0),
    "fmod": lambda d: torch.fmod(at(d, 3, 4), at(d, 1, 0).int(), out=at(d, 0, 0)),
    "nll_loss": lambda d: F.nll_loss(x(d, 2, 3), at(d, 0, 3)),
    "nll_loss of images": lambda d: F.nll_loss(x(d, 2, 3, 1, 1), at(d, [[0]], [[3]])),
    "cross_entropy": lambda d: F.cross_entropy(x(d, 2, 3), at(d, 0, -1)),
    "put with few values": lambda d: x(d, 3).put_(at(d, 0, 1), x(d, 1)),
    "masked_scatter": lambda d: torch.masked_scatter(x(d, 3), torch.ones(3, dtype=torch.bool, device=d), x(d, 2)),
    "masked_scatter_": lambda d: x(d, 2, 3).masked_scatter_(at(d, True, True, False), x(d, 3)),
    "multinomial": lambda d: torch.multinomial(-x(d, 3), 1),
    "multinomial of zeros": lambda d: torch.multinomial(x(d, 3) * 0, 1),
    "bernoulli": lambda d: torch.bernoulli(x(d, 3)),
    "a complex number into bools": lambda d: at(d, True, True).index_fill(0, at(d, 0), 1 + 1j),
    "normal": lambda d: torch.normal(0.0, -x(d, 3)),
    "lengths of segments": lambda d: torch.segment_reduce(x(d, 6), "sum", lengths=at(d, 0, 2, 3)),
    "lengths of rows": lambda d: torch.segment_reduce(x(d, 2, 6), "sum", lengths=at(d, [3, 3], [2, 3]), axis=1),
}
RIGHT: dict[str, Call] = {
    "embedding_bag": lambda d: F.embedding_bag(at(d, 0, 1), x(d, 3, 2), at(d, 0, 2)),
    "one bag": lambda d: F.embedding_bag(at(d, 0, 1), x(d, 3, 2), at(d, 0)),
    "binary_cross_entropy": lambda d: F.binary_cross_entropy(x(d, 3) / 3, 1 / x(d, 3)),
    "histc": lambda d: torch.histc(x(d, 3), 3, 1, 3),
    "floor_divide": lambda d: at(d, 3, 4) // at(d, 1, -2),
    "division of floats": lambda d: x(d, 2) // at(d, 1, 0),
    "true division": lambda d: at(d, 3, 4) / at(d, 1, 0),
    "nll_loss": lambda d: F.nll_loss(x(d, 2, 3), at(d, 0, -100)),
    "masked_scatter": lambda d: torch.masked_scatter(x(d, 3), at(d, True, False, True), x(d, 2)),
    "a mask": lambda d: x(d, 3)[at(d, True, False, True)],
    "no index": lambda d: x(d, 3)[at(d).long()],
    "lengths of segments": lambda d: torch.segment_reduce(x(d, 6), "sum", lengths=at(d, 1, 2, 3)),
    "lengths that are not looked at": lambda d: torch.segment_reduce(
        x(d, 6), "sum", lengths=at(d, 1, 2, 3), unsafe=True
    ),
    "an index of every element": lambda d: x(d, 3)[[-3, 2]],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_out_of_range(name: str) -> None:
    assert assert_as_on_the_cpu(VALUES[name]) != "gives"


@pytest.mark.parametrize("name", RIGHT)
def test_values_within_the_range_stay_on_the_device(name: str) -> None:
    before = dict(dynaxla.read_metrics().host_ops)
    assert assert_as_on_the_cpu(RIGHT[name]) == "gives"
    assert name == "a mask" or dict(dynaxla.read_metrics().host_ops) == before


HERE, MASK_HERE = torch.tensor([0, 2]), torch.tensor([True, False, True])
INDEXED_BY_THE_HOST: dict[str, Call] = {
    "index": lambda d: x(d, 3)[HERE],
    "mask": lambda d: x(d, 3)[MASK_HERE],
    "rows and columns": lambda d: x(d, 3, 3)[HERE, at(d, 1, 1)],
    "mask of rows": lambda d: x(d, 3, 2)[MASK_HERE, 1],
    "setitem": lambda d: _assign(x(d, 3), HERE, 7.0),
    "setitem by a mask": lambda d: _assign(x(d, 3), MASK_HERE, 7.0),
    "setitem of a tensor": lambda d: _assign(x(d, 3), HERE, x(d, 2)),
    "index_put": lambda d: torch.index_put(x(d, 3), (HERE,), x(d, 2), accumulate=True),
    "index_select": lambda d: x(d, 3).index_select(0, HERE),
    "index_fill": lambda d: x(d, 3).index_fill(0, HERE, 1.0),
    "index_fill_": lambda d: x(d, 3).index_fill_(0, index=HERE, value=torch.tensor(7.0)),
    "index_add": lambda d: x(d, 3).index_add(0, HERE, x(d, 2), alpha=2),
    "index_copy": lambda d: x(d, 3).index_copy(0, HERE, x(d, 2)),
    "index_reduce": lambda d: x(d, 3).index_reduce(0, HERE, x(d, 2), "amax"),
    "gather": lambda d: x(d, 3).gather(0, HERE),
    "scatter": lambda d: x(d, 3).scatter(0, HERE, 1.0),
    "scatter_add": lambda d: x(d, 3).scatter_add(0, HERE, x(d, 2)),
    "scatter_reduce": lambda d: x(d, 3).scatter_reduce(0, HERE, x(d, 2), "prod"),
    "take": lambda d: x(d, 3).take(HERE),
    "put_": lambda d: x(d, 3).put_(HERE, x(d, 2)),
    "gradient of index_fill": lambda d: _gradient(lambda x: x.index_fill(0, HERE, 1.0), x(d, 3)),
    "gradient of index_select": lambda d: _gradient(lambda x: x.index_select(0, HERE), x(d, 3)),
    "gradient of gather": lambda d: _gradient(lambda x: x.gather(0, HERE), x(d, 3)),
}
NEVER_BY_THE_HOST: dict[str, Call] = {
    "index_add of the host": lambda d: x(d, 3).index_add(0, at(d, 0, 2), x("cpu", 2)),
    "scatter of the host": lambda d: x(d, 3).scatter(0, at(d, 0, 2), x("cpu", 2)),
    "gather from the host": lambda d: x("cpu", 3).gather(0, at(d, 0, 2)),
    "index_fill on the host": lambda d: x("cpu", 3).index_fill(0, at(d, 0, 2), 1.0),
    "embedding": lambda d: F.embedding(HERE, x(d, 3, 2)),
    "masked_fill": lambda d: x(d, 3).masked_fill(MASK_HERE, 1.0),
    "masked_select": lambda d: x(d, 3).masked_select(MASK_HERE),
    "where": lambda d: torch.where(MASK_HERE, x(d, 3), x(d, 3)),
}
INDEXED_ON_THE_HOST: dict[str, Call] = {
    "index": lambda d: x("cpu", 3)[at(d, 0, 2)],
    "mask": lambda d: x("cpu", 3)[at(d, True, False, True)],
    "rows and columns": lambda d: x("cpu", 3, 3)[HERE, at(d, 1, 1)],
    "setitem": lambda d: _assign(x("cpu", 3), at(d, 0, 2), 7.0),
    "index_put": lambda d: torch.index_put(x("cpu", 3), (at(d, 0, 2),), x("cpu", 2)),
}


def _gradient(of: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    of(x.requires_grad_()).square().sum().backward()
    assert x.grad is not None
    return x.grad


def _assign(x: Tensor, index: Tensor, value: Any) -> Tensor:
    x[index] = value
    return x


@pytest.mark.parametrize("name", INDEXED_BY_THE_HOST)
def test_indices_of_the_host(name: str) -> None:
    assert assert_as_on_the_cpu(INDEXED_BY_THE_HOST[name]) == "gives"


@pytest.mark.parametrize("name", NEVER_BY_THE_HOST)
def test_ops_that_take_tensors_of_the_device_alone(name: str) -> None:
    assert run(NEVER_BY_THE_HOST[name], "cpu")[0] == "gives"
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        NEVER_BY_THE_HOST[name](D)


@pytest.mark.parametrize("name", INDEXED_ON_THE_HOST)
def test_a_tensor_of_the_host_takes_no_index_of_the_device(name: str) -> None:
    assert run(INDEXED_ON_THE_HOST[name], "cpu")[0] == "gives"
    with pytest.raises(RuntimeError, match=r"indices should be either on cpu or .* \(cpu\)"):
        INDEXED_ON_THE_HOST[name](D)


@pytest.mark.parametrize("name", ["index", "embedding", "nll_loss", "masked_scatter", "multinomial of zeros"])
def test_a_device_with_its_own_memory_raises_at_the_next_read(name: str) -> None:
    checks = device_in_use().eager.checks
    expected = run(VALUES[name], "cpu")[0]
    with mock.patch.object(type(checks), "_available", return_value=None):
        VALUES[name](D)
        with pytest.raises((IndexError, RuntimeError), match=r"aten\..* are allowed") as raised:
            torch.ones(1, device=D).tolist()
        assert type(raised.value).__name__ == expected
        assert torch.ones(1, device=D).tolist() == [1.0]  # it is raised once
        for right in RIGHT.values():
            run(right, D)
        torch.dynaxla.synchronize()


def test_indices_are_looked_at_once_until_they_are_written() -> None:
    """On a device with its own memory, whose ranges are computed by `aminmax`."""
    checks, looked = device_in_use().eager.checks, mock.Mock(wraps=torch.aminmax)
    with mock.patch.object(type(checks), "_available", return_value=None), mock.patch("torch.aminmax", looked):
        rows, places = x(D, 6), at(D, 0, 1, 2, 5)
        first, second = places[:2], places[2:]
        for _ in range(3):
            assert (rows[first] + rows[second]).shape == (2,)
        torch.dynaxla.synchronize()
        assert looked.call_count == 2  # each window
        with pytest.raises(IndexError, match="index 5 is out of bounds"):
            rows[:3][second]  # its range is known by now: eager's own error, at once
        assert rows.gather(0, first).tolist() == rows.cpu()[:2].tolist()
        places.add_(1)
        with pytest.raises(IndexError, match="number is 6; -6 to 5 are allowed"):
            rows[second].tolist()
        assert looked.call_count == 3
        places.clamp_(max=5)
        assert rows[second].tolist() == rows.cpu()[[3, 5]].tolist()


def test_few_places_of_a_memory_are_remembered() -> None:
    order, rows = torch.arange(40, device=D), x(D, 40)
    with mock.patch.object(type(device_in_use().eager.checks), "_available", return_value=None):
        for start in range(40):  # each window of a permutation is another place
            assert rows[order[start : start + 1]].tolist() == [1.0 + start]
        assert 0 < len(storage_of(order).ranges or {}) <= MOST_PLACES
        with pytest.raises(IndexError, match="index 39 is out of bounds"):
            rows[:3][order[39:]]


def test_collected_ops_raise_when_they_have_run() -> None:
    with dynaxla.device_mode("fused"):
        picked = x(D, 3)[at(D, 1, 2) * 2]
        with pytest.raises(IndexError, match="2 are allowed"):
            picked.tolist()


REFUSED: dict[str, Call] = {
    "median of rows without elements": lambda d: torch.empty(2, 0, 4, device=d).median(1),
    "nanmedian of rows without elements": lambda d: torch.empty(2, 0, 4, device=d).nanmedian(dim=1, keepdim=True),
    "polar of two dtypes": lambda d: torch.polar(torch.ones(2, device=d), torch.ones(2, device=d, dtype=torch.float64)),
    "as_strided with too few strides": lambda d: torch.ones((), device=d).as_strided((1,), ()),
    "as_strided with too many strides": lambda d: torch.ones(4, device=d).as_strided((1,), (1, 1)),
    "empty_strided with too few strides": lambda d: torch.ones(4, device=d).new_empty_strided((2, 3), (1,)),
    "empty_strided with too many strides": lambda d: torch.empty_strided((2, 3), (1, 2, 3), device=d),
    "histc between the wrong ends": lambda d: torch.ones(3, dtype=torch.int8, device=d).histc(4, 5, 1),
    "uniform over too wide a range": lambda d: torch.empty(3, device=d).uniform_(-3e38, 3e38),
    "argmax over 65 dims": lambda d: torch.zeros([1] * 65, device=d).argmax(0),
    "max over 65 dims": lambda d: torch.zeros([1] * 65, device=d).max(0),
    "scaled products of bools": lambda d: torch._foreach_addcmul(*[[torch.ones(3, device=d) > 0]] * 3, value=2),
    "nansum over 65 dims": lambda d: torch.zeros([1] * 65, device=d).nansum(0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_eager_refuses(name: str) -> None:
    expected = run(REFUSED[name], "cpu")
    assert expected[0] in ("RuntimeError", "IndexError", "NotImplementedError")
    assert run(REFUSED[name], D) == expected


def test_put_is_not_deterministic() -> None:
    index = torch.tensor([1, 1])
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
            x(D, 4).put_(index.to(D), x(D, 2))
        added = x(D, 4).put_(index.to(D), x(D, 2), accumulate=True)
        assert added.tolist() == x("cpu", 4).put_(index, x("cpu", 2), accumulate=True).tolist()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["median of rows without elements", "polar of two dtypes"])
def test_compiled_calls_that_eager_refuses(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError), match=r"non-zero size|same dtype|scalar type"):
        torch.compile(REFUSED[name], backend="dynaxla")("cpu")


# Memory


def inplace_overloads() -> dict[str, OpOverload]:
    """Ops that write to `self` and read other tensors of any sizes."""
    found = {}
    for name, op in aten_ops().items():
        schema = parameters(op)
        others = [p for p in schema[1:] if str(p.type) == "Tensor"]
        plain = all(str(p.type) in ("Tensor", "number") or p.has_default_value() for p in schema)
        if schema and others and plain and FunctionalForm.of(op).written == ("self",) and schema[0].name == "self":
            found[name] = op
    return found


INPLACE = inplace_overloads()


def call_in_place(op: OpOverload, view: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Call:
    def call(device: str) -> Any:
        written, read = view(torch.arange(16.0, device=device))
        rest = [read if str(p.type) == "Tensor" else 1 for p in parameters(op)[1:] if not p.has_default_value()]
        op(written, *rest)
        return written

    return call


@pytest.mark.parametrize(
    "name", quick(INPLACE, "add_.Tensor", "masked_fill_.Tensor", "copy_", "addcmul_", "atan2_", "addmm_")
)
def test_writes_that_overlap(name: str) -> None:
    for view in (
        lambda x: (x[1:5].view(2, 2), x[:4].view(2, 2)),
        lambda x: (x[1:4], x[:3]),
        lambda x: (x[:1].expand(4), x[4:8]),
        lambda x: (x[:2].view(2, 1).expand(2, 2), x[4:8].view(2, 2)),
    ):
        assert_as_on_the_cpu(call_in_place(INPLACE[name], view))


OVERLAPS: dict[str, Call] = {
    "fill_": lambda d: x(d, 1).expand(4).add_(1.0),
    "masked_fill_": lambda d: (lambda mask: mask[1:].masked_fill_(mask[:-1], False))(x(d, 4) > 2),
    "index_put_": lambda d: (lambda x: x.index_put_((x.clone(),), x[:1]))(at(d, 1, 0, 2)),
    "index_put_ by itself": lambda d: (lambda x: x.index_put_((x,), at(d, 9)))(at(d, 1, 0, 2)),
    "add out": lambda d: (lambda x: torch.add(x[:-1], 1, out=x[1:]))(x(d, 5)),
    "cat out": lambda d: (lambda x: torch.cat([x[:2], x[2:]], out=x))(x(d, 4)),
    "gather out": lambda d: (lambda x: torch.gather(x, 0, at(d, 0, 1, 2), out=x))(x(d, 3)),
    "index_select, resized": lambda d: torch.index_select(x(d, 3), 0, at(d, 0, 1), out=x(d, 1).expand(3)),
    "index_add_ of itself": lambda d: (lambda x: x.index_add_(0, at(d, 0, 1), x))(x(d, 2)),
}
SHARED: dict[str, Call] = {
    "equal places": lambda d: (lambda x: x.mul_(x[:]))(x(d, 3)),
    "add_ of itself": lambda d: (lambda x: x.add_(x))(x(d, 3)),
    "other half": lambda d: (lambda x: x[:2].mul_(x[2:]))(x(d, 4)),
    "columns": lambda d: (lambda x: x[:, 0].add_(x[:, 1]))(x(d, 2, 2)),
    "clamp out": lambda d: (lambda x: torch.clamp(x, 2, out=x))(x(d, 3)),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlaps(name: str) -> None:
    assert assert_as_on_the_cpu(OVERLAPS[name]) != "gives"


@pytest.mark.parametrize("name", SHARED)
def test_memory_that_may_be_shared(name: str) -> None:
    before = dict(dynaxla.read_metrics().host_ops)
    assert assert_as_on_the_cpu(SHARED[name]) == "gives"
    assert dict(dynaxla.read_metrics().host_ops) == before


# Outputs


def out_overloads() -> dict[str, OpOverload]:
    """Ops of tensors with one tensor to write to."""
    found = {}
    for name, op in aten_ops().items():
        schema = parameters(op)
        tensors = [p for p in schema if str(p.type) == "Tensor" and not p.is_out]
        plain = all(str(p.type) in ("Tensor", "number", "int") or p.has_default_value() for p in schema)
        if (
            sum(p.is_out for p in schema) == 1
            and tensors
            and plain
            and torch.Tag.nondeterministic_seeded not in op.tags
        ):
            found[name] = op
    return found


OUTS = {name: op for name, op in out_overloads().items() if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CPU)}


@pytest.mark.parametrize(
    "name", quick(OUTS, "add.out", "mm.out", "gather.out", "cumsum.out", "index_select.out", "cos.out")
)
def test_outputs_of_other_dtypes_and_sizes(name: str) -> None:
    op = OUTS[name]
    for dtype, sizes in ((torch.int64, (2, 2)), (torch.float64, (2, 2)), (torch.float32, (3,)), (torch.float32, (0,))):

        def call(device: str, dtype: torch.dtype = dtype, sizes: tuple[int, ...] = sizes) -> Any:
            args, out = [], next(p.name for p in parameters(op) if p.is_out)
            for p in parameters(op):
                if p.is_out or p.has_default_value():
                    continue
                is_index = p.name in ("index", "indices")
                tensor = torch.ones(2, 2, device=device, dtype=torch.int64 if is_index else None)
                args.append(tensor if str(p.type) == "Tensor" else 1)
            return op(*args, **{out: torch.zeros(sizes, dtype=dtype, device=device)})

        expected, found = run(call, "cpu"), run(call, D)
        assert (found[0], found[2]) == (expected[0], expected[2])
        assert expected[0] == "gives" or found == expected
