"""An exception that nobody expected, raised in every stage: eager's results, a reason, the traceback, a script; or an error."""

from __future__ import annotations

import logging
import re
import runpy
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch._dynamo.exc import RestartAnalysis

import dynaxla.backend
import dynaxla.lowering.torch_mlir_lowering
import dynaxla.partition.part_runner
import dynaxla.pipeline
import dynaxla.programs.part_graphs
from dynaxla.async_compile.part_client import PartCompileClient
from dynaxla.diagnostics import ReasonId
from dynaxla.errors import TargetError, UnsupportedError
from dynaxla.lowering.lowering_worker import LoweringWorker
from dynaxla.observe.recorder import Recorder
from dynaxla.passes import batch_norm_folding, metadata_mutations, output_aliases
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.runtime.pjrt_clients import CpuClient
from dynaxla.runtime.weight_residency import WeightResidency
from tests.async_compile.ended import jobs
from tests.tolerances import assert_close

pytestmark = [pytest.mark.faulty, pytest.mark.usefixtures("nothing_lowered")]

STAGES: dict[str, tuple[object, str]] = {
    "a graph": (dynaxla.backend, "choose_policies"),
    "a graph, partitioned": (dynaxla.backend, "partition_saving_padded"),
    "a graph, its forward": (metadata_mutations, "keep_views_of_moved_inputs"),
    "a captured graph": (output_aliases, "split_aliases"),
    "a captured graph, rewritten": (batch_norm_folding, "fold_batch_norms"),
    "a captured graph, cut": (dynaxla.partition.part_runner, "partition"),
    "a captured graph, planned": (dynaxla.programs.part_graphs, "make_bucket_scheme"),
    "a part, padded": (dynaxla.programs.part_graphs, "pad_graph"),
    "a part, specialized": (dynaxla.programs.part_graphs, "specialize"),
    "a part, imported": (dynaxla.lowering.torch_mlir_lowering, "import_calls"),
    "a part, lowered": (LoweringWorker, "lower"),
    "a part, linked": (dynaxla.pipeline, "link"),
    "a part, compiled": (CpuClient, "compile"),
    "a part, given its weights": (WeightResidency, "buffers"),
}


class Oops(Exception):
    """No error that any stage expects."""


def _break(stage: str, patch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    patch.setattr(*STAGES[stage], fail)


def _step(function: Callable[..., Any], net: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    net.zero_grad()
    result = function(x)
    result.square().sum().backward()
    return [result.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_in_eager(
    stage: str, monkeypatch: pytest.MonkeyPatch, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    _break(stage, monkeypatch, Oops("a fault"))
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    compiled = torch.compile(net, backend="dynaxla", dynamic=True)
    known = len(recorder.snapshot().fallbacks)
    with caplog.at_level(logging.WARNING, logger="dynaxla"):
        for rows in (5, 7):
            x = torch.randn(rows, 3)
            for actual, expected in zip(_step(compiled, net, x), _step(net, net, x), strict=True):
                assert_close(actual, expected)
    noted = recorder.snapshot().fallbacks[known:]
    assert noted
    for line in noted:
        assert line.startswith(f"{stage.partition(',')[0]} of ")
        assert f"{ReasonId.INTERNAL_ERROR.value}; Oops: a fault; " in line
        repro = re.search(r"repro: (\S+)$", line)
        assert repro is not None
        with open(repro[1]) as script:
            assert "Oops: a fault" in script.read()
    logged = [record for record in caplog.records if record.name == "dynaxla"]
    assert [record.getMessage() for record in logged] == list(noted)
    assert all(record.exc_info is not None and record.exc_info[0] is Oops for record in logged)


@pytest.mark.parametrize("stage", STAGES)
def test_fallback_error_raises_it(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _break(stage, monkeypatch, Oops("a fault"))
    net = torch.nn.Linear(3, 4)
    compiled = torch.compile(net, backend="dynaxla", dynamic=True, options={"fallback": "error"})
    with pytest.raises(UnsupportedError) as caught:
        _step(compiled, net, torch.randn(5, 3))
    (reason,) = caught.value.reasons
    assert reason.id is ReasonId.INTERNAL_ERROR


@pytest.mark.parametrize("stage", STAGES)
def test_an_input_is_written_to_once(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _break(stage, monkeypatch, Oops("a fault"))

    def model(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        x[1:].add_(w)
        return x * 2

    compiled = torch.compile(model, backend="dynaxla", dynamic=True)
    for rows in (600, 700):  # large enough to be written in place
        given, w = torch.randn(rows, 512), torch.randn(512)
        reference = given.clone()
        with torch.no_grad():
            assert_close(compiled(given, w), model(reference, w))
        assert_close(given, reference)


def test_a_draw_in_eager_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5), backend="dynaxla")
    torch.manual_seed(1)
    expected = compiled(torch.ones(32))
    torch._dynamo.reset()
    _break("a part, compiled", monkeypatch, Oops("a fault"))
    torch.manual_seed(1)
    assert torch.equal(compiled(torch.ones(32)), expected)


@pytest.mark.parametrize("stage", ["a graph", "a captured graph"])
@pytest.mark.parametrize("error", [TargetError("there is no such device")])
def test_an_error_for_the_user_passes(stage: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    _break(stage, monkeypatch, error)
    with pytest.raises(TargetError):
        torch.compile(torch.sin, backend="dynaxla")(torch.randn(3))


def test_dynamo_captures_anew_where_it_wants_to(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    choose, calls = dynaxla.backend.choose_policies, []

    def restart_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise TensorifyScalarRestartAnalysis
        return choose(*args, **kwargs)

    assert issubclass(TensorifyScalarRestartAnalysis, RestartAnalysis)
    monkeypatch.setattr(dynaxla.backend, "choose_policies", restart_once)
    with recorder.expect(compiles=1, eager_ops=0):
        x = torch.randn(3)
        assert_close(torch.compile(torch.sin, backend="dynaxla")(x), x.sin())


def test_a_program_that_is_compiled_behind_the_calls(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="dynaxla", dynamic=True)
    compiled(torch.randn(4))
    dynaxla.freeze(compiled, on_miss="background")

    def fail(*_: object) -> None:
        raise Oops("a fault")

    monkeypatch.setattr(PartCompileClient, "accept", fail)
    with caplog.at_level(logging.WARNING, logger="dynaxla"), jobs(1):
        x = torch.randn(40)
        assert_close(compiled(x), x.sin() + 1)
    (record,) = [r for r in caplog.records if r.name == "dynaxla"]
    assert "without a program of their own: a fault" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize("stage", ["a graph", "a captured graph", "a part, compiled"])
def test_the_script_shows_the_fault(stage: str, monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    _break(stage, monkeypatch, Oops("a fault"))
    compiled = torch.compile(lambda x, n: (x.t() * n).sum(0).long() + 1, backend="dynaxla", dynamic=True)
    compiled(torch.randn(4, 6), 3)
    script = recorder.snapshot().fallbacks[-1].rpartition("repro: ")[2]
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match="Oops: a fault"):
        runpy.run_path(script)
    monkeypatch.undo()
    torch._dynamo.reset()
    runpy.run_path(script)


def test_what_autograd_cannot_capture_runs_in_eager(recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.special.zeta(x.abs() + 2, torch.ones(()))

    x = torch.randn(3, requires_grad=True)  # of which there is no derivative, which eager says in the backward only
    assert_close(torch.compile(model, backend="dynaxla")(x).detach(), model(x).detach())
    line = recorder.snapshot().fallbacks[-1]
    assert "the derivative for 'zeta' is not implemented" in line
    assert ReasonId.UNSUPPORTED_CALL.value in line


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: torch._standard_gamma(x.exp()), "shapes it does not know: aten._standard_gamma_grad.default"),
        (lambda x: x.scatter_add(0, torch.zeros(1, dtype=torch.int64), x), "returned an invalid gradient at index 1"),
    ],
)
def test_what_torch_cannot_capture_is_no_bug(
    function: Callable[[torch.Tensor], torch.Tensor], why: str, recorder: Recorder
) -> None:
    compiled, x = torch.compile(function, backend="dynaxla", dynamic=True), torch.randn(5, requires_grad=True)
    torch.manual_seed(0)
    mine = compiled(x)
    line = recorder.snapshot().fallbacks[-1]
    assert why in line
    assert ReasonId.UNSUPPORTED_CALL.value in line
    torch.manual_seed(0)
    assert_close(mine.detach(), function(x).detach())


def test_a_gradient_that_counts_values_runs_in_eager(recorder: Recorder) -> None:
    def fill(x: torch.Tensor, i: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return x.index_fill(0, i, value)

    given = torch.randn(3), torch.tensor([1, 2]), torch.ones((), requires_grad=True)
    result = torch.compile(fill, backend="dynaxla")(*given)
    result.sum().backward()
    assert given[2].grad == 2
    assert_close(result.detach(), fill(*given).detach())
    line = recorder.snapshot().fallbacks[-1]
    assert f"{ReasonId.DATA_DEPENDENT.value}; torch's formula" in line
    assert "aten._unique.default" in line


RESHAPED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "saved": lambda x: x.sin().transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1).square().tanh(),
    "of an input": lambda x: x.transpose(0, 1).reshape(-1, 5).sin().exp(),
    "flattened": lambda x: x.permute(2, 0, 1).exp().flatten(0, 1).tanh().sin(),
}


@pytest.mark.parametrize("name", RESHAPED)
def test_a_backward_in_eager_reads_what_a_program_saved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(RESHAPED[name], backend="dynaxla", dynamic=True)
    for rows in (3, 6):
        gradients = []
        x = torch.randn(rows, 4, 5)
        for function in (compiled, RESHAPED[name]):
            given = x.clone().requires_grad_()
            result = function(given)
            with monkeypatch.context() as patch:
                _break("a part, compiled", patch, Oops("a fault"))
                result.square().sum().backward()
            gradients.append(given.grad)
        assert_close(*gradients)


def test_a_graph_that_eagers_backward_refuses_has_a_reason(recorder: Recorder) -> None:
    def write(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w).sin()
        x.mul_(2)
        return y

    for x in (torch.randn(4, 4), torch.randn(8, 4)[::2]):
        torch._dynamo.reset()
        w, known = torch.randn(4, 4, requires_grad=True), len(recorder.snapshot().fallbacks)
        given, reference = x.clone(), x.clone()
        result = torch.compile(write, backend="dynaxla")(given, w)
        assert_close(result, write(reference, w))
        assert_close(given, reference)
        (line,) = recorder.snapshot().fallbacks[known:]
        assert ReasonId.SIDE_EFFECT.value in line
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_a_graph_that_detaches_what_its_backward_reads_has_a_reason(recorder: Recorder) -> None:
    def detach(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        z = y.sin()
        y.detach_()
        return z

    x = torch.randn(3, requires_grad=True)
    result = torch.compile(detach, backend="dynaxla")(x)
    assert_close(result.detach(), detach(x).detach())
    assert ReasonId.SIDE_EFFECT.value in recorder.snapshot().fallbacks[-1]
    with pytest.raises(RuntimeError, match="detached in-place"):
        result.sum().backward()


def test_a_write_to_as_strided_of_a_view_is_named(recorder: Recorder) -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        x.diagonal().as_strided((2,), (1,), 0).add_(1.0)
        return x

    given = torch.randn(2, 4)
    reference = given.clone()
    assert_close(torch.compile(write, backend="dynaxla")(given), write(reference))
    assert f"{ReasonId.SIDE_EFFECT.value}; it writes to `as_strided`" in recorder.snapshot().fallbacks[-1]


@pytest.mark.parametrize("stage", ["a part, imported", "a part, linked"])
def test_what_eager_refuses_as_well_is_the_callers_error(
    stage: str, monkeypatch: pytest.MonkeyPatch, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    net = torch.nn.Linear(4, 3)
    compiled = torch.compile(net, backend="dynaxla", dynamic=True)
    x = torch.randn(5, 4)
    before = recorder.snapshot().fallbacks
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "dynaxla"):
        _break(stage, patch, Oops())
        patch.setattr(PartGraphs, "run_eager", Mock(side_effect=IndexError("eager's own")))
        with pytest.raises(IndexError, match="eager's own"):
            compiled(x)
    assert recorder.snapshot().fallbacks == before
    with recorder.expect(eager_ops=0):
        assert_close(compiled(x), net(x))


def _write_at(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[i] = 5.0
    return x + 1


@pytest.mark.parametrize("read", [lambda x, i: x[i] * 2, lambda x, i: x * torch.ones(i, 1), _write_at])
def test_a_number_read_out_of_an_input_is_named(
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], recorder: Recorder
) -> None:
    compiled = torch.compile(read, backend="dynaxla")
    known = len(recorder.snapshot().fallbacks)
    for i in (2, 3):
        assert_close(compiled(torch.arange(4.0), torch.tensor(i)), read(torch.arange(4.0), torch.tensor(i)))
    noted = recorder.snapshot().fallbacks[known:]
    assert noted
    assert all(f"{ReasonId.READS_VALUE.value}; an input of no dims is a size or an index" in line for line in noted)
