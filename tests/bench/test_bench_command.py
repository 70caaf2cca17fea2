"""`python -m dynaxla bench`: what it reads, writes, refuses, and its exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaxla.__main__ import main
from dynaxla.bench.backends import BenchBackend
from dynaxla.bench.model_cases import ModelRequest
from dynaxla.bench.records import BenchRecord
from dynaxla.bench.start_process import measure_start
from dynaxla.bench.workloads import load_workload, vary_sizes
from dynaxla.errors import ExecutionError, OptionError

FILE = Path(__file__).parent / "models.py"
LINEAR = "tests.bench.models:make_linear"
FAST = ("--seconds", "0", "--rounds", "2", "--no-starts")


def test_a_run_is_a_table_a_record_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ("--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "deep" / "a.html"))
    backends = ("--backends", "eager", "dynaxla", "dynaxla:fold_parameters=false")
    assert main(["bench", f"{FILE}:make_linear", "tiny-mlp", *backends, *FAST, *files]) == 0
    printed = capsys.readouterr().out
    for text in ("make_linear", "tiny-mlp", "dynaxla:fold_parameters=false", "speed-up", "median, ms", "recompiles"):
        assert text in printed
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["versions"]["torch"] == torch.__version__
    assert {"processor", "cores", "threads", "memory_bytes", "system", "load"} <= document["machine"].keys()
    record = BenchRecord.read(tmp_path / "a.json")
    assert [case.name for case in record.cases] == [f"{FILE}:make_linear", "tiny-mlp"]
    assert [result.name for result in record.cases[0].results] == list(backends[1:])
    assert all(len(result.samples_s) >= 2 for case in record.cases for result in case.results)
    assert "tiny-mlp" in (tmp_path / "deep" / "a.html").read_text()
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "a.json")]) == 0


def test_a_wrong_backend_fails_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(function: Any, **how: Any) -> Any:
        return lambda *args, **kwargs: function(*args, **kwargs) * 1.001

    monkeypatch.setattr(torch, "compile", wrong)
    record = tmp_path / "a.json"
    assert main(["bench", LINEAR, "--backends", "eager", "aot_eager", *FAST, "--json", str(record)]) == 1
    assert "DIFFERS" in capsys.readouterr().out
    assert BenchRecord.read(record).cases[0].results[1].samples_s == []
    assert main(["bench", LINEAR, "--backends", "eager", "aot_eager", *FAST, "--tolerance", "0.01"]) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["tiny-mpl"], "did you mean 'tiny-mlp'?"),
        (["hf:berd"], "did you mean 'bert'?"),
        (["hf:bert,num_hiden_layers=1"], "did you mean 'num_hidden_layers'?"),
        (["hf:bert,dtype=float31"], "did you mean 'float32'?"),
        (["hf:bert,tokens"], "write NAME=VALUE"),
        (["hf:./nothing-here"], "transformers finds no config"),
        ([f"{FILE.with_name('model.py')}:make_linear"], "did you mean 'models.py'?"),
        (["tests.bench.models:make_liner"], "did you mean 'make_linear'?"),
        (["tests.bench.model:make_linear"], "No module named 'tests.bench.model'"),
        (["tests.bench.models:make_nothing"], "must give (model, args)"),
        (["tiny-mlp", "--backends", "eager", "dynxla"], "did you mean 'dynaxla'?"),
        (["tiny-mlp", "--backends", "eager", "dynaxla:bucketting=off"], "did you mean 'bucketing'?"),
        (["tiny-mlp", "--backends", "eager", "dynaxla:bucketing=of"], "did you mean 'off'?"),
        (["tiny-mlp", "--backends", "eager", "device:mode=fusd"], "did you mean 'fused'?"),
        (["tiny-mlp", "--backends", "eager:x=1"], "eager takes none"),
        ([LINEAR, "--vary", "inputs:0=1..8"], "the model has no tensor 'inputs' among its arguments"),
        ([LINEAR, "--vary", "0:0=1,2~3"], "no median of the sizes"),
        ([LINEAR, "--vary", "0:0=1..8", "--requests", "0"], "0 requests are none"),
        (["compare", "a.json"], "compare takes two records, not 1"),
        (["compare", "a.json", "b.json"], "a.json cannot be read"),
        (["compare", str(FILE), str(FILE)], "is no record"),
    ],
)
def test_bad_usage_names_the_nearest(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments, *FAST])
    assert caught.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert expected in said
    assert "Traceback" not in said


def test_what_a_factory_raises_is_the_users_own() -> None:
    with pytest.raises(KeyError, match="the user's own"):
        main(["bench", "tests.bench.models:make_error", *FAST])


@pytest.mark.parametrize(
    ("text", "name", "arguments", "options"),
    [
        ("eager", "eager", {}, {}),
        (
            "dynaxla:bucketing=off,max_executables=3,captures=true",
            "dynaxla",
            {},
            {"bucketing": "off", "max_executables": 3, "captures": True},
        ),
        ("inductor:dynamic=true,mode=max-autotune", "inductor", {"dynamic": True, "mode": "max-autotune"}, {}),
        ("device:target=cpu,mode=fused", "device", {}, {}),
    ],
)
def test_backends_have_options(text: str, name: str, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    found = BenchBackend.parse(text)
    assert (found.name, found.arguments, found.options) == (name, arguments, options)


@pytest.mark.parametrize(
    ("text", "low", "high"), [("0:0=2..64", 2, 64), ("0:0=2..64~8", 2, 64), ("0:0=2,5", 2, 5)], ids=str
)
def test_sizes_are_drawn_the_same_each_time(text: str, low: int, high: int) -> None:
    workload = load_workload(LINEAR)
    drawn, again = (vary_sizes(workload, [text], 40) for _ in range(2))
    sizes = [each["0:0"] for each in drawn.sizes]
    assert [args[0].shape for args, _ in drawn.calls] == [(size, 4) for size in sizes]
    assert (drawn.sizes, min(sizes) >= low, max(sizes) <= high) == (again.sizes, True, True)
    assert len(set(sizes)) > 1
    with pytest.raises(OptionError, match="outside of the sizes"):
        vary_sizes(workload, ["0:0=8..64"], 1)


HF = "vocab_size=60,num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=16"
VIT = "num_hidden_layers=1,hidden_size=16,num_attention_heads=2,intermediate_size=16,image_size=32,patch_size=16"


@pytest.mark.parametrize(
    ("text", "kind", "shapes"),
    [
        (f"hf:bert,{HF},batch=2,tokens=8", "BertModel", {"input_ids": (2, 8)}),
        (f"hf:llama,{HF},num_key_value_heads=1,tokens=8", "LlamaForCausalLM", {"input_ids": (1, 8)}),
        (f"hf:vit,{VIT},batch=3", "ViTForImageClassification", {"pixel_values": (3, 3, 32, 32)}),
        (f"hf:bert,{HF},head=AutoModelForMaskedLM", "BertForMaskedLM", {"input_ids": (1, 128)}),
        (
            "hf:t5,d_model=16,d_kv=8,d_ff=16,num_layers=1,num_heads=2,tokens=8",
            "T5Model",
            {"input_ids": (1, 8), "decoder_input_ids": (1, 8)},
        ),
    ],
)
def test_configs_of_transformers_are_models_with_inputs(text: str, kind: str, shapes: dict[str, Any]) -> None:
    workload = load_workload(text)
    ((args, kwargs),) = workload.calls
    assert (type(workload.function).__name__, args) == (kind, ())
    assert {name: tuple(tensor.shape) for name, tensor in kwargs.items()} == shapes
    with torch.no_grad():
        workload.function(**kwargs)
    assert load_workload(text, train=True).function.training  # type: ignore[attr-defined]


def test_a_config_may_be_a_folder(tmp_path: Path) -> None:
    from transformers import BertConfig

    BertConfig(vocab_size=60, num_hidden_layers=1, hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path)
    assert "BertModel" in load_workload(f"hf:{tmp_path},tokens=8").about


def test_starts_have_processes_of_their_own(tmp_path: Path) -> None:
    """A first process compiles, a second one loads, and each says what memory it took."""
    first, second = (measure_start(ModelRequest(LINEAR).to_text(), "dynaxla", tmp_path, again=2) for _ in range(2))
    assert (first.compiled, first.loaded, second.compiled, second.loaded) == (1, 0, 0, 1)
    for start in (first, second):
        assert start.own_process
        assert start.peak_bytes >= start.before_bytes > 50_000_000
        assert len(start.again_s) == 2
        assert sum(start.stages.values()) == pytest.approx(start.seconds, rel=0.2)
    assert second.stages["compile"] == 0


def test_a_start_that_fails_is_a_failure_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="the user's own"):
        measure_start(ModelRequest("tests.bench.models:make_error").to_text(), "eager", tmp_path)
