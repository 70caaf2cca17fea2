"""Products of bfloat16 have the precision "default" in programs for a TPU, whose compiler fuses more into these; all others
have the one that the options say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from dynaxla.lowering import stablehlo_module
from dynaxla.lowering.call_graph import op_call
from dynaxla.lowering.jax_lowering import lower_bodies
from dynaxla.lowering.stablehlo_functions import FunctionFinisher

HIGHEST = jax.lax.Precision.HIGHEST


def multiply(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y, precision=HIGHEST, preferred_element_type=jnp.float32).astype(x.dtype)


def multiply_widened(x: Any, y: Any) -> Any:
    moved = jnp.swapaxes(x.astype(jnp.float32), 0, 1)
    return (moved.T @ y.astype(jnp.float32)[::-1]).astype(x.dtype)


def multiply_sums(x: Any, y: Any) -> Any:
    """Sums in float32 are more than bfloat16."""
    return ((x.astype(jnp.float32) + 1e-3) @ y.astype(jnp.float32)).astype(x.dtype)


def multiply_through_integers(x: Any, y: Any) -> Any:
    return (jnp.exp(x).astype(jnp.int32).astype(jnp.float32) @ y.astype(jnp.float32)).astype(x.dtype)


def convolve(x: Any, y: Any) -> Any:
    images, kernel = (each.astype(jnp.float32)[None, None] for each in (x, y))
    return jax.lax.conv(images, kernel, (1, 1), "SAME", precision=HIGHEST)[0, 0].astype(x.dtype)


def find_precisions(
    body: Callable[..., Any], dtype: torch.dtype, platform: str, precision: str | None = "HIGHEST", rows: int = 16
) -> list[Any]:
    graph = torch.fx.Graph()
    operands = [graph.placeholder(name) for name in ("x", "y")]
    node = graph.call_function(torch.ops.aten.mm.default, tuple(operands))
    for each in graph.nodes:
        each.meta["val"] = torch.ones(rows, rows, dtype=dtype)
    finisher = FunctionFinisher(stablehlo_module.load(), platform, precision)
    (function,) = lower_bodies([(body, op_call(node)[0])], finisher)
    return re.findall(r"precision_config = \[(.*?)\]|precision = \[(\w+), (\w+)\]", function.text)


def is_default(found: list[Any]) -> bool:
    assert len(found) == 1
    return "DEFAULT" in str(found) and "HIGH" not in str(found)


BODIES = (multiply, multiply_widened, convolve)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("precision", ["HIGHEST", "HIGH"])
def test_bfloat16_on_a_tpu(body: Any, precision: str) -> None:
    assert is_default(find_precisions(body, torch.bfloat16, "tpu", precision))


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    ("dtype", "platform"),
    [(torch.float32, "tpu"), (torch.float16, "tpu"), (torch.bfloat16, "cpu"), (torch.bfloat16, "cuda")],
)
def test_other_dtypes_and_devices(body: Any, dtype: torch.dtype, platform: str) -> None:
    found = find_precisions(body, dtype, platform)
    assert str(found).count("HIGHEST") == 2


@pytest.mark.parametrize("body", [multiply_sums, multiply_through_integers])
def test_factors_that_are_more_than_bfloat16(body: Any) -> None:
    assert str(find_precisions(body, torch.bfloat16, "tpu")).count("HIGHEST") == 2


def test_few_rows() -> None:
    """The products of a decoder's step."""
    assert str(find_precisions(multiply, torch.bfloat16, "tpu", rows=8)).count("HIGHEST") == 2
    assert is_default(find_precisions(convolve, torch.bfloat16, "tpu", rows=8))
