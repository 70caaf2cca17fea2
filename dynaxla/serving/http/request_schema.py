"""Reads the body of a request: OpenAI's fields that are supported, ignored (they change no answer here), or refused."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from starlette.requests import Request

from dynaxla.serving.http.http_errors import ApiError, api_error_of_fields, invalid
from dynaxla.serving.llm.requests import Grammar

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1000
MAX_LOGIT_BIASES = 300
MAX_CHOICES = 128
MAX_MESSAGES = 2048
MAX_DEADLINE_S = 3600.0
_SEED_BITS = 63

IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options "
    "prediction parallel_tool_calls".split()
)
"""Fields of OpenAI's clients that change no answer of this server."""

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), "tools are not offered"),
    "tool_choice": (("none", "auto"), "tools are not offered"),
    "functions": (([],), "functions are not offered"),
    "function_call": (("none", "auto"), "functions are not offered"),
    "modalities": ((["text"],), "only text is made"),
    "audio": ((), "only text is made"),
    "web_search_options": ((), "nothing is searched"),
    "moderation": ((), "nothing is moderated"),
    "reasoning_effort": (("none",), "the model has no effort to choose"),
    "verbosity": (("medium",), "the model has no verbosity to choose"),
    "suffix": (("",), "only the end of a text is written, not its middle"),
}
"""Unsupported fields that would change the answer: the values that have no effect, and why any other is refused."""

NonNegative = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fields = TypeVar("Fields", bound="CommonFields")


class StrictModel(BaseModel):
    """Base of schemas: no conversions between types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against who counts bytes on the way: changes no text, and none is sent


class JSONSchema(StrictModel):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None  # the grammar enforces the schema in any case


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema", "regex", "lark"]
    json_schema: JSONSchema | None = None
    pattern: str | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> Self:
        needs = {"json_schema": "json_schema", "regex": "pattern", "lark": "grammar"}
        for kind, name in needs.items():
            if (getattr(self, name) is not None) != (self.type == kind):
                raise invalid(f'"{name}" belongs to the type "{kind}", which needs it', "response_format")
        return self

    def as_grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.json_schema is not None:
            schema = self.json_schema.json_schema
            return Grammar("json") if schema is None else Grammar("json_schema", json.dumps(schema, allow_nan=False))
        if self.type == "json_object":
            return Grammar("json")
        return Grammar(self.type, self.pattern or self.grammar or "")


class CommonFields(StrictModel):
    """The fields of both kinds of completions."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: Finite = Field(default=1.0, ge=0, le=2)
    top_p: Finite = Field(default=1.0, gt=0, le=1)
    top_k: NonNegative = 0
    min_p: Finite = Field(default=0.0, ge=0, le=1)
    repetition_penalty: Finite = Field(default=1.0, gt=0, le=10)
    presence_penalty: Finite = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: Finite = Field(default=0.0, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(1 << _SEED_BITS), lt=1 << _SEED_BITS)
    stop: str | list[str] = Field(default_factory=list)
    ignore_eos: bool = False
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        default=None, max_length=MAX_LOGIT_BIASES
    )
    response_format: ResponseFormat | None = None
    deadline_s: Finite | None = Field(default=None, gt=0, le=MAX_DEADLINE_S)

    @field_validator("stop")
    @classmethod
    def _some_texts(cls, stop: str | list[str]) -> list[str]:
        texts = [stop] if isinstance(stop, str) else stop
        if not all(texts):
            raise ValueError("an empty text would end every answer")
        if len(texts) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_CHARACTERS for text in texts):
            raise ValueError(f"at most {MAX_STOP_STRINGS} texts of at most {MAX_STOP_CHARACTERS} characters")
        return texts

    @field_validator("logit_bias")
    @classmethod
    def _by_token(cls, bias: dict[str, float] | None) -> dict[str, float] | None:
        if any(not (token.isascii() and token.isdigit() and len(token) < 10) for token in bias or {}):
            raise ValueError("the names are ids of tokens, in digits")
        return bias

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options are for stream=true", "stream_options")
        return self

    @property
    def sends_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(CommonFields):
    """The body of POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool = False
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: int | None = None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.best_of not in (None, self.n):
            raise invalid("best_of other than n is not offered: nothing is made that is not sent", "best_of")
        if self.echo and self.logprobs is not None:
            raise invalid("echo with logprobs is not offered: the prompt's tokens have none", "echo")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """The texts, or tokens, to go on from."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [each for each in self.prompt if not isinstance(each, int)]


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class ChatMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def as_template_takes_it(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role  # the newer name of the same
        return {"role": role, "content": text} | ({"name": self.name} if self.name is not None else {})


class ChatRequest(CommonFields):
    """The body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs=true", "top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens is the older name of max_completion_tokens: give one of them", "max_tokens")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def read_fields(kind: type[Fields], document: Mapping[str, Any]) -> Fields:
    """Validates the fields of a request.

    Args:
        kind: of request.
        document: a body; a field that is null counts as missing.

    Raises:
        ApiError: a field is unknown, refused, missing or wrong; it says which.
    """
    given = {name: value for name, value in document.items() if value is not None and name not in IGNORED}
    for name in [name for name in given if name in REFUSED and name not in kind.model_fields]:
        neutral, reason = REFUSED[name]
        if given.pop(name) not in neutral:
            raise invalid(f"{name} is refused: {reason}", name, "unsupported_parameter")
    for name in given:
        if name not in kind.model_fields:
            raise _unknown(name, kind)
    if "messages" in given:
        given["messages"] = _without_nulls(given["messages"])
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise api_error_of_fields(error) from None


def _unknown(name: str, kind: type[CommonFields]) -> ApiError:
    near = difflib.get_close_matches(name[:100], kind.model_fields, 1)
    hint = f"; is {near[0]} meant?" if near else ""
    return invalid(f"unknown field: {name[:100]}{hint}", name[:100], "unknown_parameter")


def _without_nulls(messages: object) -> object:
    """Clients send back the messages they got, with tool_calls, refusal and others that are null."""
    if not isinstance(messages, list):
        return messages
    return [
        {name: value for name, value in message.items() if value is not None and name not in ("refusal", "annotations")}
        if isinstance(message, dict)
        else message
        for message in messages
    ]


async def read_json(request: Request) -> dict[str, Any]:
    """The object that is a request's body.

    Raises:
        ApiError: it is not declared as JSON, no JSON in UTF-8, no object, or holds half a surrogate pair.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # which a page of another site cannot send without CORS
        raise ApiError(415, "send a body of Content-Type: application/json", code="unsupported_media_type")
    return parse_json(await request.body())


def parse_json(body: bytes) -> dict[str, Any]:
    """The object that is written there; see `read_json`."""
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
        # An escape can spell half a surrogate pair, which is no character: tokenizers and UTF-8 have no use for it.
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError:
        raise invalid("the body is no UTF-8", None, "invalid_json") from None
    except UnicodeEncodeError:
        raise invalid("half a surrogate pair is no character", None, "invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deep", None, "invalid_json") from None
    except ValueError as error:
        raise invalid(f"the body is no JSON: {error}", None, "invalid_json") from None
    if not isinstance(document, dict):
        raise invalid("the body is no JSON object", None, "invalid_json")
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found
