"""`python -m dynaxla serve` with a real engine, of a tiny Llama with random weights, from its start to SIGTERM under load."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
pytest.importorskip("llguidance")
import httpx
import openai
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dynaxla.serving.http.chat_template import Text
from tests.serving.llm.tiny import END, make_tokenizer

ROOT = Path(__file__).parents[3]
SOON_S = 60.0
START_S = 300.0  # where other work has the processors
ROOM = 96


@dataclass(frozen=True)
class Real:
    process: subprocess.Popen[Any]
    http: httpx.Client
    openai: openai.OpenAI
    model: Any
    text: Text

    def metric(self, line: str) -> float:
        found = re.search(rf"^{re.escape(line)} (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        assert found, line
        return float(found[1])


def _make_model() -> Any:
    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=259,
        num_hidden_layers=1,
        max_position_embeddings=512,
        initializer_range=0.4,
        eos_token_id=END,
        **sizes,
    )
    return LlamaForCausalLM(config).eval()


class Starter:
    """Starts a server, and another where a test has ended it: the order of tests is not this file's to say."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = folder / "log"
        self._model, tokenizer = _make_model(), make_tokenizer()
        self._model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        self._text = Text(tokenizer)
        self._running: Real | None = None

    def running(self) -> Real:
        if self._running is None or self._running.process.poll() is not None:
            self._running = self._start()
        return self._running

    def stop(self) -> None:
        if self._running is not None:
            self._running.process.kill()
            self._running.process.wait()
            self._running.http.close()
            self._running.openai.close()

    def _start(self) -> Real:
        options = ["--name", "tiny", "--port", "0", "--slots", "2", "--room", str(ROOM), "--max-queue", "10"]
        command = [sys.executable, "-m", "dynaxla", "serve", str(self._folder), *options, "--linger-s", "0.5"]
        with self._log.open("w") as log:
            process = subprocess.Popen(command, stderr=log, cwd=ROOT)
        url = _url(process, self._log)
        http = httpx.Client(base_url=url, timeout=SOON_S)
        _until_ready(process, http)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SOON_S)
        return Real(process, http, client, self._model, self._text)


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    made = Starter(tmp_path_factory.mktemp("model"))
    yield made
    made.stop()


@pytest.fixture
def real(starter: Starter) -> Real:
    return starter.running()


def _url(process: subprocess.Popen[Any], log: Path) -> str:
    end = time.monotonic() + START_S
    while not (found := re.search(r"running on (http://\S+)", log.read_text())):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    return found[1]


def _until_ready(process: subprocess.Popen[Any], http: httpx.Client) -> None:
    end = time.monotonic() + START_S
    while (ready := http.get("/ready")).status_code != 200:
        assert ready.json()["state"] == "starting"
        assert time.monotonic() < end
        time.sleep(0.05)


def _greedy(real: Real, prompt: str, count: int) -> list[str]:
    ids = torch.tensor([real.text.encode(prompt)])
    with torch.inference_mode():
        made = real.model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=END)
    tokens = [token for token in made[0, ids.shape[1] :].tolist() if token != END]
    return [real.text.name_of(token) for token in tokens]


def test_greedy_answers_are_those_of_transformers(real: Real) -> None:
    """Prompts of several lengths at once, more than there are slots."""
    prompts = ["a", "Hello", "The quick brown fox", "x" * 40, "1234567890" * 6]

    def ask(prompt: str) -> Any:
        return real.openai.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0, logprobs=0)

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.choices[0].logprobs.tokens == _greedy(real, prompt, 24), prompt
        assert answer.usage.prompt_tokens == len(prompt)


def test_a_stream_is_the_whole_in_parts(real: Real) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "seed": 5, "n": 2}
    chat = real.openai.chat.completions
    whole = chat.create(**asked, max_tokens=30)
    texts = ["", ""]
    usage = None
    for part in chat.create(**asked, max_tokens=30, stream=True, stream_options={"include_usage": True}):
        for choice in part.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = part.usage or usage
    assert texts == [choice.message.content for choice in whole.choices], "a seed decides"
    assert texts[0] != texts[1]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_a_prompt_that_was_there_is_in_the_cache(real: Real) -> None:
    prompt = "once upon a time there was a cache of prefixes, and so on"
    used = [real.openai.completions.create(model="tiny", prompt=prompt, max_tokens=2).usage for _ in range(2)]
    assert used[1] is not None
    assert used[1].prompt_tokens_details is not None
    assert (used[1].prompt_tokens_details.cached_tokens or 0) > len(prompt) // 2


def test_formats_bind_the_answer(real: Real) -> None:
    def ask(given: dict[str, Any]) -> Any:
        chat = real.openai.chat.completions
        messages = [{"role": "user", "content": "a"}]
        return chat.create(model="tiny", messages=messages, response_format=given, seed=3).choices[0]  # type: ignore

    choice = ask({"type": "regex", "pattern": "[a-c]{4}"})
    assert re.fullmatch("[a-c]{4}", choice.message.content)
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    choice = ask({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})
    assert choice.finish_reason == "stop"
    assert list(json.loads(choice.message.content)) == ["yes"]
    with pytest.raises(openai.BadRequestError):
        ask({"type": "regex", "pattern": "("})
    with pytest.raises(openai.BadRequestError):
        ask({"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "nonsense"}}})


def test_faults_leave_it_as_it_was(real: Real) -> None:
    wrong: list[dict[str, Any]] = [
        {"prompt": "a" * ROOM},
        {"max_tokens": -1},
        {"temperature": -1},
        {"n": 0},
        {"model": "b"},
    ]
    for fields in wrong:
        answer = real.http.post("/v1/completions", json={"model": "tiny", "prompt": "a"} | fields)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["message"]
    assert (
        real.http.post("/v1/completions", content=b"{", headers={"Content-Type": "application/json"}).status_code == 400
    )
    # Without ignore_eos a sampled end within the first turn, which began before the deadline, is an answer.
    long = {"model": "tiny", "prompt": "a", "max_tokens": 90, "ignore_eos": True, "deadline_s": 1e-4}
    late = real.http.post("/v1/completions", json=long)
    assert late.status_code == 504
    for _ in range(4):
        stream = real.openai.completions.create(
            model="tiny", prompt="a", max_tokens=90, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        stream.close()
    answer = real.openai.completions.create(model="tiny", prompt="Hello", max_tokens=24, temperature=0, logprobs=0)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == _greedy(real, "Hello", 24)
    for name in ("http_open_requests", "llm_queue_depth"):
        end = time.monotonic() + SOON_S
        while real.metric(name) != 0:
            assert time.monotonic() < end, name
    assert real.metric('llm_requests_total{outcome="expired"}') == 1
    assert real.metric('llm_requests_total{outcome="cancelled"}') == 4
    assert real.metric('llm_requests_total{outcome="failed"}') == 0


def test_a_hundred_at_once_with_a_queue_of_ten(real: Real) -> None:
    fields = {"model": "tiny", "prompt": "a", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    limits, compiles = httpx.Limits(max_connections=100), real.metric("dynaxla_compiles_total")
    with (
        httpx.Client(base_url=real.http.base_url, timeout=SOON_S, limits=limits) as client,
        ThreadPoolExecutor(100) as pool,
    ):
        answers = list(pool.map(lambda _: client.post("/v1/completions", json=fields), range(100)))
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 12
    assert len({answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}) == 1
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers if answer.status_code == 429)
    assert real.metric("dynaxla_compiles_total") == compiles, "nothing is compiled after the warm-up"


def test_the_end_under_load(real: Real) -> None:
    fields = {"model": "tiny", "prompt": "a", "max_tokens": 90, "temperature": 0, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(real.http.post, "/v1/completions", json=fields | {"stream": bool(i % 2)}) for i in range(8)
        ]
        while real.metric("http_open_requests") < 8 and not any(each.done() for each in asked):
            time.sleep(0.005)
        real.process.send_signal(signal.SIGTERM)
        while (ready := real.http.get("/ready")).status_code == 200:
            time.sleep(0.005)
        assert ready.json()["state"] == "leaving"
        answers = [each.result() for each in asked]
    assert [answer.status_code for answer in answers] == [200] * 8
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers[1::2])
    assert len({answer.json()["choices"][0]["text"] for answer in answers[::2]}) == 1
    assert real.process.wait(SOON_S) == 0
