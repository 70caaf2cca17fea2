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
from dynaxla.ops.matrix import linear
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


def test_the_body_takes_rows_of_several_dims() -> None:
    x, weight, bias = torch.randn(2, 5, 3), torch.randn(4, 3), torch.randn(4)
    found = linear(*(jnp.asarray(each.numpy()) for each in (x, weight, bias)))
    assert_close(torch.from_numpy(np.array(found)), F.linear(x, weight, bias))


def test_it_pays_on_a_tpu() -> None:
    assert PASS.pays_on is not None
    assert [PASS.pays_on(find_target(name)) for name in ("tpu", "cpu")] == [True, False]
