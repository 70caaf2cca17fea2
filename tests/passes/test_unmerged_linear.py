"""Products of linear layers keep the dims of their rows apart, and their numbers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dynaxla.custom_ops import internal
from dynaxla.observe.recorder import Recorder
from dynaxla.ops.matrix import contract_rows, linear
from dynaxla.passes.unmerged_linear import PASS, keep_rows_apart
from dynaxla.targets.registry import find_target
from tests.tolerances import assert_close

aten = torch.ops.aten


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, weight, bias)) @ weight


def merged(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x.flatten(0, 1), weight.t())


@pytest.mark.parametrize("function", [layer, merged])
def test_rows_are_not_merged(function: Any) -> None:
    given = torch.randn(2, 5, 3), torch.randn(4, 3), torch.randn(4)
    made = make_fx(function, tracing_mode="fake")(*given)
    keep_rows_apart(made.graph)
    made.recompile()
    products = made.graph.find_nodes(op="call_function", target=internal.LINEAR)
    assert [each.meta["val"].dim() for each in products] == [3] * len(products) != []
    assert not any(made.graph.find_nodes(op="call_function", target=op) for op in (aten.mm.default, aten.addmm.default))
    assert_close(made(*given), function(*given))


def test_a_matrix_and_integers_stay() -> None:
    for x in (torch.randn(5, 3), torch.ones(2, 5, 3, dtype=torch.long)):
        weight = torch.ones(3, 4, dtype=x.dtype)
        made = make_fx(lambda x, w: (x.reshape(-1, 3)) @ w, tracing_mode="fake")(x, weight)
        keep_rows_apart(made.graph)
        assert not made.graph.find_nodes(op="call_function", target=internal.LINEAR)


def gradients(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """As autograd has them, of a linear layer on [batch, tokens, features]."""
    grad = torch.cos(F.linear(x, weight, bias))
    merged = grad.reshape(-1, weight.shape[0])
    of_weight = merged.t() @ x.reshape(-1, x.shape[-1])
    return grad @ weight, of_weight.t(), merged.sum(0, keepdim=True).view(-1), merged.sum([0])


@pytest.mark.parametrize("rows", [(2, 5), (2, 3, 4), (1, 7)])
def test_gradients_keep_rows_apart(rows: tuple[int, ...]) -> None:
    given = torch.randn(*rows, 3), torch.randn(4, 3), torch.randn(4)
    made = make_fx(gradients, tracing_mode="fake")(*given)
    keep_rows_apart(made.graph)
    made.graph.eliminate_dead_code()
    made.recompile()
    (contraction,) = made.graph.find_nodes(op="call_function", target=internal.CONTRACT_ROWS)
    assert [each.meta["val"].dim() for each in contraction.args] == [len(rows) + 1] * 2
    assert not any(made.graph.find_nodes(op="call_function", target=op) for op in (aten.mm.default, aten.addmm.default))
    sums = made.graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)
    assert [each.args[1] for each in sums] == [list(range(len(rows)))] * 2
    for found, expected in zip(made(*given), gradients(*given), strict=True):
        assert_close(found, expected)


def test_products_over_other_rows_stay() -> None:
    """Of equal numbers of rows, which were merged of other dims, and of integers."""
    for left, right in (
        (torch.randn(2, 6, 3), torch.randn(3, 4, 5)),
        (torch.randn(2, 6, 3), torch.randn(12, 5)),
        (torch.ones(2, 6, 3, dtype=torch.long), torch.ones(2, 6, 5, dtype=torch.long)),
    ):
        made = make_fx(lambda x, y: x.reshape(12, -1).t() @ y.reshape(12, -1), tracing_mode="fake")(left, right)
        keep_rows_apart(made.graph)
        made.recompile()
        assert not made.graph.find_nodes(op="call_function", target=internal.CONTRACT_ROWS)
        assert_close(made(left, right), left.reshape(12, -1).t() @ right.reshape(12, -1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_body_sums_over_rows_of_several_dims(dtype: Any) -> None:
    left, right = torch.randn(2, 5, 3), torch.randn(2, 5, 4)
    found = contract_rows(*(jnp.asarray(each.numpy(), dtype) for each in (left, right)))
    assert found.dtype == dtype
    rounded = [torch.from_numpy(np.array(jnp.asarray(each.numpy(), dtype), np.float64)) for each in (left, right)]
    expected = torch.einsum("abn,abk->nk", *rounded)
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance, atol=tolerance)


def test_padded_rows_add_nothing(recorder: Recorder) -> None:
    """Padding is zero, whose logarithm is minus infinity."""

    def run(x: Tensor) -> Tensor:
        return torch.ops.dynaxla.contract_rows(x.log(), x[..., 1:].sqrt().log())  # type: ignore[no-any-return]

    compiled = torch.compile(run, backend="dynaxla", dynamic=True, options={"bucketing": "require"})
    with recorder.expect(eager_ops=0):
        for rows in ((3, 5), (7, 12), (6, 11)):
            x = torch.rand(*rows, 6)
            assert_close(compiled(x), run(x))


def test_the_body_takes_rows_of_several_dims() -> None:
    x, weight, bias = torch.randn(2, 5, 3), torch.randn(4, 3), torch.randn(4)
    found = linear(*(jnp.asarray(each.numpy()) for each in (x, weight, bias)))
    assert_close(torch.from_numpy(np.array(found)), F.linear(x, weight, bias))


def test_it_pays_on_a_tpu() -> None:
    assert PASS.pays_on is not None
    assert [PASS.pays_on(find_target(name)) for name in ("tpu", "cpu")] == [True, False]
