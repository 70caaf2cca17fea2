"""One request's answer, from its generations to the bytes for the client: whole, or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from dynaxla.serving.http.errors import refusal_of
from dynaxla.serving.http.request_parsing import Job
from dynaxla.serving.http.response_schema import Shape, usage
from dynaxla.serving.http.sse import DONE, event, merge
from dynaxla.serving.llm.requests import Chosen, Ended, Generation


@dataclass(slots=True)
class Choice:
    """What has come of one choice."""

    shape: Shape
    text: list[str] = field(default_factory=list)
    chosen: list[Chosen] = field(default_factory=list)
    ended: Ended | None = None


class Answering:
    """Reads generations and writes an answer; for one use.

    Args:
        job: what was asked.
        generations: of the job's choices, in order.
        shapes: of each.
        name: of the model.
        prompt_field: the field that errors of the prompt name.
    """

    def __init__(
        self, job: Job, generations: Sequence[Generation], shapes: Sequence[Shape], name: str, prompt_field: str
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
        choices = [Choice(shape) for shape in self._shapes]
        async with aclosing(merge(self._generations, self._job.deadline_s)) as pieces:
            async for index, piece in pieces:
                choice = choices[index]
                choice.text.append(piece.text)
                choice.chosen.extend(piece.chosen)
                choice.ended = piece.ended
        self._completion_tokens = sum(len(choice.chosen) for choice in choices)
        found = [choice.shape.whole("".join(choice.text), choice.chosen, choice.ended) for choice in choices]
        return self._document(self._shapes[0].kind, found) | {"usage": self._usage()}

    async def events(self, *, with_usage: bool) -> AsyncGenerator[bytes]:
        """The events of a stream. What fails before the first is raised, what fails later is an event, and the last.

        Args:
            with_usage: whether an event before the end tells the tokens that were used.
        """
        begun: set[int] = set()
        nothing = {"usage": None} if with_usage else {}
        try:
            async with aclosing(merge(self._generations, self._job.deadline_s)) as pieces:
                async for index, piece in pieces:
                    shape = self._shapes[index]
                    first = shape.first_part() if index not in begun else None
                    begun.add(index)
                    if first is not None:
                        yield event(self._document(shape.part_kind, [first]) | nothing)
                    self._completion_tokens += len(piece.chosen)
                    if piece.text or piece.chosen or piece.ended:
                        part = shape.part(piece.text, piece.chosen, piece.ended)
                        yield event(self._document(shape.part_kind, [part]) | nothing)
        except Exception as error:  # whatever the model raises is told to the client that reads
            if not begun:
                raise
            yield event(refusal_of(error, self._prompt_field).document())
            return
        if with_usage:
            yield event(self._document(self._shapes[0].part_kind, []) | {"usage": self._usage()})
        yield DONE

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._envelope, "object": kind, "choices": choices}

    def _usage(self) -> dict[str, Any]:
        """Prompts count once, however many choices they have."""
        firsts = self._generations[:: self._job.n]
        prompt_tokens = sum(len(prompt.tokens) for prompt in self._job.prompts)
        cached = sum(each.cached_tokens for each in firsts)
        return usage(prompt_tokens, self._completion_tokens, cached)
