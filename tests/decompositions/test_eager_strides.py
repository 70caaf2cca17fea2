"""Results have eager's strides where torch's fake kernels predict others."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynaxla.decompositions.eager_strides import eager_strides
from dynaxla.torch_api.fakes import make_uncached_mode
from dynaxla.torch_api.overloads import OpOverload
from tests.ops.test_predicted_dtypes import fill, ops_of

aten = torch.ops.aten
SIZES = (4, 3, 2)
Made = Callable[[Tensor, Tensor], Tensor]


def permuted(sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Numbers from 1 to 2 whose dims lie in memory in this order."""
    inverse = [order.index(dim) for dim in range(len(sizes))]
    return torch.rand([sizes[dim] for dim in order]).add(1).permute(inverse)


def operands(draw: random.Random, count: int, row_major: bool) -> Iterator[Tensor]:
    """The first one with all sizes, the others broadcast along some dims."""
    for place in range(count):
        sizes = [1 if place and draw.random() < 0.2 else size for size in SIZES]
        if place and draw.random() < 0.25:
            sizes = sizes[draw.randint(1, 2) :]
        order = list(range(len(sizes))) if row_major else draw.sample(range(len(sizes)), len(sizes))
        yield permuted(sizes, order).to(draw.choice([torch.float32] * 4 + [torch.int64]))


def first(results: Any) -> Tensor:
    return results[0] if isinstance(results, (list, tuple)) else results  # type: ignore[no-any-return]


def mispredicted(op: OpOverload, tensors: Sequence[Tensor]) -> Iterator[str]:
    args, named = fill(op, tensors)
    try:
        expected = op(*args, **named)
    except (RuntimeError, NotImplementedError):
        return  # eager refuses it
    with make_uncached_mode() as mode:
        fakes, named = fill(op, [mode.from_tensor(each) for each in tensors])
        predicted = op(*fakes, **named)
        strides = first(predicted).stride()
        if not all(each.is_contiguous() for each in tensors):  # else nothing corrects the prediction
            strides = eager_strides(op, predicted, fakes) or strides
    if strides != first(expected).stride():
        yield f"{op} of {[(tuple(t.shape), t.stride()) for t in tensors]}: {strides}, eager gives {first(expected).stride()}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("row_major", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_pointwise_ops_are_predicted(count: int, row_major: bool, full: bool) -> None:
    draw, wrong = random.Random(0), list[str]()
    for op in ops_of(count):
        for _ in range(40 if full else 6):
            wrong += mispredicted(op, list(operands(draw, count, row_major)))
    assert not wrong


CALLS: dict[str, Made] = {
    "angle": lambda x, y: torch.complex(x, x).angle(),
    "angle of a view": lambda x, y: torch.view_as_complex(torch.stack([x, x.exp()], -1)).transpose(0, 2).angle(),
    "log of a sigmoid": lambda x, y: F.logsigmoid(x),
    "copysign": torch.copysign,
    "floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "floor of a number's quotient": lambda x, y: torch.div(x, 0.3, rounding_mode="floor"),
    "floor_divide": torch.floor_divide,
    "floor_divide by a number": lambda x, y: x // 0.3,
    "floor_divide by a tensor of one number": lambda x, y: x // y[0, 0, 0],
    "heaviside": torch.heaviside,
    "ldexp": torch.ldexp,
    "logaddexp": torch.logaddexp,
    "power of a number": lambda x, y: 2**x + 0 * y[0, 0, 0],
    "xlogy": torch.xlogy,
    "batch norm": lambda x, y: F.batch_norm(x, None, None, y[0, :, 0], training=True),
    "batch norm with statistics": lambda x, y: F.batch_norm(x, y[0, :, 0], y[1, :, 0]),
    "batch norm that updates statistics": lambda x, y: aten._batch_norm_with_update(
        x, None, None, y[0, :, 0].clone(), y[1, :, 0].clone(), 0.1, 1e-5
    )[0],
    "convolution": lambda x, y: F.conv1d(x, torch.ones(2, 4, 3)),
    "unpooling": lambda x, y: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2),
    "convolution of one image": lambda x, y: F.conv2d(x.unsqueeze(0), torch.ones(2, x.shape[0], 3, 3)),
    "pool of one image": lambda x, y: F.adaptive_avg_pool2d(x.unsqueeze(0), 1),
}


@pytest.mark.parametrize(
    "how", [{"dynamic": False}, {"dynamic": True}, {"dynamic": True, "options": {"bucketing": "off"}}]
)
@pytest.mark.parametrize("name", CALLS)
def test_compiled(name: str, how: dict[str, Any]) -> None:
    compiled = torch.compile(CALLS[name], backend="dynaxla", **how)
    for sizes in ((5, 4, 6), (7, 4, 6)):
        x, y = permuted(sizes, (2, 0, 1)), permuted(sizes, (1, 2, 0))
        expected, given = CALLS[name](x, y), compiled(x, y)
        torch.testing.assert_close(given, expected)
        assert given.stride() == expected.stride()


@pytest.mark.parametrize("dims", [4, 5])
def test_memory_formats(dims: int) -> None:
    memory_format = torch.channels_last if dims == 4 else torch.channels_last_3d
    x = torch.randn([2, 3, 5, 6, 4][:dims]).to(memory_format=memory_format)

    def run(x: Tensor) -> list[Any]:
        padded = [F.pad(x, [1, 2] * (dims - 2), mode=mode) for mode in ("reflect", "replicate")]
        pool, unpool = (F.max_pool2d, F.max_unpool2d) if dims == 4 else (F.max_pool3d, F.max_unpool3d)
        unpooled = unpool(*pool(x, 2, 2, return_indices=True), 2)
        rolled = x.roll(1, 2), x.roll((1, -1), (2, 3)), x.roll(3)
        normed = F.batch_norm(x, None, None, training=True)
        return [*padded, unpooled, F.channel_shuffle(x, 3), normed, *rolled, torch.zeros(x.shape) + x * 2]

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(sum(each.square().sum() for each in run(x)), x)[0]

    compiled = torch.compile(run, backend="dynaxla")
    for given, expected in zip(compiled(x), run(x), strict=True):
        torch.testing.assert_close(given, expected)
        assert given.stride() == expected.stride()
    x.requires_grad_()
    given = torch.autograd.grad(sum(each.square().sum() for each in compiled(x)), x)[0]
    torch.testing.assert_close(given, gradient(x))
    assert given.stride() == gradient(x).stride()


@pytest.mark.parametrize("dynamic", [False, True])
def test_volumes_without_a_batch(dynamic: bool) -> None:
    def run(x: Tensor) -> Any:
        return F.max_pool3d(x, 2, return_indices=True)

    compiled = torch.compile(run, backend="dynaxla", dynamic=dynamic)
    for size in (6, 9):
        x = torch.randn(2, 4, 6, 6, size).to(memory_format=torch.channels_last_3d)[0]
        for given, expected in zip(compiled(x), run(x), strict=True):
            torch.testing.assert_close(given, expected)
            assert given.stride() == expected.stride()


@pytest.mark.parametrize(
    ("dtype", "batch", "bucketing"),
    # where sizes vary, torch predicts no order for the library's kernels, which float32 has
    [(torch.float64, 2, "auto"), (torch.float64, 2, "off"), (torch.float32, 1, "off"), (torch.float32, 2, "off")],
)
@pytest.mark.parametrize(("window", "groups"), [(1, 1), (1, 2), (3, 2)])
def test_gradients_of_weights(dtype: torch.dtype, batch: int, window: int, groups: int, bucketing: str) -> None:
    """Kernels of torch's own give strides other than those of a library, where a dim has one element."""
    convolution = torch.nn.Conv2d(2, 4, window, padding=window // 2, groups=groups, dtype=dtype)
    compiled = torch.compile(convolution, backend="dynaxla", options={"bucketing": bucketing})
    for rows in (6, 7):
        x = torch.randn(batch, 2, rows, 5, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
        found = []
        for each in (compiled, convolution):
            convolution.zero_grad()
            found.append(torch.autograd.grad(each(x).square().sum(), [x, *convolution.parameters()]))
        for given, expected in zip(*found, strict=True):
            torch.testing.assert_close(given, expected)
            assert given.stride() == expected.stride()
