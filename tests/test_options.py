"""Options are checked at the first call, before anything is compiled."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaxla.errors import OptionError, TargetError, VersionError
from dynaxla.observe.recorder import Recorder
from dynaxla.options import DEBUG_VARIABLE, MODES, STAGES, DebugOptions, Options


@pytest.mark.parametrize(
    ("written", "nearest"),
    [
        ("fallbak", "fallback"),
        ("excutor", "executor"),
        ("Target", "target"),
        ("matmul_percision", "matmul_precision"),
        ("fold_params", "fold_parameters"),
        ("lowering_timeout", "lowering_timeout_s"),
        ("max_executable", "max_executables"),
    ],
)
def test_an_unknown_option_names_the_nearest(written: str, nearest: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_mapping({written: "eager"}, {})
    assert repr(written) in caught.value.explanation
    assert f"did you mean {nearest!r}?" in caught.value.hint
    assert "debug" not in caught.value.hint, "dumps come from the environment, not from the mapping"


def test_an_option_unlike_any_other_still_lists_the_valid_ones() -> None:
    for written in ("", "zzz", 3):
        with pytest.raises(OptionError, match="Valid: fallback, executor, target"):
            Options.from_mapping({written: 1}, {})  # type: ignore[dict-item]
    with pytest.raises(OptionError, match="unknown option 'debug'"):
        Options.from_mapping({"debug": DebugOptions()}, {})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_executables", True, "takes int, not bool"),
        ("max_executables", 4.0, "takes int, not float"),
        ("max_executables", "4", "takes int, not str"),
        ("max_executables", None, "takes int, not NoneType"),
        ("lowering_timeout_s", True, "takes float, not bool"),
        ("lowering_timeout_s", "5", "takes float, not str"),
        ("fold_parameters", 1, "takes bool, not int"),
        ("fold_parameters", "yes", "takes bool, not str"),
        ("target", 0, "takes str or None, not int"),
        ("target", torch.device("cpu"), "takes str or None, not device"),
        ("fallback", "Eager", "'Eager'"),
        ("fallback", ["eager"], "'eager'"),
        ("executor", None, "None"),
        ("matmul_precision", "medium", "'medium'"),
    ],
)
def test_a_wrong_type_or_choice(name: str, value: object, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_mapping({name: value}, {})
    assert name in caught.value.explanation
    assert expected in caught.value.explanation
    assert caught.value.hint


def test_what_is_given_is_kept() -> None:
    assert Options.from_mapping(None, {}) == Options.from_mapping({}, {}) == Options()
    given = {"fallback": "error", "target": "cuda:1", "lowering_timeout_s": 5, "fold_parameters": False}
    options = Options.from_mapping(given, {})
    assert (options.fallback, options.target, options.lowering_timeout_s, options.fold_parameters) == (
        "error",
        "cuda:1",
        5,
        False,
    )
    assert Options.from_mapping({"target": None, "executor": "eager"}, {}).executor == "eager"


@pytest.mark.parametrize(
    "contradiction",
    [
        {"executor": "eager", "target": "cpu"},
        {"max_executables": 0},
        {"nested_regions": "loop", "fold_parameters": False},
        {"max_executables": -1},
        {"lowering_timeout_s": 0.0},
        {"lowering_timeout_s": -3},
        {"lowering_timeout_s": math.nan},
        {"lowering_timeout_s": math.inf},
    ],
    ids=str,
)
def test_contradictions_and_senseless_numbers(contradiction: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_mapping(contradiction, {})
    for name in contradiction:
        assert name in caught.value.explanation
    assert caught.value.hint


def test_debug_variable() -> None:
    assert DebugOptions.parse("") == DebugOptions()
    assert DebugOptions.parse("dump=/x") == DebugOptions(Path("/x"), frozenset(STAGES))
    expected = DebugOptions(Path("/x"), frozenset({"fx", "hlo"}))
    assert DebugOptions.parse("dump=/x,stages=fx+hlo") == expected
    assert DebugOptions.parse(" stages=hlo+fx , dump=/x,") == expected
    assert Options.from_mapping({}, {DEBUG_VARIABLE: "dump=/x,stages=fx+hlo"}).debug == expected
    assert Options.from_mapping({}, {"OTHER": "dump=/x"}).debug == DebugOptions()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dmp=/x", "did you mean 'dump'?"),
        ("dump=/x,stage=fx", "did you mean 'stages'?"),
        ("dump=/x,stages=fx+stablhlo", "did you mean 'stablehlo'?"),
        ("dump=/x,stages=all", "Valid: passes, fx, torch, stablehlo, hlo"),
        ("dump=/x,stages=", "names no stage"),
        ("stages=fx", "names no folder"),
        ("dump", "names no folder"),
        ("dump=", "names no folder"),
        (",", "names no folder"),
        ("1", "unknown DYNAXLA_DEBUG setting '1'"),
    ],
)
def test_debug_variable_errors(text: str, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_mapping({}, {DEBUG_VARIABLE: text})
    assert expected in str(caught.value)
    assert DEBUG_VARIABLE in str(caught.value)


def test_errors_reach_the_caller_at_the_first_call_before_any_compile(recorder: Recorder) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dynaxla", options={"fallbak": "error"})
    with recorder.expect(graphs=0, compiles=0, folds=0):
        for _ in range(2):
            with pytest.raises(OptionError) as caught:
                compiled(torch.zeros(2))
    assert type(caught.value) is OptionError
    assert str(caught.value).startswith("DX100 unknown option 'fallbak'")
    assert "\n  hint: did you mean 'fallback'?" in str(caught.value)


@pytest.mark.parametrize("options", [{"max_executables": True}, {"executor": "eager", "target": "cpu"}], ids=str)
def test_every_kind_of_option_error_comes_unwrapped(options: dict[str, Any], recorder: Recorder) -> None:
    with recorder.expect(graphs=0, compiles=0), pytest.raises(ValueError, match="DX100"):
        torch.compile(lambda x: x + 1, backend="dynaxla", options=options)(torch.zeros(2))


def test_debug_variable_errors_at_the_first_call(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "stages=fx")
    compiled = torch.compile(lambda x: x + 1, backend="dynaxla")
    with recorder.expect(graphs=0, compiles=0), pytest.raises(OptionError, match="names no folder"):
        compiled(torch.zeros(2))


@pytest.mark.parametrize("mode", MODES)
def test_torchs_modes_are_taken_and_change_nothing(mode: str, recorder: Recorder) -> None:
    x = torch.randn(3)
    with recorder.expect(graphs=1, compiles=1):
        actual = torch.compile(lambda x: x + 1, backend="dynaxla", mode=mode)(x)
    assert torch.equal(actual, x + 1)


def test_an_unknown_mode_names_the_nearest(recorder: Recorder) -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dynaxla", mode="reduce-overheads")
    with recorder.expect(graphs=0, compiles=0), pytest.raises(OptionError) as caught:
        compiled(torch.zeros(2))
    assert "unknown mode 'reduce-overheads'" in caught.value.explanation
    assert "did you mean 'reduce-overhead'?" in caught.value.hint


def test_a_target_that_is_not_here_comes_unwrapped() -> None:
    with pytest.raises(TargetError):
        torch.compile(lambda x: x + 1, backend="dynaxla", options={"target": "nowhere"})(torch.zeros(2))


def test_a_wrong_version_comes_unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise VersionError("torch 1.0 is installed")

    monkeypatch.setattr(importlib.import_module("dynaxla.backend"), "process", fail)
    with pytest.raises(VersionError, match=r"torch 1\.0"):
        torch.compile(lambda x: x + 1, backend="dynaxla")(torch.zeros(2))
