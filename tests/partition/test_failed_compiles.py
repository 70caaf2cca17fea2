"""What fails to compile runs in eager PyTorch, or is an error if asked: each of a compile's stages is made to fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaxla import pipeline
from dynaxla.diagnostics import ReasonId
from dynaxla.errors import (
    CompileError,
    CompileTimeout,
    DynaxlaError,
    LinkError,
    LoweringError,
    LoweringTimeout,
    UnsupportedError,
)
from dynaxla.lowering.lowering_choice import LoweringChoice
from dynaxla.lowering.lowering_worker import LoweringWorker
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime.pjrt_clients import CpuClient
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("nothing_lowered")


def _compile(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", options=options)


FAILURES = {
    ReasonId.LOWERING_TIMEOUT: (LoweringWorker, "lower", LoweringTimeout(0.1)),
    ReasonId.LINK_FAILED: (pipeline, "link", LinkError("a body is wrong")),
    ReasonId.COMPILE_FAILED: (CpuClient, "compile", CompileError("XLA refused the program")),
    ReasonId.COMPILE_TIMEOUT: (CpuClient, "compile", CompileTimeout(0.1)),
}


def _break(stage: ReasonId, monkeypatch: pytest.MonkeyPatch) -> DynaxlaError:
    owner, method, error = FAILURES[stage]

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(owner, method, fail)
    if isinstance(error, LoweringError):  # else the ops' bodies would take their place
        monkeypatch.setattr(LoweringChoice, "has_body", lambda choice, node: False)
    return error


@pytest.mark.parametrize("stage", FAILURES, ids=lambda stage: stage.value)
@torch.no_grad()
def test_what_fails_to_compile_runs_in_eager(
    stage: ReasonId, monkeypatch: pytest.MonkeyPatch, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x * 2.5 - 1

    compiled, x = _compile(model), torch.randn(5)
    with monkeypatch.context() as broken, recorder.expect(compiles=0), caplog.at_level(logging.WARNING, "dynaxla"):
        error = _break(stage, broken)
        for _ in range(2):
            assert_close(compiled(x), model(x))
    told = [r.getMessage() for r in caplog.records if r.name == "dynaxla"]
    lines = [line for line in told if not line.startswith("torch-mlir cannot lower a call")]
    assert [line.split(" ", 1)[0] for line in lines] == ["aten.mul.Tensor", "aten.sub.Tensor"]
    for line in lines:
        assert f"runs in eager PyTorch: {stage.value}" in line
        assert error.explanation in line
        assert "in model: return x * 2.5 - 1" in line


@pytest.mark.parametrize("stage", FAILURES, ids=lambda stage: stage.value)
@torch.no_grad()
def test_what_fails_to_compile_is_an_error_if_asked(stage: ReasonId, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found out at the call, after Dynamo's part is done, so nothing wraps the error."""
    _break(stage, monkeypatch)
    with pytest.raises(UnsupportedError) as caught:
        _compile(lambda x: x * 2.5 - 1, fallback="error")(torch.randn(5))
    assert {reason.id for reason in caught.value.reasons} == {stage}


@torch.no_grad()
def test_what_fails_to_compile_between_permuted_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The permutations at the boundary are no ops of the user's: none of them is blamed."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return (x.t() * 2.5).t()

    compiled, x = _compile(model), torch.randn(5, 3).t()
    with monkeypatch.context() as broken:
        _break(ReasonId.COMPILE_FAILED, broken)
        assert_close(compiled(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolutions_that_fail_to_compile_have_eagers_strides(
    memory_format: torch.memory_format, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes write the convolution as one with channels last, which then runs in eager."""

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, torch.ones(4, 3, 3, 3))

    x = torch.randn(2, 3, 8, 9).contiguous(memory_format=memory_format)
    _break(ReasonId.COMPILE_FAILED, monkeypatch)
    made = torch.compile(model, backend="dynaxla", dynamic=dynamic)(x)
    assert_close(made, model(x))
    assert made.stride() == model(x).stride()
