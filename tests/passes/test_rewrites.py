"""Rewrites of the captured graph: folded batch norms, fused attentions of accelerators, fused transformer layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.custom_ops import internal
from dynaxla.decompositions.decomposition_table import decomposition_table
from dynaxla.observe.recorder import Recorder
from dynaxla.passes.channels_last_convolution import rewrite_convolutions
from tests.tolerances import assert_close

aten = torch.ops.aten


def norm_net(dims: int, groups: int = 1, bias: bool = True, affine: bool = True) -> nn.Sequential:
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](4, 6, 3, groups=groups, bias=bias)
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](6, affine=affine)
    norm.running_mean = torch.randn(6)
    norm.running_var = torch.rand(6) + 0.1
    return nn.Sequential(convolution, norm, nn.ReLU()).eval()


@pytest.mark.parametrize("settings", [{}, {"groups": 2}, {"bias": False}, {"affine": False}], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
@torch.no_grad()
def test_batch_norms_fold_into_convolutions_and_are_followed(
    dims: int, settings: dict[str, Any], recorder: Recorder
) -> None:
    net, x = norm_net(dims, **settings), torch.randn(2, 4, *[7] * dims)
    compiled = torch.compile(net, backend="dynaxla")
    with recorder.expect(compiles=1, folds=1):
        assert_close(compiled(x), net(x))
    with recorder.expect(compiles=0, folds=0):
        net[1].running_var.mul_(3)
        assert_close(compiled(x), net(x))
        net[0].weight.neg_()
        assert_close(compiled(x), net(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.no_grad()
def test_batch_norms_in_other_dtypes(dtype: torch.dtype) -> None:
    net, x = norm_net(2).to(dtype), torch.randn(2, 4, 7, 7).to(dtype)
    assert_close(torch.compile(net, backend="dynaxla")(x), net(x))


@torch.no_grad()
def test_a_convolution_with_another_reader_keeps_its_result() -> None:
    net = norm_net(2)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = net[0](x)
        return y, net[1](y)

    x = torch.randn(2, 4, 7, 7)
    for result, expected in zip(torch.compile(both, backend="dynaxla")(x), both(x), strict=True):
        assert_close(result, expected)


ACCELERATED = [
    lambda q, k, v, m: aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0],
    lambda q, k, v, m: aten._scaled_dot_product_efficient_attention(q, k, v, m, True)[0],
    lambda q, k, v, m: aten._scaled_dot_product_cudnn_attention(q, k, v, m, True)[0],
    lambda q, k, v, m: aten._scaled_dot_product_fused_attention_overrideable(q, k, v, m)[0],
]


@pytest.mark.parametrize("attention", ACCELERATED, ids=["flash", "efficient", "cudnn", "overrideable"])
def test_attentions_of_accelerators_become_ours(attention: Any) -> None:
    """On fake tensors: no accelerator is needed to see what is captured."""
    with FakeTensorMode():
        query = torch.empty(2, 4, 8, 16, dtype=torch.float16, device="meta")
        mask = torch.empty(2, 4, 8, 8, dtype=torch.float16, device="meta")
        graph = make_fx(attention, decomposition_table=dict(decomposition_table()))(query, query, query, mask).graph
    assert next(n.target for n in graph.nodes if n.op == "call_function") == internal.ATTENTION


MASKS: list[dict[str, torch.Tensor]] = [
    {},
    {"src_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
    {"src_key_padding_mask": torch.tensor([[False] * 5, [False, False, False, True, True]])},
    {
        "src_mask": torch.ones(5, 5, dtype=torch.bool).triu(1),
        "src_key_padding_mask": torch.tensor([[False] * 5, [False, False, False, True, True]]),
    },
]


@pytest.mark.parametrize("masks", MASKS, ids=["none", "source", "padding", "both"])
@pytest.mark.parametrize("norm_first", [False, True])
@torch.no_grad()
def test_fused_transformer_layers(masks: dict[str, torch.Tensor], norm_first: bool, recorder: Recorder) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", norm_first=norm_first, batch_first=True).eval()
    x = torch.randn(2, 5, 8)
    with recorder.expect(compiles=1, eager_ops=0):
        result = torch.compile(layer, backend="dynaxla")(x, **masks)
    assert_close(result, layer(x, **masks))


@pytest.mark.parametrize("need_weights", [False, True])
@torch.no_grad()
def test_fused_attention_gives_no_weights_where_none_are_wanted(need_weights: bool) -> None:
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(2, 4, 8)

    def attend(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        projection = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias
        return torch._native_multi_head_attention(x, x, x, 8, 2, *projection, None, need_weights)  # type: ignore[no-any-return]

    (result, weights), (expected, wanted) = torch.compile(attend, backend="dynaxla")(x), attend(x)
    assert_close(result, expected)
    assert (weights is None) == (wanted is None) == (not need_weights)


def on_constants(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    three = torch.full_like(x, 3)
    return torch.frac(three), torch.trunc(-three), three - x.new_ones(2, 2), torch.zeros_like(x).sign() * 2 - three


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_nothing_folds_constants_wrongly(dtype: torch.dtype) -> None:
    """torch-mlir does, so it never sees a constant."""
    x = torch.randn(2, 2, dtype=dtype)
    for result, expected in zip(torch.compile(on_constants, backend="dynaxla")(x), on_constants(x), strict=True):
        assert torch.equal(result, expected)


def on_itself(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    same = x.clone()
    pairs = [(x, x), (x, same)]
    return tuple(
        op(a, b)
        for a, b in pairs
        for op in (torch.eq, torch.ne, torch.le, torch.lt, torch.sub, torch.div, torch.mul, torch.atan2, torch.add)
    )


@pytest.mark.parametrize("keeps_weights", [False, True])
def test_convolutions_that_are_products_leave_the_weight_as_it_is(keeps_weights: bool) -> None:
    """1 x 1 ones where no permuted weight lasts for many calls, and those of few places; of the last one here it has 18."""
    sizes = [(8, 3, 3, 3), (16, 8, 1, 1), (64, 16, 3, 3), (80, 64, 3, 3)]

    def net(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = F.conv2d(x, weight)
        return x

    graph = make_fx(net, tracing_mode="fake")(torch.randn(2, 3, 9, 9), *map(torch.randn, sizes)).graph
    _, *weights = graph.find_nodes(op="placeholder")
    rewrite_convolutions(graph, weights if keeps_weights else ())
    permuted = {
        tuple(node.args[0].meta["val"].shape) for node in graph.find_nodes(op="call_function", target=internal.KERNEL)
    }
    assert permuted == set(sizes[:3] if keeps_weights else sizes[:1])


def test_gradients_of_convolutions_that_are_products() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 16, 1),
        nn.Conv2d(16, 64, 3),
        nn.Conv2d(64, 80, 3),
    )
    other, x = copy.deepcopy(model), torch.randn(2, 3, 9, 9)
    for each in (model, torch.compile(other, backend="dynaxla")):
        each(x).square().sum().backward()
    for mine, eager in zip(other.parameters(), model.parameters(), strict=True):
        assert_close(mine.grad, eager.grad)


@torch.no_grad()
def test_nothing_folds_ops_of_equal_operands_wrongly() -> None:
    """x == x is false for NaN, x - x is NaN for infinity: torch-mlir folds the first."""
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1.5])
    for result, expected in zip(torch.compile(on_itself, backend="dynaxla")(x), on_itself(x), strict=True):
        torch.testing.assert_close(result, expected, equal_nan=True)
    assert torch.equal(torch.compile(torch.isfinite, backend="dynaxla")(x), torch.isfinite(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_products_of_16_bit_floats_that_lie_anyhow(dtype: torch.dtype) -> None:
    """XLA's CPU client has no kernel for some layouts of bfloat16 factors, and says so only when the program runs."""

    def model(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.t() * 3) @ (x + 2), x.t() @ x, torch.einsum("ni,nj->ij", x, x), (x.t().contiguous() @ x).t() @ x.t()

    x = torch.randn(5, 8, dtype=dtype)
    for mine, eager in zip(torch.compile(model, backend="dynaxla")(x), model(x), strict=True):
        assert_close(mine, eager)


def test_a_kernel_of_one_channel_is_a_tensor_of_its_own_in_eager() -> None:
    weight = torch.randn(1, 1, 3)
    moved = internal.KERNEL(weight)
    assert torch.equal(moved, weight.permute(2, 1, 0))
    moved.zero_()
    assert weight.abs().sum() > 0


def test_copies_that_wait_for_a_write_are_copies(recorder: Recorder) -> None:
    """torch makes them of memory of its own alone, so not of what a program gives."""

    def copy_lazily(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        copied = y._lazy_clone()  # type: ignore[attr-defined]
        copied.add_(1)
        return y, copied, x.t()._lazy_clone()  # type: ignore[attr-defined]

    x = torch.randn(4, 6)
    with recorder.expect(eager_ops=0):
        results = torch.compile(copy_lazily, backend="dynaxla")(x)
    for result, expected in zip(results, copy_lazily(x), strict=True):
        assert_close(result, expected)
        assert result.stride() == expected.stride()
    results[2].zero_()
    assert x.all()
