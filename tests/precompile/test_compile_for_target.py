"""Compiling for a TPU that is not here, from Python and from the command line."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import dynaxla
from dynaxla.__main__ import main
from dynaxla.errors import CompileError, OptionError, TargetError, UnsupportedError
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Limits
from dynaxla.precompile.program_report import Compilation, ProgramReport
from dynaxla.runtime import xla
from dynaxla.runtime.executable_info import MemoryUse
from dynaxla.runtime.topologies import PjrtTopology
from dynaxla.targets.chips import TPU_CHIPS
from tests.partition.test_fallback import triple

TARGET = "tpu:v5e:1x1"


def needs_libtpu(test: Any) -> Any:
    """Marks a test that compiles with the TPU compiler."""
    missing = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
    return pytest.mark.tpu(missing(test))


def test_what_torch_compile_is_given_may_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Lightning does, once imported, for every compiled module."""
    compile_it = torch.compile

    def copied(*args: Any, **kwargs: Any) -> Any:
        return compile_it(*args, **copy.deepcopy(kwargs))

    monkeypatch.setattr(torch, "compile", copied)
    assert len(dynaxla.compile_for_target(*mlp(), target="cpu")) > 0


def test_recurrent_layers_are_captured_as_for_the_backend() -> None:
    layer = torch.nn.LSTM(4, 5)
    with torch.no_grad():
        reports = dynaxla.compile_for_target(layer, (torch.randn(3, 2, 4),), target="cpu")
    assert [report.kind for report in reports if report.kind == "program"] == ["program"]


def mlp() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    return torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16)), (
        torch.randn(8, 128),
    )


def conv_net() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 8 * 8, 10),
    )
    return model.eval(), (torch.randn(2, 3, 16, 16),)


class Attention(torch.nn.Module):
    """One block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.inward = torch.nn.Linear(32, 96)
        self.outward = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        q, k, v = self.inward(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + scale * self.outward(mixed.transpose(1, 2).flatten(2))


def attention() -> tuple[torch.nn.Module, tuple[torch.Tensor], dict[str, float]]:
    return Attention().eval(), (torch.randn(2, 16, 32),), {"scale": 0.5}


def no_arguments() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


def arguments_in_a_list() -> tuple[torch.nn.Module, list[torch.Tensor]]:
    return torch.nn.Linear(2, 2), [torch.randn(2, 2)]


def raises() -> None:
    raise ValueError("from inside the factory")


def nothing_to_compile() -> tuple[Any, tuple[int]]:
    return (lambda x: x + 1), (3,)


not_a_function = 3


def _compilation(needed_bytes: int) -> Compilation:
    memory = MemoryUse(
        arguments_bytes=needed_bytes - 10_000_000,
        outputs_bytes=10**6,
        temporaries_bytes=2 * 10**6,
        code_bytes=7 * 10**6,
    )
    chip = TPU_CHIPS["v5e"]
    report = ProgramReport("program 0", 7, 0.25, 0.5, 12.5e9, 3e6, memory, chip, "program", {"x:0": 8}, True)
    return Compilation(TARGET, {}, chip, {}, False, (), (report,), (), ("an op is left to eager",), ())


@needs_libtpu
@pytest.mark.parametrize("factory", [mlp, conv_net, attention])
def test_a_model_compiles_for_a_tpu(factory: Any, recorder: Recorder) -> None:
    model, args, *kwargs = factory()
    with recorder.expect(eager_ops=0):
        reports = dynaxla.compile_for_target(model, args, *kwargs, target=TARGET)
    assert len({report.name for report in reports}) == len(reports) >= 1
    main_report = reports[-1]
    assert main_report.name == "program 0"
    weights = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    for report in reports:
        assert report.ops > 0
        assert report.lowering_s > 0
        assert report.compile_s > 0
        assert report.fits
        assert report.memory.arguments_bytes > 0
        assert report.hbm_bytes == 16 << 30
    assert main_report.flops > 2 * args[0].numel(), "at least one product per element of the input"
    assert main_report.accessed_bytes > args[0].nbytes
    assert main_report.memory.total_bytes < 1000 * (weights + args[0].nbytes)


@needs_libtpu
def test_flops_and_bytes_are_those_of_the_model() -> None:
    (report,) = dynaxla.compile_for_target(*mlp(), target=TARGET)
    products = 2 * 8 * (128 * 256 + 256 * 16)
    assert products <= report.flops <= 1.2 * products
    weights_and_input = 4 * (128 * 256 + 256 + 256 * 16 + 16 + 8 * 128)
    assert weights_and_input <= report.memory.arguments_bytes <= 2 * weights_and_input
    assert report.accessed_bytes >= weights_and_input


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def long_rows(length: int) -> list[torch.Tensor]:
    """Queries of sixteen heads, keys and values of eight, in bfloat16."""
    return [torch.empty(1, heads, length, 128, dtype=torch.bfloat16, device="meta") for heads in (16, 8, 8)]


@needs_libtpu
def test_attention_makes_no_array_of_queries_by_keys() -> None:
    """By a kernel: what is left is one number for each query in all lanes, and the layout of its results."""
    length = 4096
    (report,) = dynaxla.compile_for_target(attend, long_rows(length), target=TARGET)
    assert report.memory.temporaries_bytes < 16 * length * 128 * 4 * 1.1
    assert report.accessed_bytes < 16 * length * length


@needs_libtpu
@pytest.mark.long
def test_gradients_of_attention_make_none_either() -> None:
    length = 4096
    given = [each.requires_grad_() for each in long_rows(length)]
    _, backward = dynaxla.compile_for_target(attend, given, target=TARGET, train=True)
    assert backward.memory.temporaries_bytes < 16 * length * length
    assert backward.accessed_bytes < 16 * length * length * 4


@needs_libtpu
@pytest.mark.long
def test_gradients_of_a_linear_layer_merge_no_rows() -> None:
    """197 tokens are no multiple of eight sublanes: rows that are merged with the batch's are copied."""
    layer, x = torch.nn.Linear(128, 256, dtype=torch.bfloat16), torch.empty(4, 197, 128, dtype=torch.bfloat16)
    reports = dynaxla.compile_for_target(layer, (x.requires_grad_(),), target=TARGET, train=True)
    texts = [report.hlo_text() for report in reports if report.hlo_text is not None and report.kind != "weights"]
    assert len(texts) == 2
    assert not any(f"[{4 * 197}," in text for text in texts)


@pytest.mark.parametrize(("platform", "count"), [("tpu", 1), ("cpu", 0), ("cuda", 0)])
def test_xla_keeps_roundings_on_a_tpu_alone(platform: str, count: int) -> None:
    """What it gains is in docs/performance.md; which instructions differ depends on how XLA fuses."""
    options = xla.compile_options([SimpleNamespace(id=0, platform=platform)])
    assert options.env_option_overrides == [("xla_allow_excess_precision", False)] * count


@needs_libtpu
def test_every_graph_and_part_is_compiled_once_and_the_call_goes_on() -> None:
    seen: list[torch.Tensor] = []

    def model(x: torch.Tensor) -> None:
        y = triple(torch.tanh(x)).cos()  # two parts around an op of ours
        torch._dynamo.graph_break()
        for _ in range(3):
            y = y * 2 + 1
        torch._dynamo.graph_break()
        seen.append(y)

    x = torch.randn(4)
    reports = dynaxla.compile_for_target(model, (x,), target=TARGET)
    assert [report.name for report in reports] == ["program 0", "program 1", "program 2"]
    assert seen[0].shape == x.shape


@needs_libtpu
def test_weight_work_is_a_program_of_its_own() -> None:
    model, args = conv_net()
    names = [report.name for report in dynaxla.compile_for_target(model, args, target=TARGET)]
    unfolded = dynaxla.compile_for_target(model, args, target=TARGET, options={"fold_parameters": False})
    assert names == ["program 0 (weights)", "program 0"]
    assert [report.name for report in unfolded] == ["program 0"]


@needs_libtpu
def test_asking_again_compiles_again_however_often() -> None:
    """Dynamo's recompile limit of 8, after which it runs in eager and says nothing, is not this function's."""
    model = torch.nn.Linear(4, 4)
    for _ in range(10):
        assert len(dynaxla.compile_for_target(model, (torch.randn(2, 4),), target=TARGET)) == 1


@needs_libtpu
def test_what_the_tpu_compiler_refuses_is_an_error_after_the_rest_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bytes] = []

    def refuse(self: PjrtTopology, bytecode: bytes, limits: Limits, partitions: int = 1) -> Any:
        tried.append(bytecode)
        raise CompileError(f"program {len(tried)} does not fit")

    monkeypatch.setattr(PjrtTopology, "compile", refuse)
    with pytest.raises(CompileError, match="program 1 does not fit"):
        dynaxla.compile_for_target(lambda x: triple(torch.tanh(x)).cos(), (torch.randn(3),), target=TARGET)
    assert len(tried) == 2
    assert main(["compile", f"{__name__}:mlp", "--target", TARGET]) == 1


@needs_libtpu
def test_errors_come_unwrapped() -> None:
    with pytest.raises(UnsupportedError, match="custom_op"):
        dynaxla.compile_for_target(triple, (torch.randn(3),), target=TARGET, options={"fallback": "error"})
    with pytest.raises(OptionError, match="did you mean 'fallback'"):
        dynaxla.compile_for_target(triple, (torch.randn(3),), target=TARGET, options={"fallbak": "error"})


@pytest.mark.parametrize("target", ["cuda", "tpu", "tpu:", "tpu:v9:1x1", "gpu:v5e:1x1", ""])
def test_no_such_target(target: str) -> None:
    with pytest.raises(TargetError) as caught:
        dynaxla.compile_for_target(*mlp(), target=target)
    assert repr(target) in str(caught.value)
    assert "tpu:v5e:1x1" in caught.value.hint


@needs_libtpu
@pytest.mark.parametrize("target", ["tpu:v5e", "tpu:v5e:99x99", "tpu:v5e:one"])
def test_no_such_topology_of_a_known_generation(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compile", f"{__name__}:mlp", "--target", target])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert repr(target.removeprefix("tpu:")) in said
    assert "v5e:1x1" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        ("tests.precompile.test_compile_for_target", "is not of the form package.module:factory"),
        (":mlp", "is not of the form package.module:factory"),
        ("tests.no_such_module:mlp", "No module named 'tests.no_such_module'"),
        ("tests.precompile.test_compile_for_target:nothing", "has no attribute 'nothing'"),
        ("tests.precompile.test_compile_for_target:not_a_function", "is no function, but int"),
        ("tests.precompile.test_compile_for_target:no_arguments", "must give (model, args) or (model, args, kwargs)"),
        ("tests.precompile.test_compile_for_target:arguments_in_a_list", "args a tuple"),
    ],
)
def test_bad_factories_are_bad_usage(
    factory: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as caught:
        main(["compile", factory, "--target", TARGET])
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


def test_what_a_factory_raises_is_the_users_own() -> None:
    with pytest.raises(ValueError, match="from inside the factory"):
        main(["compile", f"{__name__}:raises", "--target", TARGET])


@pytest.mark.parametrize(
    "arguments", [[], ["compile"], ["compile", "a:b"], ["run", "a:b", "--target", TARGET]], ids=str
)
def test_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m dynaxla" in capsys.readouterr().err


@needs_libtpu
def test_nothing_to_compile_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", f"{__name__}:nothing_to_compile", "--target", TARGET]) == 1
    assert "has nothing that compiles" in capsys.readouterr().err


@pytest.mark.parametrize(("needed_bytes", "code", "fits"), [(4 << 30, 0, "yes"), (17 << 30, 1, "NO")])
def test_the_table_and_the_exit_code_say_what_fits(
    needed_bytes: int,
    code: int,
    fits: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        "dynaxla.precompile.compile_for_target.compile_and_report", lambda *args: _compilation(needed_bytes)
    )
    assert main(["compile", f"{__name__}:mlp", "--target", TARGET]) == code
    printed = capsys.readouterr().out
    assert f"compiled for {TARGET}" in printed
    for heading in ("program", "sizes", "GFLOP", "MB accessed", "FLOP/B", "bound by", "MB on chip", "of HBM", "fits"):
        assert heading in printed
    row = next(line for line in printed.splitlines() if "program 0" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    least_us = f"{12.5e9 / 197e12 * 1e6:.1f}"
    assert cells[:5] == ["program 0", "x:0=8", "7", "0.25", "0.50"]
    assert cells[5:10] == ["12.5", "3.0", f"{12.5e9 / 3e6:.1f}", least_us, "compute"]
    megabytes, share = f"{needed_bytes / 1e6:.1f}", f"{needed_bytes / (16 << 30):.2%}"
    assert cells[10:] == [f"{needed_bytes / 1e6 - 10:.1f}", "1.0", "2.0", "7.0", megabytes, share, fits]
    assert "an op is left to eager" in printed


@needs_libtpu
def test_the_command_line(tmp_path: Path) -> None:
    """In a process of its own, in the folder of a module that is not installed."""
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef build():\n    return torch.nn.Linear(8, 4), (torch.randn(2, 8),), {}\n"
    )
    command = [sys.executable, "-m", "dynaxla", "compile", "mine:build", "--target", TARGET]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "program 0" in done.stdout
    assert "yes" in done.stdout
