"""The response to one request: a JSON document, or server-sent events (SSE)."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from dynaxla.serving.http.http_errors import api_error_of
from dynaxla.serving.http.request_parsing import CompletionJob
from dynaxla.serving.http.response_schema import ChoiceSchema, usage
from dynaxla.serving.http.sse import DONE, event, merge_streams
from dynaxla.serving.llm.requests import FinishReason, GeneratedToken, Generation


@dataclass(slots=True)
class ChoiceBuffer:
    """The answer of one choice, as far as it has come."""

    shape: ChoiceSchema
    text: list[str] = field(default_factory=list)
    chosen: list[GeneratedToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class ResponseWriter:
    """Reads generations and writes a response; for one use.

    Args:
        job: what was asked.
        generations: of the job's choices, in order.
        shapes: of each.
        name: of the model.
        prompt_field: the field that errors of the prompt name.
    """

    def __init__(
        self,
        job: CompletionJob,
        generations: Sequence[Generation],
        shapes: Sequence[ChoiceSchema],
        name: str,
        prompt_field: str,
    ) -> None:
        self._job = job
        self._generations = generations
        self._shapes = shapes
        self._prompt_field = prompt_field
        self._completion_tokens = 0
        prefix = "cmpl" if shapes[0].kind == "text_completion" else "chatcmpl"
        self._envelope = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

    async def whole(self) -> dict[str, Any]:
        """The document of a whole answer.

        Raises:
            Exception: what a generation raised.
        """
        choices = [ChoiceBuffer(shape) for shape in self._shapes]
        async with aclosing(merge_streams(self._generations, self._job.deadline_s)) as deltas:
            async for index, delta in deltas:
                choice = choices[index]
                choice.text.append(delta.text)
                choice.chosen.extend(delta.chosen)
                choice.finish_reason = delta.finish_reason
        self._completion_tokens = sum(len(choice.chosen) for choice in choices)
        found = [choice.shape.whole("".join(choice.text), choice.chosen, choice.finish_reason) for choice in choices]
        return self._document(self._shapes[0].kind, found) | {"usage": self._usage()}

    async def events(self, *, with_usage: bool) -> AsyncGenerator[bytes]:
        """The events of a stream. An error before the first event is raised, a later one is the last event.

        Args:
            with_usage: whether an event before the end has the usage in tokens.
        """
        begun: set[int] = set()
        nothing = {"usage": None} if with_usage else {}
        try:
            async with aclosing(merge_streams(self._generations, self._job.deadline_s)) as deltas:
                async for index, delta in deltas:
                    shape = self._shapes[index]
                    first = shape.first_delta() if index not in begun else None
                    begun.add(index)
                    if first is not None:
                        yield event(self._document(shape.chunk_object, [first]) | nothing)
                    self._completion_tokens += len(delta.chosen)
                    if delta.text or delta.chosen or delta.finish_reason:
                        part = shape.part(delta.text, delta.chosen, delta.finish_reason)
                        yield event(self._document(shape.chunk_object, [part]) | nothing)
        except Exception as error:  # whatever the model raises becomes the last event
            if not begun:
                raise
            yield event(api_error_of(error, self._prompt_field).document())
            return
        if with_usage:
            yield event(self._document(self._shapes[0].chunk_object, []) | {"usage": self._usage()})
        yield DONE

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._envelope, "object": kind, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        """Prompts count once, however many choices they have."""
        firsts = self._generations[:: self._job.n]
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._job.prompts)
        cached = sum(each.cached_tokens for each in firsts)
        return usage(prompt_tokens, self._completion_tokens, cached)
