"""From the fields of a request to requests of the engine: tokens of prompts, and sampling params of each choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaxla.errors import RequestRejected
from dynaxla.serving.http.chat_template import Text
from dynaxla.serving.http.http_errors import invalid
from dynaxla.serving.http.request_schema import MAX_CHOICES, ChatRequest, CommonFields, CompletionRequest
from dynaxla.serving.llm.requests import Engine, Generation, SamplingParams

_SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt.

    Attributes:
        tokens: for the model.
        text: for an echo; empty where there is none.
    """

    tokens: Sequence[int]
    text: str = ""


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """The requests to the engine for one HTTP request.

    Attributes:
        prompts: at least one.
        sampling_params: of the choices of each prompt.
        n: choices of each prompt.
        deadline_s: seconds that all of it may take.
    """

    prompts: Sequence[Prompt]
    sampling_params: Sequence[Sequence[SamplingParams]]
    n: int
    deadline_s: float

    def submit(self, engine: Engine) -> list[Generation]:
        """Queues every choice or none; the choices of the first prompt come first.

        Raises:
            ServingError: what `Engine.submit` raises.
        """
        accepted: list[Generation] = []
        try:
            for prompt, sampling_params in zip(self.prompts, self.sampling_params, strict=True):
                for sampling in sampling_params:
                    accepted.append(engine.submit(prompt.tokens, sampling, deadline_s=self.deadline_s))
        except BaseException:
            for generation in accepted:
                generation.cancel()
            raise
        return accepted


def completion_prompts(asked: CompletionRequest, text: Text) -> list[Prompt]:
    """The prompts of /v1/completions; slow for long ones.

    Raises:
        ApiError: there is none, or too many, or a token is none.
    """
    given = asked.prompts()
    if not given:
        raise invalid("prompt: there is none", "prompt", "invalid_value")
    if len(given) * asked.n > MAX_CHOICES:
        raise invalid(f"{len(given)} prompts, {asked.n} times: more than {MAX_CHOICES} answers", "n", "invalid_value")
    return [
        Prompt(text.encode(each), each) if isinstance(each, str) else Prompt(each, text.decode(each)) for each in given
    ]


def chat_prompts(asked: ChatRequest, text: Text) -> list[Prompt]:
    """The one prompt of /v1/chat/completions; slow for long ones.

    Raises:
        ApiError: there is no chat template, or it refuses the messages.
    """
    return [Prompt(text.encode_chat([message.as_template_takes_it() for message in asked.messages]))]


def make_completion_job(
    asked: CompletionRequest | ChatRequest, prompts: Sequence[Prompt], engine: Engine, default_s: float
) -> CompletionJob:
    """Makes the requests to the engine.

    Args:
        asked: the fields.
        prompts: of it.
        engine: whose limits count.
        default_s: the deadline of a request that names none, in seconds.

    Raises:
        ApiError: prompt and answer do not fit, or a value cannot be.
    """
    field = "prompt" if isinstance(asked, CompletionRequest) else "messages"
    sampling_params = []
    for prompt in prompts:
        most = _most_tokens(asked, len(prompt.tokens), engine, field)
        sampling_params.append([_sampling(asked, most, index) for index in range(asked.n)])
    return CompletionJob(prompts, sampling_params, asked.n, asked.deadline_s or default_s)


def _most_tokens(asked: CompletionRequest | ChatRequest, prompt_tokens: int, engine: Engine, field: str) -> int:
    """Most tokens of an answer: `max_tokens` of the request, or what is left of the context."""
    code = "context_length_exceeded"
    if not prompt_tokens:
        raise invalid(f"{field}: the prompt is empty", field, "invalid_value")
    if prompt_tokens > engine.max_prompt:
        message = f"the prompt has {prompt_tokens} tokens, and this model takes {engine.max_prompt} at most; shorten it"
        raise invalid(message, field, code)
    left = engine.max_length - prompt_tokens
    if left < 1:
        raise invalid(f"the prompt fills all {engine.max_length} tokens of the context; shorten it", field, code)
    if asked.max_new_tokens is None:
        return left
    if asked.max_new_tokens > left:
        raise invalid(
            f"the context is {engine.max_length} tokens; {prompt_tokens + asked.max_new_tokens} are asked for"
            f" ({prompt_tokens} of the prompt, {asked.max_new_tokens} of the answer): ask for {left} of the answer at most",
            field,
            code,
        )
    return asked.max_new_tokens


def _sampling(asked: CommonFields, max_new_tokens: int, index: int) -> SamplingParams:
    try:
        return SamplingParams(
            max_tokens=max_new_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            seed=None if asked.seed is None else (asked.seed + index) % _SEEDS,  # choices differ, and do so each time
            logprobs=_logprobs(asked),
            stop=tuple(asked.stop),
            ignore_eos=asked.ignore_eos,
            grammar=asked.response_format.as_grammar() if asked.response_format else None,
            logit_bias={int(token): bias for token, bias in asked.logit_bias.items()} if asked.logit_bias else None,
        )
    except RequestRejected as error:
        raise invalid(f"{error.explanation}; {error.hint}", None, "invalid_value") from None
    except ValueError as error:  # a number of a JSON schema that JSON has no name for
        raise invalid(f"response_format: {error}", "response_format", "invalid_value") from None


def _logprobs(asked: CommonFields) -> int | None:
    if isinstance(asked, ChatRequest):
        return (asked.top_logprobs or 0) if asked.logprobs else None
    return asked.logprobs if isinstance(asked, CompletionRequest) else None
