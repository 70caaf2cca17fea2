"""`python -m dynaxla serve --tensor-parallel 4` in processes of its own: answers are eager's, a later one compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynaxla.isolation.disk import CACHE_VARIABLE
from tests.serving.llm.small import SETTINGS, build, letters, prompts

ROOT = Path(__file__).parents[3]
LENGTHS, TOKENS = (5, 11, 20), 12

_SERVED = """
import argparse, json, sys
import dynaxla
from prometheus_client import CollectorRegistry
from dynaxla.serving.http import model_loading
from dynaxla.serving.http.serve import find_source
from dynaxla.serving.llm.requests import SamplingParams
from dynaxla.serving.llm.serve_command import add_arguments
from tests.serving.llm.small import prompts
from tests.serving.llm.test_tensor_parallel import LENGTHS, TOKENS

parser, registry = argparse.ArgumentParser(), CollectorRegistry()
add_arguments(parser)
given = parser.parse_args([sys.argv[1], "--tensor-parallel", "4", "--slots", "2", "--room", "64"])
engine, _ = model_loading.make_engine(find_source(given.model, None, None), given, registry)
with engine:
    engine.wait_until_ready()
    ready = dynaxla.read_metrics()
    streams = [engine.submit(each, SamplingParams(temperature=0, max_tokens=TOKENS)) for each in prompts(*LENGTHS)]
    answers = [[each.token for delta in stream.deltas() for each in delta.chosen] for stream in streams]
    late = dynaxla.read_metrics()
print(json.dumps({
    "answers": answers,
    "compiles": ready.compiles,
    "late": late.compiles + late.loads - ready.compiles - ready.loads,
    "bytes": registry.get_sample_value("llm_kv_cache_bytes"),
}))
"""


@pytest.mark.long
@pytest.mark.timeout(1300)
def test_a_served_model_is_split(tmp_path: Path) -> None:
    model = build("llama", num_key_value_heads=4)
    model.save_pretrained(tmp_path / "model")
    letters().save_pretrained(tmp_path / "model")
    expected = []
    for prompt in prompts(*LENGTHS):
        ids = torch.tensor([prompt])
        answer = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)[0, len(prompt) :].tolist()
        expected.append(answer[: answer.index(0)] if 0 in answer else answer)
    cache = str(tmp_path / "cache")
    for start in ("first", "later"):
        done = subprocess.run(
            [sys.executable, "-c", _SERVED, str(tmp_path / "model")],
            env={**os.environ, CACHE_VARIABLE: cache},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["answers"] == expected, start
        assert found["late"] == 0, "programs are ready before the first request"
        assert (found["compiles"] == 0) == (start == "later")
        heads, dim, positions = 4, 8, SETTINGS.max_seq_len + 1
        assert found["bytes"] == 2 * 2 * 2 * heads * dim * positions * 4 / 4, "keys and values, of 2 layers and 2 slots"
