"""Reductions of many elements: a NaN is the extreme, and what goes into a sum is what it is alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from dynaxla.lowering import stablehlo_functions, stablehlo_module
from dynaxla.lowering.cpu_reductions import keep_reductions_apart
from dynaxla.runtime import xla
from tests.tolerances import assert_close

Reduction = Callable[[torch.Tensor], Any]
REDUCTIONS: dict[str, Reduction] = {
    "amax": lambda x: x.amax(0),
    "amin of rows": lambda x: (x * 2).amin(1),
    "max of all": lambda x: x.max(),
    "of both dims": lambda x: torch.stack([x.amin((0, 1)), x.amax((0, 1))]),
    "both": lambda x: torch.aminmax(x, dim=0),
    "norms": lambda x: [torch.linalg.vector_norm(x, order, 0) for order in (float("inf"), -float("inf"))],
    "max by dim": lambda x: x.max(0)[0],
}


BEFORE_A_REDUCTION: dict[str, Reduction] = {
    "relu and a sum": lambda x: torch.relu(x).sum(-1),
    "a bound and a mean": lambda x: x.clamp_min(0.5).mean((0, 1)),
    "the smaller and a sum": lambda x: torch.minimum(x, x * 2).sum(0),
    "relu and the squares": lambda x: torch.relu(x).square().sum(-1),
    "a sum and relu": lambda x: torch.relu(x.sum(-1)),
    "columns": lambda x: torch.relu(x).sum(0),
    "relu and a product of vectors": lambda x: torch.relu(x.flatten()) @ torch.ones(4096, dtype=x.dtype),
    "relu and products of rows": lambda x: torch.einsum("ij,ij->i", torch.relu(x), torch.ones_like(x)),
    "relu and a mean pool": lambda x: torch.nn.functional.avg_pool2d(torch.relu(x)[None], 2),
    "a pool": lambda x: torch.nn.functional.max_pool2d(x[None], 2),
    "adaptive pool": lambda x: torch.nn.functional.adaptive_max_pool2d(x[None], (8, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@torch.no_grad()
def test_a_nan_reaches_the_reduction_behind_an_extreme(dtype: torch.dtype) -> None:
    x = torch.randn(64, 64).to(dtype)
    x[::7, ::5] = torch.nan
    for name, function in BEFORE_A_REDUCTION.items():
        actual, expected = torch.compile(function, backend="dynaxla")(x), function(x)
        assert torch.equal(actual.isnan(), expected.isnan()), name
        assert_close(actual, expected)


CONVERTED: dict[str, Reduction] = {
    "to bytes": lambda x: (x * 3).to(torch.int8).float().sum(-1),
    "to 16 bits": lambda x: (x.to(torch.bfloat16).float() - x).square().sum(-1),
    "bytes of sums": lambda x: x.sum(-1).to(torch.int8).float() * 3,
    "powers of two in 16 bits": lambda x: torch.exp2(x.to(torch.bfloat16)).float().sum(-1),
    "a large power": lambda x: torch.exp(x.sum(-1) * 0 + 88.7),
}


@pytest.mark.parametrize("name", CONVERTED)
@torch.no_grad()
def test_what_stands_by_a_sum_is_computed_as_it_is_alone(name: str) -> None:
    x = torch.linspace(-20, 20, 8192).view(64, 128)
    assert_close(torch.compile(CONVERTED[name], backend="dynaxla")(x), CONVERTED[name](x))


MODULE = """func.func @main(%x: tensor<64x128xf32>) -> tensor<{kept}xf32> {{
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %zeros = stablehlo.constant dense<0.0> : tensor<64x128xf32>
  %relu = stablehlo.maximum %x, %zeros : tensor<64x128xf32>
  %sum = stablehlo.reduce(%relu init: %zero) applies stablehlo.add across dimensions = [{dim}]
    : (tensor<64x128xf32>, tensor<f32>) -> tensor<{kept}xf32>
  return %sum : tensor<{kept}xf32>
}}"""


def _compiled(module: str | bytes) -> Any:
    client = xla.embedded_cpu()
    devices = client.devices()[:1]
    return xla.compile_on(client, devices, module, xla.compile_options(devices)).hlo_modules()[0].to_string()


@pytest.mark.parametrize(("dim", "kept"), [(0, 128), (1, 64)])
def test_the_library_sums_rows_alone(dim: int, kept: int) -> None:
    """XLA compiles the module as it is without the library, and with it when the sum stands apart."""
    text, mlir = MODULE.format(dim=dim, kept=kept), stablehlo_module.load()
    assert "__ynn_fusion" not in _compiled(text)
    with xla.mlir().full_context(), mlir.ir.Location.unknown():
        module = mlir.ir.Module.parse(text)
        keep_reductions_apart(mlir, module)
        module.operation.verify()
        compiled = _compiled(mlir.bytecode(module))
    assert ("__ynn_fusion" in compiled) == (dim == 1)


@pytest.mark.parametrize("shape", [(128, 32), (4, 2000), (1024, 8), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@torch.no_grad()
def test_a_nan_is_the_extreme(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """All reductions are one graph, each of a tensor of its own."""
    operands = {name: torch.randn(shape).to(dtype) for name in REDUCTIONS}
    for x in operands.values():
        x[::7, ::5] = torch.nan
        x[3] = torch.inf

    def reduce(operands: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {name: reduction(operands[name]) for name, reduction in REDUCTIONS.items()}

    actual, expected = torch.compile(reduce, backend="dynaxla")(operands), reduce(operands)
    for name in REDUCTIONS:
        for mine, eager in zip(tree_leaves(actual[name]), tree_leaves(expected[name]), strict=True):
            try:
                assert_close(mine, eager)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error


def test_extremes_of_bools() -> None:
    """All false, all true, both: torch-mlir reduces from the least signed bit, which is true."""

    def extremes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.max(), x.amax(1), x.min(), x.amin(0), x.amax(), x.any(), x.all()

    compiled = torch.compile(extremes, backend="dynaxla")
    for x in (torch.zeros(3, 4, dtype=torch.bool), torch.ones(3, 4, dtype=torch.bool), torch.eye(3, 4).bool()):
        for mine, eager in zip(compiled(x), extremes(x), strict=True):
            assert torch.equal(mine, eager)


def attend(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x[None, None], 2 * x[None, None], x[None, None])


SHIFTING: dict[str, Reduction] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "attention": attend,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", SHIFTING)
@torch.no_grad()
def test_a_nan_reaches_all_that_exponents_give(name: str, dtype: torch.dtype) -> None:
    """Also where the library finds by what exponents are shifted, and leaves out NaN."""
    x = torch.randn(128, 128)
    x[::7, ::5] = torch.nan
    x[3], x[4], x[5] = torch.nan, torch.inf, -torch.inf
    x[8, 1], x[9, 2], x[10, 3:] = torch.inf, -torch.inf, -torch.inf
    given = x.to(dtype)
    assert_close(torch.compile(SHIFTING[name], backend="dynaxla")(given), SHIFTING[name](given))


@pytest.mark.usefixtures("nothing_lowered")
@pytest.mark.parametrize("name", SHIFTING)
@torch.no_grad()
def test_the_library_finds_by_what_exponents_are_shifted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def watched(mlir: Any, module: Any, *, drops_nan: bool) -> None:
        keep_reductions_apart(mlir, module, drops_nan=drops_nan)
        compiled.append(_compiled(mlir.bytecode(_with_main(mlir, module))))

    monkeypatch.setattr(stablehlo_functions, "keep_reductions_apart", watched)
    x = torch.randn(128, 128)
    assert_close(torch.compile(SHIFTING[name], backend="dynaxla")(x), SHIFTING[name](x))
    lines = [line for text in compiled for line in text.splitlines()]
    assert any("__ynn_fusion" in line and "dynaxla_any_nan" in line for line in lines)


def _with_main(mlir: Any, module: Any) -> Any:
    """A copy of the module whose first function is the program."""
    copy = mlir.ir.Module.parse(str(module))
    first = copy.body.operations[0]
    first.attributes["sym_name"] = mlir.ir.StringAttr.get("main")
    first.attributes["sym_visibility"] = mlir.ir.StringAttr.get("public")
    return copy
