"""A fallback reason names the op and the user's own source line."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaxla.diagnostics import FallbackReason, ReasonId, user_frame
from dynaxla.errors import UnsupportedError

LIBRARY = Path(sysconfig.get_paths()["purelib"]) / "torch" / "nn" / "functional.py"


def _node(trace: str | None) -> torch.fx.Node:
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = trace
    return node


def _reasons(function: Callable[..., object], *args: torch.Tensor, **options: Any) -> tuple[FallbackReason, ...]:
    """Why torch.compile cannot compile all of this function."""
    compiled = torch.compile(function, backend="dynaxla", options={"fallback": "error", **options})
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        pytest.raises(UnsupportedError) as caught,
    ):
        compiled(*args)
    return caught.value.reasons


def test_the_frame_is_the_users_line_innermost_call_last() -> None:
    def positions(x: torch.Tensor) -> torch.Tensor:
        return torch.nonzero(x)  # the op at fault

    def model(x: torch.Tensor) -> torch.Tensor:
        return positions(x * 2)

    reasons = [r for r in _reasons(model, torch.tensor([0.0, 3.0])) if r.op == "aten.nonzero.default"]
    assert [r.id for r in reasons] == [ReasonId.DATA_DEPENDENT]
    line = inspect.getsourcelines(positions)[1] + 1
    assert reasons[0].frame == f"{__file__}:{line} in positions: return torch.nonzero(x)  # the op at fault"
    assert reasons[0].dtypes == ("float32", "int64")


def test_frames_of_libraries_are_passed_over() -> None:
    dropout = torch.nn.Dropout(0.5)

    def model(x: torch.Tensor) -> torch.Tensor:
        return dropout(x) + 1

    (reason,) = _reasons(model, torch.ones(3), rng="eager")
    assert reason.id is ReasonId.RANDOM
    assert reason.frame == f"{__file__}:{inspect.getsourcelines(model)[1] + 1} in model: return dropout(x) + 1"


def test_a_trace_of_libraries_alone_gives_its_innermost_line() -> None:
    outer = f'  File "{LIBRARY.parent}/modules/dropout.py", line 70, in forward\n    return F.dropout(input)\n'
    inner = f'  File "{LIBRARY}", line 1425, in dropout\n    return VF.dropout(input)\n'
    assert user_frame(_node(outer + inner)) == f"{LIBRARY}:1425 in dropout: return VF.dropout(input)"
    own = '  File "/home/me/model.py", line 3, in forward\n    return self.drop(x)\n'
    assert user_frame(_node(own + outer + inner)) == "/home/me/model.py:3 in forward: return self.drop(x)"


def test_a_folder_named_like_a_library_folder_is_not_one() -> None:
    file = f"{sysconfig.get_paths()['purelib']}_of_mine/model.py"
    trace = f'  File "{file}", line 3, in f\n    a(x)\n  File "{LIBRARY}", line 9, in g\n    b(x)\n'
    assert user_frame(_node(trace)) == f"{file}:3 in f: a(x)"


def test_frames_without_source() -> None:
    trace = '  File "<string>", line 2, in f\n  File "/home/me/model.py", line 3, in g\n    return x\n'
    assert user_frame(_node(trace)) == "/home/me/model.py:3 in g: return x"
    assert user_frame(_node('  File "/home/me/model.py", line 3, in g')) == "/home/me/model.py:3 in g"
    assert user_frame(_node('  File "<stdin>", line 1, in <lambda>\n')) == "<stdin>:1 in <lambda>"
    assert user_frame(_node(None)) is None
    assert user_frame(_node("")) is None


def test_code_made_by_exec_has_a_reason_without_a_frame() -> None:
    names: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    exec("import torch\ndef model(x):\n    y = x * 2\n    return torch.nonzero(y)\n", names)
    reason = next(r for r in _reasons(names["model"], torch.ones(3)) if r.op == "aten.nonzero.default")
    assert reason.frame is None, "Dynamo traces nothing of code that has no source file"
    assert " at " not in str(reason)


def test_text_of_a_reason() -> None:
    full = FallbackReason(
        ReasonId.LOWERING_CRASHED,
        "aten.x.default",
        ("float32", "int64"),
        "m.py:3 in f: x",
        "do this",
        "it died",
        "/r.py",
    )
    assert str(full) == (
        "aten.x.default (float32, int64) runs in eager PyTorch: lowering_crashed; it died; at m.py:3 in f: x; do this; "
        "repro: /r.py"
    )
    assert str(FallbackReason(ReasonId.RANDOM, "aten.x.default")) == "aten.x.default runs in eager PyTorch: random"
