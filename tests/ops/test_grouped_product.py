"""Products of grouped rows, as mixtures of experts make them, against eager torch."""

from __future__ import annotations

import pytest
import torch

from dynaxla.custom_ops import internal
from dynaxla.observe.recorder import Recorder
from tests.lists import quick
from tests.ops.rule_check import Call, assert_all_same, assert_same, refusal
from tests.tolerances import assert_close

aten = torch.ops.aten

OFFSETS = {
    "even": (8, [2, 4, 6, 8]),
    "empty groups": (8, [0, 0, 5, 5, 8, 8]),
    "all in the first": (8, [8, 8, 8]),
    "rows behind the last group": (9, [1, 4, 6]),
    "no row in a group": (4, [0, 0]),
    "one group": (5, [5]),
    "no rows": (0, [0, 0]),
    "many rows": (100, [3, 40, 40, 99]),
    "tiles that are full": (96, [32, 64, 96]),
    "many groups": (20, [0, 1, 1, 3, 9, 9, 9, 10, 10, 10, 15, 15, 15, 18, 18]),
}


def _operands(name: str, dtype: torch.dtype, offs_dtype: torch.dtype = torch.int32) -> tuple[torch.Tensor, ...]:
    rows, ends = OFFSETS[name]
    weight = torch.randn(len(ends), 16, 24).to(dtype)
    return torch.randn(rows, 16).to(dtype), weight, torch.tensor(ends, dtype=offs_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rule_agrees_with_eager(dtype: torch.dtype) -> None:
    operands = [_operands(name, dtype, each) for name in OFFSETS for each in (torch.int32, torch.int64)]
    assert_all_same([Call.of(internal.GROUPED_PRODUCT, *args) for args in operands])


@pytest.mark.parametrize("name", ["many rows", "empty groups"])
def test_rows_that_are_not_finite_stay_in_their_group(name: str) -> None:
    rows, weight, offs = _operands(name, torch.float32)
    rows[0] = torch.inf
    rows[-1] = torch.nan
    expected = internal.GROUPED_PRODUCT(rows, weight, offs)
    assert_same(internal.GROUPED_PRODUCT, (rows, weight, offs), {}, expected)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", quick(["even", "rows behind the last group", "many rows"], "many rows"))
def test_transformers_operator_is_compiled(name: str, dtype: torch.dtype, recorder: Recorder) -> None:
    pytest.importorskip("transformers.integrations.moe")

    def model(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.ops.transformers.grouped_mm_fallback(rows * 2, weight, offs=offs) + 1

    args = _operands(name, dtype)
    with recorder.expect(graphs=1, compiles=1):
        assert_close(torch.compile(model, backend="dynaxla", options={"fallback": "error"})(*args), model(*args))


@torch.no_grad()
@pytest.mark.parametrize("name", ["even", "empty groups", "rows behind the last group", "many groups"])
def test_grouped_mm_is_compiled(name: str, recorder: Recorder) -> None:
    """In bfloat16, the one dtype that torch captures it in."""

    def model(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grouped_mm(rows * 2, weight, offs=offs) + 1

    rows, weight, offs = _operands(name, torch.bfloat16)
    held = int(offs[-1])  # eager does not initialize the rows behind the last group
    with recorder.expect(graphs=1, compiles=1):
        actual = torch.compile(model, backend="dynaxla", options={"fallback": "error"})(rows, weight, offs)
    assert_close(actual[:held], model(rows, weight, offs)[:held])


@pytest.mark.parametrize("name", ["even", "empty groups", "many groups", "many rows"])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_gradients_of_grouped_mm_are_compiled(name: str, transposed: bool, recorder: Recorder) -> None:
    """Also of matrices that have their columns in memory; with every row in a group, as eager's gradients need."""
    rows, weight, offs = _operands(name, torch.bfloat16)
    rows = rows[: int(offs[-1])]

    def model(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        matrices = weight.mT.contiguous().mT if transposed else weight
        return torch.nn.functional.grouped_mm(rows, matrices, offs=offs)

    found = []
    with recorder.expect(graphs=2, compiles=2, eager_ops=0):
        for run in (model, torch.compile(model, backend="dynaxla", options={"fallback": "error"})):
            operands = [x.clone().requires_grad_() for x in (rows, weight)]
            found.append(torch.autograd.grad(run(*operands, offs).float().square().sum(), operands))
    for wanted, mine in zip(*found, strict=True):
        assert_close(mine, wanted)
        assert mine.stride() == wanted.stride()


def test_gradients_of_grouped_mm_share_a_buckets_program(recorder: Recorder) -> None:
    _, weight, _ = _operands("even", torch.bfloat16)
    compiled = torch.compile(torch.nn.functional.grouped_mm, backend="dynaxla")
    for count in (32, 29, 26):
        offs = torch.tensor([0, 5, 5, count], dtype=torch.int32)
        rows, found = torch.randn(count, 16, dtype=torch.bfloat16), []
        for run in (torch.nn.functional.grouped_mm, compiled):
            operands = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
            torch._dynamo.mark_dynamic(operands[0], 0)
            with recorder.expect(compiles=2 if run is compiled and count == 32 else 0, eager_ops=0):
                found.append(torch.autograd.grad(run(*operands, offs=offs).float().square().sum(), operands))
        for wanted, mine in zip(*found, strict=True):
            assert_close(mine, wanted)


GROUPED = aten._grouped_mm.default
OFFS = torch.tensor([4, 8], dtype=torch.int32)
OTHER_FORMS = {
    "two matrices": ((torch.randn(16, 8), torch.randn(8, 16)), {"offs": OFFS}),
    "two stacks": ((torch.randn(2, 4, 8), torch.randn(2, 8, 16)), {}),
    "one matrix for a stack": ((torch.randn(2, 4, 8), torch.randn(8, 16)), {"offs": OFFS}),
}


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_other_forms_of_grouped_mm_are_refused(name: str) -> None:
    assert refusal(GROUPED, *OTHER_FORMS[name]) == "only rows in groups times one matrix per group are compiled"


def test_grouped_mm_with_another_result_dtype_is_refused() -> None:
    assert "dtype" in (refusal(GROUPED, _operands("even", torch.bfloat16), {"out_dtype": torch.float32}) or "")
    assert refusal(GROUPED, _operands("even", torch.bfloat16), {"out_dtype": torch.bfloat16}) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_products_over_rows_agree_with_eager(dtype: torch.dtype) -> None:
    calls = []
    for name in OFFSETS:
        rows, _, offs = _operands(name, dtype)
        calls.append(Call.of(internal.GROUP_PRODUCTS, rows, torch.randn(rows.shape[0], 24).to(dtype), offs))
    assert_all_same(calls)


@pytest.mark.parametrize(
    "name", quick(["even", "empty groups", "rows behind the last group", "many rows"], "empty groups", "many rows")
)
def test_gradients_of_transformers_operator_are_compiled(name: str, recorder: Recorder) -> None:
    pytest.importorskip("transformers.integrations.moe")

    def model(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        return torch.ops.transformers.grouped_mm_fallback(rows, weight, offs=offs).square().sum()

    rows, weight, offs = _operands(name, torch.float32)
    found = []
    with recorder.expect(graphs=2, compiles=2, eager_ops=0):
        for run in (model, torch.compile(model, backend="dynaxla")):
            operands = [x.clone().requires_grad_() for x in (rows, weight)]
            found.append(torch.autograd.grad(run(*operands, offs), operands))
    for wanted, mine in zip(*found, strict=True):
        assert_close(mine, wanted)
