"""Ops one by one: programs are made once, numbers are inputs, and what has no program runs on the host, counted."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

import dynaxla
from dynaxla.device.functional_forms import FunctionalForm
from dynaxla.device.op_call import OpInvocation
from dynaxla.device.scalar_arguments import lift_scalars
from dynaxla.device.shape_generic_key import EXPECTED, OpRecompileWarnings
from tests.tolerances import assert_close


def test_numbers_are_inputs_of_programs() -> None:
    x = torch.randn(3, 4)
    there, half = x.to("dynaxla"), x.bfloat16().to("dynaxla")

    def calls(number: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
        one = torch.ones(3, 4)
        here = [x * number, x + number, x / number, number - x, x > number, x.add(one, alpha=number)]
        here += [torch.full((2,), number), torch.addcmul(x, one, x, value=number), x.bfloat16() * number]
        one = one.to("dynaxla")
        found = [there * number, there + number, there / number, number - there, there > number]
        found += [there.add(one, alpha=number), torch.full((2,), number, device="dynaxla")]
        found += [torch.addcmul(there, one, there, value=number), half * number]
        return [(mine.cpu(), its) for mine, its in zip(found, here, strict=True)]

    for mine, its in calls(0.37):
        assert_close(mine, its)
    with dynaxla.recorder().expect(compiles=0):
        for mine, its in (*calls(0.38), *calls(-1.5), *calls(1e-30)):
            assert_close(mine, its)


def test_scaled_products_of_several_dtypes() -> None:
    """All steps are in the dtype of the result."""
    x, y, z = torch.randn(5, 5, dtype=torch.float64), torch.randn(5, 5).bfloat16(), torch.rand(1, 5) + 1
    there = [each.clone().to("dynaxla") for each in (x, y, z)]
    for op in (torch.addcmul, torch.addcdiv):
        expected = op(x, y, z, value=3.14)
        assert torch.allclose(op(*there, value=3.14).cpu(), expected, rtol=1e-14, atol=1e-14)


def test_converted_copies_keep_the_low_bits() -> None:
    x = torch.tensor([1.5, -3.7, 130.0, 300.0])
    for dtype in (torch.int8, torch.uint8, torch.int16):
        assert torch.zeros(4, dtype=dtype, device="dynaxla").copy_(x.to("dynaxla")).tolist() == x.to(dtype).tolist()
        assert x.to("dynaxla").sum(0, dtype=dtype).tolist() == x.sum(0, dtype=dtype).tolist()


def test_every_op_with_numbers_takes_them() -> None:
    for op, (names, _) in lift_scalars().items():
        if op.namespace != "aten" or "foreach" in op.name():
            continue
        for own in filter(None, (op, getattr(torch.ops.aten, f"{op.name()[6:].partition('.')[0]}_", None))):
            overload = own if own is op else getattr(own, op._overloadname, None)
            if overload is None or "self" not in {p.name for p in overload._schema.arguments}:
                continue
            known = FunctionalForm.of(overload)
            values = [
                _example(p, names) for p in overload._schema.arguments if not p.has_default_value() or p.name == "min"
            ]
            moved = [v.to("dynaxla") if isinstance(v, torch.Tensor) else v for v in values]
            before = dict(dynaxla.read_metrics().host_ops)
            assert_close(overload(*moved).cpu(), overload(*values))
            assert dynaxla.read_metrics().host_ops == before, known.name


def _example(parameter: torch.Argument, names: frozenset[str]) -> object:
    if parameter.name == "mask":
        return torch.tensor([True, False])
    if parameter.name in names:
        return 0.25
    return [2] if parameter.name == "size" else torch.tensor([0.5, 2.0])


def test_numbers_promote_as_numbers() -> None:
    for x in (
        torch.arange(3),
        torch.tensor(2, dtype=torch.int8),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.tensor(True),
    ):
        there = x.to("dynaxla")
        for number in (2, 0.5, True):
            mine, its = there * number, x * number
            assert mine.dtype is its.dtype
            assert_close(mine.cpu(), its)
    assert (torch.ones(2, device="dynaxla") * torch.tensor(2.0, dtype=torch.float64)).dtype is torch.float32


def test_zeros_of_both_signs_and_no_numbers() -> None:
    one = torch.ones(2, device="dynaxla")
    assert (one / 0.0).tolist() == [float("inf")] * 2
    assert (one / -0.0).tolist() == [float("-inf")] * 2
    assert (one * float("nan")).isnan().all().item()


def test_a_program_for_each_kind_of_call() -> None:
    x = torch.randn(5, 7, device="dynaxla")
    torch.softmax(x, 1)
    with dynaxla.recorder().expect(compiles=0):
        torch.softmax(x.clone(), 1)
    with dynaxla.recorder().expect(compiles=1):
        torch.softmax(x, 0)


def test_devices_are_not_mixed() -> None:
    x = torch.ones(2, device="dynaxla")
    with pytest.raises(RuntimeError, match="at least two devices, dynaxla:0 and cpu!"):
        x + torch.ones(2)
    with pytest.raises(RuntimeError, match="at least two devices, dynaxla:0 and cpu!"):
        torch.nn.functional.linear(torch.ones(1, 2), x[None])
    with pytest.raises(RuntimeError, match="at least two devices, dynaxla:0 and cpu!"):
        torch.cat([x, torch.ones(2)])
    with pytest.raises(RuntimeError, match="at least two devices, dynaxla:0 and cpu!"):
        torch.tensor(1.0).add_(x.sum())
    with pytest.raises(RuntimeError, match="at least two devices, dynaxla:0 and cpu!"):
        torch.add(x, x, out=torch.empty(2))
    assert (x + torch.tensor(1.0)).tolist() == [2, 2]
    assert x[torch.tensor([1, 0])].tolist() == [1, 1]


def test_the_host_takes_what_has_no_program(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 0.0]], device="dynaxla")
    before = dynaxla.read_metrics().host_ops.get("aten.nonzero.default", 0)
    with caplog.at_level(logging.WARNING, "dynaxla"):
        found = torch.nonzero(x)
        torch.nonzero(x)
    assert found.device.type == "dynaxla"
    assert found.tolist() == [[0, 1], [1, 0]]
    assert dynaxla.read_metrics().host_ops["aten.nonzero.default"] == before + 2
    assert len([r for r in caplog.records if "aten.nonzero.default" in r.getMessage()]) <= 1
    assert any("aten.nonzero.default" in line for line in dynaxla.read_metrics().fallbacks)
    assert x[x > 0].tolist() == [1, 2]
    x[x > 1] = 5
    assert x.tolist() == [[0, 1], [5, 0]]


def _bump(x: torch.Tensor) -> None:
    x.add_(10)


def test_the_host_writes_where_views_lie() -> None:
    base = torch.arange(6.0, device="dynaxla")
    view = base[1:5].view(2, 2)
    torch.library.define("dynaxla_tests::bump", "(Tensor(a!) x) -> ()")
    torch.library.impl("dynaxla_tests::bump", "cpu", _bump)
    torch.ops.dynaxla_tests.bump(view)
    assert base.tolist() == [0, 11, 12, 13, 14, 5]


def test_eagers_errors() -> None:
    x = torch.ones(2, 3, device="dynaxla")
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        x @ x
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.sum(5)
    with pytest.raises(RuntimeError, match="input is not positive-definite"):
        torch.linalg.cholesky(torch.zeros(2, 2, device="dynaxla"))


def test_lists_of_tensors_are_one_program() -> None:
    xs = [torch.randn(n, 2) for n in (1, 2, 3)]
    theirs = [x.to("dynaxla") for x in xs]
    with dynaxla.recorder().expect(compiles=1):
        torch._foreach_add_(theirs, 1.5)
        torch._foreach_add_(theirs, 2.5)
    torch._foreach_add_(xs, 4.0)
    for mine, its in zip(theirs, xs, strict=True):
        assert_close(mine.cpu(), its)
    twice = torch.ones(2, device="dynaxla")
    torch._foreach_mul_([twice, twice], 2.0)
    assert twice.tolist() == [4, 4]


def test_attention_and_norms() -> None:
    q = torch.randn(2, 4, 5, 8)
    mine = torch.nn.functional.scaled_dot_product_attention(*[q.to("dynaxla")] * 3, is_causal=True)
    assert_close(mine.cpu(), torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True))
    here, there = torch.nn.BatchNorm2d(4), torch.nn.BatchNorm2d(4).to("dynaxla")
    for _ in range(2):
        assert_close(there(q.to("dynaxla")).detach().cpu(), here(q).detach())
    assert_close(there.running_var.cpu(), here.running_var)
    assert there.num_batches_tracked.item() == 2


def test_a_clone_costs_nothing_until_it_is_written() -> None:
    x = torch.ones(1000, device="dynaxla")
    held = torch.dynaxla.memory_allocated()
    y = x.clone()
    assert torch.dynaxla.memory_allocated() == held
    y.mul_(2)
    assert torch.dynaxla.memory_allocated() == held + 4000
    assert (x.sum().item(), y.sum().item()) == (1000, 2000)


def test_warnings_of_torch_stay() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.ones(2, device="dynaxla").add_(1)


def test_an_op_whose_sizes_vary_is_named_once() -> None:
    seen = OpRecompileWarnings()

    def noted(sizes: tuple[int, ...], dtype: torch.dtype, number: float = 0.5) -> str:
        call = OpInvocation(FunctionalForm.of(torch.ops.aten.clamp.default), {})
        call.read((torch.empty(sizes, dtype=dtype, device="dynaxla"), number), {})
        return "".join(map(str, seen.notices(call)))

    for size in range(2, EXPECTED + 2):
        assert noted((size, 3), torch.float32, size / 7) == ""
        assert noted((size, 3), torch.float64) == noted((size,), torch.float32) == ""
    text = noted((3, 50), torch.float32)
    assert text.startswith(f"aten.clamp.default has {EXPECTED + 1} programs: one for each set of sizes")
    assert "test_ops.py:" in text
    assert noted((3, 51), torch.float32) == noted((3, 51), torch.float64) == ""


def test_the_report_names_ops_whose_sizes_vary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaxla.device.shape_generic_key.EXPECTED", 3)
    before = dynaxla.read_metrics().many_programs
    for size in range(41, 47):
        torch.ones(size, device="dynaxla").asinh()
    lines = dynaxla.read_metrics().many_programs[len(before) :]
    (line,) = [line for line in lines if line.startswith("aten.asinh.default has 4 programs")]
    assert "test_ops.py" in line
    assert line in dynaxla.report()


def test_an_encoder_with_a_padding_mask() -> None:
    """The CPU makes a nested tensor of it, which the device has none of."""
    net = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    x, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [3], [1]])
    with torch.no_grad():
        expected = net(x, src_key_padding_mask=padding)
        found = net.to("dynaxla")(x.to("dynaxla"), src_key_padding_mask=padding.to("dynaxla")).cpu()
    torch.testing.assert_close(found[~padding], expected[~padding], rtol=1e-4, atol=1e-4)
