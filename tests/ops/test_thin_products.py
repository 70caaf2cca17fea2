"""Products of few rows by a large matrix, which XLA's CPU compiler is given in another form than those of many."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from dynaxla.lowering import stablehlo_functions, stablehlo_module
from dynaxla.lowering.cpu_products import MOST_ROWS, settle_products
from dynaxla.runtime import xla
from tests.tolerances import assert_close

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ROWS = (1, 2, 7, MOST_ROWS, MOST_ROWS + 1)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PRODUCTS: dict[str, tuple[Product, tuple[int, ...], tuple[int, ...]]] = {
    "rows by rows": (lambda x, w: x @ w.mT, (-1, 160), (512, 160)),
    "a layer with a bias": (lambda x, w: torch.nn.functional.linear(x, w, w[:, 0]), (-1, 160), (512, 160)),
    "of three dims": (lambda x, w: torch.nn.functional.linear(x, w), (1, -1, 160), (512, 160)),
    "rows by columns": (lambda x, w: x @ w, (-1, 160), (160, 512)),
    "a transposed left": (lambda x, w: x.mT @ w.mT, (160, -1), (512, 160)),
    "a stack": (lambda x, w: x @ w.mT, (3, -1, 64), (3, 400, 64)),
    "a stack of stacks": (lambda x, w: torch.einsum("bhmk,bnhk->bhmn", x, w), (2, 3, -1, 64), (2, 200, 3, 64)),
    "a row without a dim": (lambda x, w: (x @ w.mT)[0], (-1, 160), (512, 160)),
    "a matrix by a vector": (lambda x, w: w @ x[0], (-1, 160), (512, 160)),
    "a vector by a matrix": (lambda x, w: x[0] @ w, (-1, 160), (160, 512)),
    "rows in two parts": (lambda x, w: x @ w.mT, (-1, 160), (514, 160)),
    "odd rows": (lambda x, w: x @ w.mT, (-1, 160), (513, 160)),
    "columns of both": (lambda x, w: torch.einsum("km,kn->nm", x, w), (160, -1), (160, 512)),
}


CASES = [
    (name, dtype)
    for name in PRODUCTS
    for dtype in (DTYPES if name == "rows by rows" else (torch.float32, torch.bfloat16))
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
@torch.no_grad()
def test_products_of_few_rows_are_eagers(name: str, dtype: torch.dtype) -> None:
    function, left, right = PRODUCTS[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=False)
    w = torch.randn(right).to(dtype)
    for rows in ROWS:
        x = torch.randn([rows if size < 0 else size for size in left]).to(dtype)
        assert_close(compiled(x, w), function(x, w))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
    w = torch.randn(512, 160).to(dtype)
    compiled = torch.compile(torch.nn.functional.linear, backend="dynaxla", dynamic=False)
    for rows in ROWS:
        x = torch.randn(rows, 160).to(dtype)
        x[rows // 2, 3], x[0, 5] = torch.inf, torch.nan
        w[7, 9], w[300, 0] = -torch.inf, torch.nan
        actual, expected = compiled(x, w), torch.nn.functional.linear(x, w)
        assert torch.equal(actual.isnan(), expected.isnan())
        assert torch.equal(actual.isinf(), expected.isinf())


def test_gradients_of_layers_of_few_rows_are_eagers() -> None:
    layer = torch.nn.Linear(160, 512)
    x = torch.randn(7, 160, requires_grad=True)
    compiled = torch.compile(layer, backend="dynaxla", dynamic=False)
    ours, eagers = (torch.autograd.grad(run(x).square().sum(), [x, layer.weight]) for run in (compiled, layer))
    for actual, expected in zip(ours, eagers, strict=True):
        assert_close(actual, expected)


def settled(text: str, *, by_rows: bool = True) -> list[str]:
    """The operations, with their types, that a function of one product becomes."""
    mlir = stablehlo_module.StablehloModules(xla.mlir())
    module = mlir.parse(text)
    with module.context, mlir.ir.Location.unknown():
        settle_products(mlir, module, by_rows=by_rows)
    module.operation.verify()
    return re.findall(r"stablehlo\.(\w+).*-> tensor<(\S+)>|stablehlo\.(\w+).* : tensor<(\S+)>", str(module))


def product(left: str, right: str, result: str, dims: str = "[1] x [1]") -> str:
    return f"""func.func @f(%x: tensor<{left}>, %w: tensor<{right}>) -> tensor<{result}> {{
        %y = stablehlo.dot_general %x, %w, contracting_dims = {dims} :
          (tensor<{left}>, tensor<{right}>) -> tensor<{result}>
        return %y : tensor<{result}>
    }}"""


FORMS: dict[str, tuple[str, list[str]]] = {
    "few rows are the right factor": (
        product("8x256xf32", "1024x256xf32", "8x1024xf32"),
        ["dot_general 1024x8xf32", "optimization_barrier 1024x8xf32", "transpose 8x1024xf32"],
    ),
    "a matrix is cut for one row": (
        product("1x256xf32", "1024x256xf32", "1x1024xf32"),
        [
            "reshape 8x128x256xf32",
            "reshape 256xf32",
            "broadcast_in_dim 8x256xf32",
            "dot_general 8x128xf32",
            "reshape 1x1024xf32",
        ],
    ),
    "in as many parts as divide it": (
        product("1x256xf64", "1030x256xf64", "1x1030xf64"),
        [
            "reshape 2x515x256xf64",
            "reshape 256xf64",
            "broadcast_in_dim 2x256xf64",
            "dot_general 2x515xf64",
            "reshape 1x1030xf64",
        ],
    ),
    "along the dim that is summed": (
        product("1x256xf32", "256x1024xf32", "1x1024xf32", "[1] x [0]"),
        [
            "reshape 8x32x1024xf32",
            "reshape 8x32xf32",
            "dot_general 8x1024xf32",
            "constant f32",
            "reduce 1024xf32",
            "reshape 1x1024xf32",
        ],
    ),
    "a matrix of odd rows stays": (product("1x256xf32", "1025x256xf32", "1x1025xf32"), ["dot_general 1x1025xf32"]),
    "many rows stay": (product("65x256xf32", "1024x256xf32", "65x1024xf32"), ["dot_general 65x1024xf32"]),
    "a small matrix stays": (product("8x16xf32", "64x16xf32", "8x64xf32"), ["dot_general 8x64xf32"]),
    "columns stay": (
        product("8x256xf32", "256x1024xf32", "8x1024xf32", "[1] x [0]"),
        ["dot_general 8x1024xf32"],
    ),
    "bfloat16 is not widened": (
        product("8x256xbf16", "1024x256xbf16", "8x1024xf32"),
        ["dot_general 8x1024xf32"],
    ),
    "one row of bfloat16 is two": (
        product("1x256xbf16", "1024x256xbf16", "1x1024xf32"),
        [
            "concatenate 2x256xbf16",
            "optimization_barrier 2x256xbf16",
            "dot_general 2x1024xf32",
            "optimization_barrier 2x1024xf32",
            "slice 1x1024xf32",
        ],
    ),
    "many rows of bfloat16 are widened": (
        product("65x256xbf16", "1024x256xbf16", "65x1024xf32"),
        ["convert 65x256xf32", "convert 1024x256xf32", "dot_general 65x1024xf32"],
    ),
    "float16 is widened": (
        product("8x256xf16", "1024x256xf16", "8x1024xf32"),
        [
            "convert 1024x256xf32",
            "convert 8x256xf32",
            "dot_general 1024x8xf32",
            "optimization_barrier 1024x8xf32",
            "transpose 8x1024xf32",
        ],
    ),
    "integers stay": (product("8x256xi32", "1024x256xi32", "8x1024xi32"), ["dot_general 8x1024xi32"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    text, expected = FORMS[name]
    assert [" ".join(filter(None, each)) for each in settled(text)] == expected


def test_on_a_mesh_products_keep_their_form() -> None:
    text, _ = FORMS["few rows are the right factor"]
    assert [" ".join(filter(None, each)) for each in settled(text, by_rows=False)] == ["dot_general 8x1024xf32"]
    text, _ = FORMS["bfloat16 is not widened"]
    assert len(settled(text, by_rows=False)) == 3


def test_the_forms_of_another_size_are_its_own() -> None:
    """Functions of calls that differ in sizes alone are made from examples; the form depends on the size."""
    assert stablehlo_functions.settle_products is settle_products
    compiled = torch.compile(torch.nn.functional.linear, backend="dynaxla", dynamic=False)
    w = torch.randn(512, 160)
    for rows in (90, 80, 70, 66, 64, 5, 3, 1):
        x = torch.randn(rows, 160)
        with torch.no_grad():
            assert_close(compiled(x, w), torch.nn.functional.linear(x, w))
