"""The endpoints of /v1: the one model, and its text and chat completions."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dynaxla.serving.http.chat_template import Text
from dynaxla.serving.http.http_errors import CLIENT_GONE, ApiError, api_error_of, json_response
from dynaxla.serving.http.request_parsing import (
    CompletionJob,
    Prompt,
    chat_prompts,
    completion_prompts,
    make_completion_job,
)
from dynaxla.serving.http.request_schema import ChatRequest, CompletionRequest, read_fields, read_json
from dynaxla.serving.http.response_schema import ChatChoice, ChoiceSchema, CompletionChoice
from dynaxla.serving.http.responses import ResponseWriter
from dynaxla.serving.http.sse import EventStream, cancel_on_disconnect
from dynaxla.serving.llm.requests import Engine, Generation

_LONG_TEXT = 20_000  # bytes of a body; longer ones are tokenized in a thread, not in the event loop


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model, and the key that is required to use it."""

    name: str
    api_key: str | None

    def check_key(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError if the key is required and wrong."""
        if self.api_key is None:
            return
        given = headers.get("authorization", "")
        scheme, _, key = given.partition(" ")
        right = hmac.compare_digest(key.strip().encode("utf-8", "replace"), self.api_key.encode())
        if scheme.lower() != "bearer" or not right:
            message = "this server wants its API key: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def check_name(self, name: str) -> None:
        """Raises ApiError if the request names another model."""
        if name != self.name:
            message = f"there is no model {name[:200]!r} here, only {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def document(self, created: int) -> dict[str, Any]:
        return {"id": self.name, "object": "model", "created": created, "owned_by": "dynaxla"}


@dataclass(frozen=True, slots=True)
class CompletionEndpoints:
    """POST /v1/completions and /v1/chat/completions."""

    engine: Engine
    text: Text
    models: ServedModel
    deadline_s: float

    async def create_completion(self, request: Request) -> Response:
        self.models.check_key(request.headers)
        asked = read_fields(CompletionRequest, await read_json(request))
        self.models.check_name(asked.model)
        prompts = await self._run(request, completion_prompts, asked, "prompt")
        with_logprobs = asked.logprobs is not None
        shapes: list[ChoiceSchema] = [
            CompletionChoice(
                index,
                self.text,
                echo=prompts[index // asked.n].text if asked.echo else None,
                with_logprobs=with_logprobs,
            )
            for index in range(len(prompts) * asked.n)
        ]
        return await self._answer(request, asked, prompts, shapes)

    async def create_chat_completion(self, request: Request) -> Response:
        self.models.check_key(request.headers)
        asked = read_fields(ChatRequest, await read_json(request))
        self.models.check_name(asked.model)
        prompts = await self._run(request, chat_prompts, asked, "messages")
        shapes: list[ChoiceSchema] = [
            ChatChoice(index, self.text, with_logprobs=asked.logprobs) for index in range(asked.n)
        ]
        return await self._answer(request, asked, prompts, shapes)

    async def _run(self, request: Request, make: Callable[[Any, Text], Any], asked: Any, field: str) -> Any:
        self.text.check_tokens(map(int, asked.logit_bias or ()), "logit_bias")
        long = len(await request.body()) > _LONG_TEXT
        try:
            return await asyncio.to_thread(make, asked, self.text) if long else make(asked, self.text)
        except Exception as error:  # whatever the model's tokenizer or template raises
            raise api_error_of(error, field) from error

    async def _answer(
        self,
        request: Request,
        asked: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        shapes: list[ChoiceSchema],
    ) -> Response:
        field = "messages" if isinstance(asked, ChatRequest) else "prompt"
        try:
            job = make_completion_job(asked, prompts, self.engine, self.deadline_s)
            generations = await self._submit(job)
            writer = ResponseWriter(job, generations, shapes, self.models.name, field)
            if not asked.stream:
                document = await cancel_on_disconnect(request, writer.whole())
                return Response(status_code=CLIENT_GONE) if document is None else json_response(document)
            events = writer.events(with_usage=asked.sends_usage)
            first = await cancel_on_disconnect(request, events.__anext__())
            return Response(status_code=CLIENT_GONE) if first is None else EventStream(first, events)
        except (
            Exception
        ) as error:  # whatever the model raises is the response to this request, and the connection stays open
            raise api_error_of(error, field) from error

    async def _submit(self, job: CompletionJob) -> list[Generation]:
        """Submits in a thread if there is a grammar, which takes up to seconds to compile."""
        if any(sampling.grammar for sampling_params in job.sampling_params for sampling in sampling_params):
            return await asyncio.to_thread(job.submit, self.engine)
        return job.submit(self.engine)
