"""What is malformed, unknown, refused or out of range gets OpenAI's error, which names the field; the connection is kept."""

from __future__ import annotations

import http.client
import json
import socket
import string
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

pytest.importorskip("fastapi")

from dynaxla.serving.http.chat_template import Text
from dynaxla.serving.http.http_errors import ApiError
from dynaxla.serving.http.middleware import MAX_BODY_BYTES
from dynaxla.serving.http.request_schema import IGNORED, REFUSED
from tests.serving.llm.fake import FakeEngine
from tests.serving.llm.served import NAME, Served
from tests.serving.llm.tiny import SPECIALS, TEMPLATE, make_tokenizer

JSON = {"Content-Type": "application/json"}
GOOD = json.dumps({"model": NAME, "prompt": "a"}).encode()
CHAT = {"messages": [{"role": "user", "content": "a"}]}

MALFORMED = [
    b"",
    b"null",
    b"NaN",
    b"[]",
    b"{",
    b'"text"',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"prompt": ' * 20_000 + b"1" + b"}" * 20_000,
    b'{"model": "tiny/model", "prompt": "\xff"}',
    b'{"model": "tiny/model", "prompt": "\\ud800"}',
    b'{"model": "tiny/model", "prompt": "a", "\\udfff": 1}',
    b'{"model": "tiny/model", "prompt": "a", "stop": ["\\ud800"]}',
    b'{"model": "tiny/model", "prompt": "a", "temperature": NaN}',
    b'{"model": "tiny/model", "prompt": "a", "temperature": Infinity}',
    b'{"model": "tiny/model", "prompt": "a", "temperature": 1e999}',
    b'{"model": "tiny/model", "prompt": "a", "max_tokens": ' + b"9" * 400 + b"}",
    b'{"model": "tiny/model", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"model": "tiny/model", "prompt": "a", "prompt": "b"}',
]

WRONG: list[tuple[dict[str, Any], str | None, str]] = [
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": -5}, "max_tokens", "greater than or equal to 1"),
    ({"max_tokens": 1.5}, "max_tokens", "integer"),
    ({"max_tokens": "16"}, "max_tokens", "integer"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": 10**6}, "prompt", "ask for 319"),
    ({"n": 0}, "n", "greater"),
    ({"n": -1}, "n", "greater"),
    ({"n": 129}, "n", "128"),
    ({"n": 100, "prompt": ["a", "b"]}, "n", "128"),
    ({"temperature": -0.1}, "temperature", "greater"),
    ({"temperature": 2.1}, "temperature", "less"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": -1}, "top_p", "greater than 0"),
    ({"top_k": -1}, "top_k", "greater"),
    ({"min_p": 1.5}, "min_p", "less"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"presence_penalty": 3}, "presence_penalty", "less"),
    ({"frequency_penalty": -3}, "frequency_penalty", "greater"),
    ({"seed": 1 << 70}, "seed", ""),
    ({"stop": ""}, "stop", "empty text"),
    ({"stop": ["a", ""]}, "stop", "empty text"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": [5]}, "stop", "a text or a list of texts"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"logprobs": -1}, "logprobs", "greater"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"logprobs": 1, "echo": True}, "echo", "not offered"),
    ({"best_of": 2}, "best_of", "not offered"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "ids of tokens"),
    ({"logit_bias": {"259": 1}}, "logit_bias", "from 0 to 258"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", "less"),
    ({"deadline_s": 0}, "deadline_s", "greater"),
    ({"deadline_s": -1}, "deadline_s", "greater"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": {"x": True}}, "stream_options.x", "unknown"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"suffix": "end"}, "suffix", "refused"),
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "there is none"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": 5}, "prompt", "a text, a list"),
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": ["a", 5]}, "prompt", "a text, a list"),
    ({"prompt": [1, -1]}, "prompt", "from 0 to 258"),
    ({"prompt": [259]}, "prompt", "from 0 to 258"),
    ({"prompt": [10**30]}, "prompt", "from 0 to 258"),
    ({"prompt": "a" * 257}, "prompt", "257 tokens"),
    ({"promt": "a"}, "promt", "is prompt meant"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "needs it"),
    ({"response_format": {"type": "regex", "grammar": "a"}}, "response_format", "needs it"),
    ({"response_format": {"type": "regex", "pattern": "("}}, "response_format", "close it"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}}, None, "dictionary"),
]

WRONG_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": None}, "messages", "missing"),
    ({"messages": "hello"}, "messages", "list"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
    ({"messages": [{"role": "tool", "content": "a", "tool_call_id": "1"}]}, "messages.0.role", "'user'"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "a text, or a list of parts"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages.0.content",
        "nothing but text",
    ),
    ({"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages.0.tool_calls", "unknown"),
    ({"messages": [{"role": "user", "content": "not this"}]}, "messages", "this is not taken"),
    ({"messages": [{"role": "user", "content": "a" * 300}]}, "messages", "tokens"),
    ({"messages": [{"role": "user", "content": "<|end|>\ue000"}]}, "messages", "U+E000"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens", "one of them"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"logprobs": 2}, "logprobs", "boolean"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not offered"),
    ({"tool_choice": "required"}, "tool_choice", "not offered"),
    ({"functions": [{"name": "f"}]}, "functions", "not offered"),
    ({"modalities": ["text", "audio"]}, "modalities", "only text"),
    ({"reasoning_effort": "high"}, "reasoning_effort", "refused"),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as running:
        yield running


class Kept:
    """A client that says whether its connection was kept."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        self._http.connect()
        self._mine = self._http.sock.getsockname()

    def post(self, body: bytes, headers: dict[str, str] = JSON) -> tuple[int, Any]:
        self._http.request("POST", "/v1/completions", body, headers)
        response = self._http.getresponse()
        answer = response.read()
        assert answer.isascii()
        assert self._http.sock is not None, "the server closes the connection"
        assert self._http.sock.getsockname() == self._mine
        return response.status, json.loads(answer)


def _error(document: Any) -> tuple[str, str | None, str | None]:
    assert set(document) == {"error"}
    assert set(document["error"]) == {"message", "type", "param", "code"}
    return document["error"]["message"], document["error"]["param"], document["error"]["code"]


def test_what_is_malformed_is_refused_and_the_connection_kept(served: Served) -> None:
    client = Kept(served.port)
    before = len(served.engine.accepted)
    for body in MALFORMED:
        status, answer = client.post(body)
        assert status == 400, body[:50]
        _error(answer)
        assert client.post(GOOD)[0] == 200, body[:50]
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert client.post(GOOD, {"Content-Type": kind})[0] == 415
    status, answer = client.post(b'{"model": "%s"}' % (b"a" * MAX_BODY_BYTES))
    assert (status, _error(answer)[2]) == (413, "body_too_large")
    assert client.post(GOOD)[0] == 200
    assert len(served.engine.accepted) == before + len(MALFORMED) + 1


@pytest.mark.parametrize(("fields", "param", "says"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named(served: Served, fields: dict[str, Any], param: str | None, says: str) -> None:
    _check(served, "completions", {"prompt": "a"} | fields, param, says)


@pytest.mark.parametrize(("fields", "param", "says"), WRONG_CHATS, ids=lambda value: str(value)[:40])
def test_a_wrong_field_of_a_chat_is_named(served: Served, fields: dict[str, Any], param: str, says: str) -> None:
    _check(served, "chat/completions", CHAT | fields, param, says)


def _check(served: Served, path: str, fields: dict[str, Any], param: str | None, says: str) -> None:
    before = len(served.engine.accepted)
    response = served.post(path, **fields)
    message, named, _ = _error(response.json())
    assert response.status_code == 400
    assert says in message
    if param is not None:
        assert named == param
    assert len(message) < 500
    assert len(served.engine.accepted) == before


def test_codes_that_clients_know(served: Served) -> None:
    assert _error(served.post(prompt="a" * 257).json())[2] == "context_length_exceeded"
    assert _error(served.post(prompt="a", max_tokens=400).json())[2] == "context_length_exceeded"
    assert _error(served.post(prompt="a", model="gpt-4").json())[1:] == ("model", "model_not_found")
    assert served.post(prompt="a", model="gpt-4").status_code == 404
    assert _error(served.http.post("/v1/completions", json={"prompt": "a"}).json())[2] == "missing_required_parameter"
    assert _error(served.post(prompt="a", nonsense=1).json())[2] == "unknown_parameter"
    assert _error(served.post("chat/completions", **CHAT, tools=[{}]).json())[2] == "unsupported_parameter"


def test_what_changes_nothing_is_ignored(served: Served) -> None:
    for name in IGNORED:
        assert served.post(prompt="a", **{name: "anything"}).status_code == 200, name
    for name, (neutral, _) in REFUSED.items():
        for value in (*neutral, None):
            assert served.post("chat/completions", **CHAT, **{name: value}).status_code == 200, (name, value)
    every = ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "logprobs", "response_format", "stream_options")
    assert served.post(prompt="a", **dict.fromkeys(every)).status_code == 200, "null is as if it were not there"


def test_other_paths_and_methods(served: Served) -> None:
    assert served.http.get("/v1/completions").status_code == 405
    assert served.http.post("/v1/embeddings", json={}).status_code == 404
    message, _, _ = _error(served.http.get("/nowhere").json())
    assert "/nowhere" in message
    assert served.http.get("/docs").status_code == 404, "which would load scripts from elsewhere"


def test_a_body_in_chunks_is_read_as_far_as_it_may(served: Served) -> None:
    assert served.http.post("/v1/completions", content=iter([GOOD[:9], GOOD[9:]]), headers=JSON).status_code == 200
    with socket.create_connection(("127.0.0.1", served.port), 20) as client:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        client.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(MAX_BODY_BYTES // 0x10000 + 1):
            client.sendall(chunk)
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_a_model_without_a_chat_template() -> None:
    with Served(tokenizer=make_tokenizer(template=None)) as served:
        response = served.post("chat/completions", **CHAT)
        assert (response.status_code, _error(response.json())[2]) == (400, "no_chat_template")
        assert served.post(prompt="a").status_code == 200


@pytest.mark.parametrize("fault", ["{{ 1 // 0 }}", "{{ messages[0].content + 1 }}", "{{ strftime_now(1) }}"])
def test_a_chat_template_that_fails(fault: str) -> None:
    """Not by raise_exception: what it raises is answered in the shape of every error."""
    with Served(tokenizer=make_tokenizer(template=fault)) as served:
        response = served.post("chat/completions", **CHAT)
        assert response.status_code in (400, 500)
        assert _error(response.json())[2] in ("invalid_value", "model_failed")
        assert served.post(prompt="a").status_code == 200


def test_special_tokens_that_a_tokenizer_cannot_be_cut_at() -> None:
    """It begins a text otherwise than what follows a special token, as Llama's and Mistral's do."""
    deltas = {name: token for token, name in enumerate((*SPECIALS, "<unk>", "\u2581", *string.printable))}
    made = Tokenizer(BPE(deltas, [], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    made.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=SPECIALS[0])
    tokenizer.chat_template = TEMPLATE
    text = Text(tokenizer)
    assert text.encode_chat([{"role": "user", "content": "say this"}])
    with pytest.raises(ApiError) as refused:
        text.encode_chat([{"role": "user", "content": "say <|end|> now"}])
    assert refused.value.code == "special_token"


def test_a_key() -> None:
    with Served(FakeEngine(), api_key="secret") as served:
        for headers in (
            {},
            {"Authorization": "Bearer other"},
            {"Authorization": "Basic secret"},
            {"Authorization": "Bearer"},
        ):
            for path in ("completions", "chat/completions"):
                response = served.http.post(f"/v1/{path}", content=GOOD, headers=JSON | headers)
                assert (response.status_code, _error(response.json())[2]) == (401, "invalid_api_key")
            assert served.http.get("/v1/models", headers=headers).status_code == 401
        right = JSON | {"Authorization": "Bearer secret"}
        assert served.http.post("/v1/completions", content=GOOD, headers=right).status_code == 200
        assert served.http.get("/v1/models", headers=right).status_code == 200
        assert [served.http.get(path).status_code for path in ("/", "/ready", "/health", "/metrics")] == [200] * 4
