"""Errors in OpenAI's schema: {"error": {"message", "type", "param", "code"}}, and their statuses."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from dynaxla.errors import (
    DeadlineExceeded,
    NotServing,
    QueueFull,
    RequestRejected,
    RequestTooLarge,
)

logger = logging.getLogger("dynaxla")

CLIENT_GONE = 499  # nobody reads it
RETRY_WHEN_STARTING_S = 5
_MOST_EXPLAINED = 2000  # characters
_LONGEST_NAME = 100
_EITHER = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text or a list of texts",
    "content": 'a text, or a list of parts {"type": "text", "text": "..."}: nothing but text is taken',
}
"""Fields that may be of several kinds, of each of which pydantic would say what is wrong."""
_DO_NOT_RETRY = {"x-should-retry": "false"}  # OpenAI's clients else send again what has just taken a deadline's time


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """A response that is an error.

    Attributes:
        status: of HTTP.
        message: for people.
        kind: the "type" of OpenAI's errors.
        param: the field of the request that is to blame.
        code: for programs.
        headers: of the answer.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.document(), self.status, self.headers)


def json_response(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII: a message may quote what UTF-8 has not."""
    body = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return Response(body, status, dict(headers or {}), media_type="application/json")


def invalid(message: str, param: str | None, code: str | None = None) -> ApiError:
    """A request that is wrong in one field."""
    return ApiError(400, message, param=param, code=code)


def api_error_of(error: Exception, prompt_field: str) -> ApiError:
    """The response for an error of the engine.

    Args:
        error: what it raised.
        prompt_field: the field that a prompt is in: "prompt" or "messages".
    """
    match error:
        case ApiError():
            return error
        case RequestTooLarge():
            message = f"the prompt has {error.size} tokens, and this model takes {error.limit} at most; shorten it"
            return invalid(message, prompt_field, "context_length_exceeded")
        case RequestRejected():
            field = "response_format" if error.explanation.startswith("grammar") else None
            return invalid(_sentence(error.explanation, error.hint)[:_MOST_EXPLAINED], field, "rejected")
        case QueueFull():
            headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(429, error.explanation, "rate_limit_error", code="queue_full", headers=headers)
        case NotServing():
            starting = error.state == "starting"
            headers = {"Retry-After": str(RETRY_WHEN_STARTING_S)} if starting else {}
            code = "starting" if starting else "not_serving"
            message = f"the server is {error.state} and takes no requests"  # why is not the client's to read
            return ApiError(503, message, "service_unavailable", code=code, headers=headers)
        case DeadlineExceeded():
            return ApiError(504, error.explanation, "timeout", None, "deadline_exceeded", _DO_NOT_RETRY)
        case _:
            logger.error("the model failed on a request", exc_info=error)
            message = (
                f"the model failed on this request: {type(error).__name__}"  # its text is not the client's to read
            )
            return ApiError(500, message, "server_error", code="model_failed")


def api_error_of_fields(error: ValidationError) -> ApiError:
    """Names the first field that is wrong, and what it should be; never what it was, which may be long."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    names = [str(each)[:_LONGEST_NAME] for each in first["loc"]]
    param = ".".join(names)
    if first["type"] == "extra_forbidden":
        return invalid(f"unknown field: {param}", param, "unknown_parameter")
    if first["type"] == "missing":
        return invalid(f"{param} is missing", param, "missing_required_parameter")
    for index, name in enumerate(names):
        if name in _EITHER:
            param = ".".join(names[: index + 1])
            said = first["msg"].removeprefix("Value error, ") if first["type"] == "value_error" else _EITHER[name]
            return invalid(f"{param}: {said}", param, "invalid_value")
    said = first["msg"].removeprefix("Value error, ")
    return invalid(f"{param}: {said}"[:_MOST_EXPLAINED], param, "invalid_value")


def _sentence(explanation: str, hint: str) -> str:
    return f"{explanation}; {hint}" if hint else explanation
