"""What the op sweep found (conformance/results/ops_sweep.tsv) agrees with the op table and is good enough."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from conformance import ops_sweep
from conformance.opinfo_check import RANDOM, check
from conformance.opinfo_compare import EAGER_IS_OFF, difference
from conformance.opinfo_samples import Sample, name_of, why_not
from conformance.ops_sweep import DIRECTIONS, DTYPES, sweep
from conformance.sweep_evidence import contradictions, core_overloads, counts, share_correct
from conformance.sweep_record import Record, Status, read_records, write_records

RECORDS = list(read_records().values())
FLOAT32_SHARE = 0.97
OTHERS_BEHIND = 0.03


def test_no_result_is_wrong_and_nothing_raised_or_died() -> None:
    assert [record.line() for record in RECORDS if Status(record.status).is_bad] == []


def test_no_row_of_the_op_table_is_contradicted() -> None:
    assert contradictions(RECORDS) == []


def test_a_wrong_result_contradicts_the_rows_behind_it() -> None:
    row = "aten.add.Tensor"
    wrong = Record("add", "float32", "forward", Status.WRONG.value, 1, (row,))
    assert contradictions([wrong]) == [f"{row} is claimed in float32 and was never right"]
    failed = Record("add", "float32", "forward", Status.CORRECT.value, 1, (), (f"{row}:lowering_failed",))
    assert contradictions([failed]) == [f"add in float32: {row} runs in eager by lowering_failed"]


def test_every_op_of_the_database_was_run_in_every_dtype_and_direction() -> None:
    kinds = list(product(DTYPES, DIRECTIONS))
    wanted = {
        (name_of(info), dtype, direction)
        for info in op_db
        for dtype, direction in kinds
        if why_not(info, getattr(torch, dtype), direction) is None
    }
    assert wanted - {record.key for record in RECORDS} == set()


def test_float32_is_correct() -> None:
    assert share_correct(counts(RECORDS, "float32", "forward")) >= FLOAT32_SHARE


@pytest.mark.parametrize("dtype", ["bfloat16", "int64", "bool"])
def test_other_dtypes_are_hardly_behind_float32(dtype: str) -> None:
    behind = share_correct(counts(RECORDS, "float32", "forward")) - share_correct(counts(RECORDS, dtype, "forward"))
    assert behind <= OTHERS_BEHIND


def test_the_core_opset_needs_no_eager_part_but_for_three_overloads() -> None:
    eager = {str(op) for op, way in core_overloads().items() if way.startswith("eager")}
    assert eager == {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.resize_.default"}


def info_of(name: str, **changed: Any) -> SimpleNamespace:
    info = next(info for info in op_db if info.name == name)
    kept = {"name": name, "variant_test_name": "", "op": info.op, "sample_inputs": info.sample_inputs}
    return SimpleNamespace(**{**kept, **changed})


def sin_that_is_cos(x: torch.Tensor) -> torch.Tensor:
    return x.cos() if torch.compiler.is_compiling() else x.sin()


def refuse(*args: object) -> None:
    raise ValueError("not compiled")


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_check_tells_wrong_from_correct(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    correct = check(info_of("sin"), torch.float32, direction, 2)
    assert (correct.status, correct.eager) == ("correct", ())
    assert {"aten.sin.default"} & set(correct.compiled)
    assert check(info_of("sin", op=sin_that_is_cos), torch.float32, direction, 2).status == "wrong"
    monkeypatch.setattr(torch, "compile", lambda *_, **__: refuse)
    raised = check(info_of("sin"), torch.float32, direction, 2)
    assert (raised.status, raised.detail.split(" | ")[0]) == ("raised", "ValueError: not compiled")


def test_the_check_names_what_ran_in_eager() -> None:
    assert check(info_of("nonzero"), torch.float32, "forward", 1).eager == ("aten.nonzero.default:graph_break",)
    assert check(info_of("linalg.eig"), torch.float32, "forward", 2).eager[0] == "aten.linalg_eig.default:no_lowering"


def test_random_ops_are_compared_where_eager_draws_and_recorded_where_the_executable_does() -> None:
    found = check(info_of("nn.functional.dropout2d"), torch.float32, "forward", 2)
    assert (found.status, found.eager, found.detail) == ("correct", (), RANDOM)

    def twice_where_compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x) * (2 if torch.compiler.is_compiling() else 1)

    assert check(info_of("sin", op=twice_where_compiled), torch.float32, "forward", 1).status == "wrong"


def gradient_of(name: str, x: list[float], weights: list[float], dtype: torch.dtype, *args: Any) -> tuple[Any, Sample]:
    """A sample's gradient in eager."""
    info = info_of(name)
    given = torch.tensor(x, dtype=dtype, requires_grad=True)
    call = SimpleNamespace(input=given, args=args, kwargs={}, output_process_fn_grad=None)
    result = info.op(given, *args)
    values = result if isinstance(result, torch.Tensor) else result[0]
    cotangent = torch.tensor(weights, dtype=dtype)
    return info, Sample(call, list(torch.autograd.grad(values, given, cotangent)), [cotangent], False)


@pytest.mark.parametrize("name", ["sort", "msort"])
def test_equal_elements_may_get_the_gradients_of_each_other(name: str) -> None:
    info, sample = gradient_of(name, [2.0, 1.0, 2.0], [5.0, 6.0, 7.0], torch.bfloat16)
    moved, wrong = torch.tensor([7.0, 5.0, 6.0]).bfloat16(), torch.tensor([5.0, 6.0, 7.0]).bfloat16()
    assert sorted([difference(info, sample, [moved]) or "", difference(info, sample, sample.leaves) or ""]) == ["", ""]
    assert difference(info, sample, [wrong]) is not None
    assert difference(info, sample, [moved + 1]) is not None


def test_the_gradient_of_what_does_not_matter_may_be_nearer_to_zero_than_eagers() -> None:
    info, sample = gradient_of("nn.functional.layer_norm", [-0.6], [1.5], torch.float64, (1,))
    off = replace(sample, leaves=[torch.tensor([4.5e-13], dtype=torch.float64)])
    assert difference(info, off, [torch.zeros(1, dtype=torch.float64)]) is None
    assert difference(info, off, [torch.full((1,), 5e-13, dtype=torch.float64)]) is not None
    _, other = gradient_of("sin", [-0.6], [1.5], torch.float64)
    assert difference(info_of("sin"), other, [torch.zeros(1, dtype=torch.float64)]) is not None


def test_where_eager_is_listed_as_off_it_is() -> None:
    assert set(EAGER_IS_OFF) == {("nn.functional.hardsigmoid", torch.float64)}
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    torch.nn.functional.hardsigmoid(x).backward()
    assert x.grad is not None
    assert x.grad.item() == torch.tensor(1 / 6, dtype=torch.float32).item() != 1 / 6


def test_what_cancels_may_leave_a_rounding_of_its_terms() -> None:
    info, sample = gradient_of("nn.functional.rms_norm", [396.0], [1.5], torch.bfloat16, (1,))
    term = 1.5 / 396  # cotangent * result / input
    assert difference(info, sample, [torch.tensor([term * 1e-7]).bfloat16()]) is None
    assert difference(info, sample, [torch.tensor([term * 1e-6]).bfloat16()]) is not None


def test_a_process_that_dies_costs_one_job(monkeypatch: pytest.MonkeyPatch) -> None:
    dies = info_of("sin", sample_inputs=lambda *_, **__: os._exit(3))
    nothing = info_of("sin", sample_inputs=lambda *_, **__: ())
    monkeypatch.setattr(ops_sweep, "op_infos", lambda: {"dies": dies, "nothing": nothing})
    jobs = [("dies", "float32", "forward"), ("nothing", "float32", "backward"), ("dies", "int64", "forward")]
    assert [record.status for record in sweep(jobs, 1, 60.0)] == ["died", "not run", "died"]


def test_records_survive_a_file(tmp_path: Path) -> None:
    record = Record(
        "add", "float32", "forward", "wrong", 3, ("aten.add.Tensor",), ("a:random", "b:random"), "off by\t2"
    )
    write_records([record], tmp_path / "results.tsv")
    assert read_records(tmp_path / "results.tsv") == {record.key: replace(record, detail="off by 2")}
