"""From the fields of a request to what the engine is asked: prompts of tokens, and one sampling per choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaxla.errors import RequestRejected
from dynaxla.serving.http.chat_template import Text
from dynaxla.serving.http.errors import invalid
from dynaxla.serving.http.request_schema import MOST_CHOICES, ChatRequest, CompletionRequest, Shared
from dynaxla.serving.llm.requests import Engine, Generation, Sampling

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
class Job:
    """What one request asks of the engine.

    Attributes:
        prompts: at least one.
        samplings: of each prompt, in the order of its choices.
        n: choices of each prompt.
        deadline_s: seconds that all of it may take.
    """

    prompts: Sequence[Prompt]
    samplings: Sequence[Sequence[Sampling]]
    n: int
    deadline_s: float

    def submit(self, engine: Engine) -> list[Generation]:
        """Queues every choice or none; the choices of the first prompt come first.

        Raises:
            ServingError: what `Engine.submit` raises.
        """
        accepted: list[Generation] = []
        try:
            for prompt, samplings in zip(self.prompts, self.samplings, strict=True):
                for sampling in samplings:
                    accepted.append(engine.submit(prompt.tokens, sampling, deadline_s=self.deadline_s))
        except BaseException:
            for generation in accepted:
                generation.cancel()
            raise
        return accepted


def completion_prompts(asked: CompletionRequest, text: Text) -> list[Prompt]:
    """The prompts of /v1/completions; slow for long ones.

    Raises:
        Refusal: there is none, or too many, or a token is none.
    """
    given = asked.prompts()
    if not given:
        raise invalid("prompt: there is none", "prompt", "invalid_value")
    if len(given) * asked.n > MOST_CHOICES:
        raise invalid(f"{len(given)} prompts, {asked.n} times: more than {MOST_CHOICES} answers", "n", "invalid_value")
    return [
        Prompt(text.encode(each), each) if isinstance(each, str) else Prompt(each, text.decode(each)) for each in given
    ]


def chat_prompts(asked: ChatRequest, text: Text) -> list[Prompt]:
    """The one prompt of /v1/chat/completions; slow for long ones.

    Raises:
        Refusal: there is no chat template, or it refuses the messages.
    """
    return [Prompt(text.encode_chat([message.as_template_takes_it() for message in asked.messages]))]


def make_job(
    asked: CompletionRequest | ChatRequest, prompts: Sequence[Prompt], engine: Engine, default_s: float
) -> Job:
    """What the engine is asked.

    Args:
        asked: the fields.
        prompts: of it.
        engine: whose limits count.
        default_s: the deadline of a request that names none, in seconds.

    Raises:
        Refusal: prompt and answer do not fit, or a value cannot be.
    """
    field = "prompt" if isinstance(asked, CompletionRequest) else "messages"
    samplings = []
    for prompt in prompts:
        most = _most_tokens(asked, len(prompt.tokens), engine, field)
        samplings.append([_sampling(asked, most, index) for index in range(asked.n)])
    return Job(prompts, samplings, asked.n, asked.deadline_s or default_s)


def _most_tokens(asked: CompletionRequest | ChatRequest, prompt_tokens: int, engine: Engine, field: str) -> int:
    """How many tokens an answer may have; never fewer than were asked for."""
    code = "context_length_exceeded"
    if not prompt_tokens:
        raise invalid(f"{field}: the prompt is empty", field, "invalid_value")
    if prompt_tokens > engine.max_prompt:
        message = f"the prompt has {prompt_tokens} tokens, and this model takes {engine.max_prompt} at most; shorten it"
        raise invalid(message, field, code)
    left = engine.max_length - prompt_tokens
    if left < 1:
        raise invalid(f"the prompt fills all {engine.max_length} tokens of the context; shorten it", field, code)
    if asked.most_tokens is None:
        return left
    if asked.most_tokens > left:
        raise invalid(
            f"the context is {engine.max_length} tokens; {prompt_tokens + asked.most_tokens} are asked for"
            f" ({prompt_tokens} of the prompt, {asked.most_tokens} of the answer): ask for {left} of the answer at most",
            field,
            code,
        )
    return asked.most_tokens


def _sampling(asked: Shared, most_tokens: int, index: int) -> Sampling:
    try:
        return Sampling(
            max_tokens=most_tokens,
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
            ignore_end=asked.ignore_eos,
            grammar=asked.response_format.as_grammar() if asked.response_format else None,
            logit_bias={int(token): bias for token, bias in asked.logit_bias.items()} if asked.logit_bias else None,
        )
    except RequestRejected as error:
        raise invalid(f"{error.explanation}; {error.hint}", None, "invalid_value") from None
    except ValueError as error:  # a number of a JSON schema that JSON has no name for
        raise invalid(f"response_format: {error}", "response_format", "invalid_value") from None


def _logprobs(asked: Shared) -> int | None:
    if isinstance(asked, ChatRequest):
        return (asked.top_logprobs or 0) if asked.logprobs else None
    return asked.logprobs if isinstance(asked, CompletionRequest) else None
