"""Ways to call transformers' `generate`, and what one family does in one of them: tokens, programs, captures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from dynaxla.observe.recorder import Metrics, Recorder
from tests.generation.families import Family, Inputs

LENGTHS = (26, 8, 12, 40, 150, 5, 200, 77, 64, 100, 33, 130, 19, 180, 58, 6, 90, 170, 47, 120)
NEW_TOKENS = 64


@dataclass(frozen=True)
class Way:
    """How `generate` is called.

    Attributes:
        batch: how many prompts at once; of several, all but the first are padded on their left.
        settings: what `generate` is given beside the prompt.
        assisted: whether an assistant model drafts, which is the family's own smaller self.
    """

    batch: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    assisted: bool = False


WAYS: Mapping[str, Way] = {
    "dynamic": Way(),
    "static": Way(settings={"cache_implementation": "static", "disable_compile": True}),
    "beams": Way(settings={"num_beams": 4}),
    "batch": Way(batch=4),
    "sampled": Way(settings={"do_sample": True, "top_k": 10, "temperature": 1.5}),
    "lookup": Way(settings={"prompt_lookup_num_tokens": 3}),
    "assisted": Way(assisted=True),
}


@dataclass(frozen=True)
class Counts:
    """What the requests of one family made in one way.

    Attributes:
        wrong: requests whose tokens are not eager's.
        programs, captures: how many of them.
        late: programs that the second half of the requests made.
        exact_shapes: parts that are compiled per exact shape, by what keeps them from buckets.
        eager_ops: ops that run in eager.
        last_captures: functions of which Dynamo captured as often as it will.
    """

    wrong: int
    programs: int
    captures: int
    late: int
    exact_shapes: tuple[str, ...]
    eager_ops: int
    last_captures: tuple[str, ...] = ()

    def __str__(self) -> str:
        tokens = "eager's tokens" if not self.wrong else f"{self.wrong} WRONG"
        lines = [
            f"{tokens}, {self.programs} programs ({self.late} late), {self.captures} captures, "
            f"{len(self.exact_shapes)} refusals, {self.eager_ops} eager ops"
        ]
        return "\n    ".join([*lines, *sorted(set(self.exact_shapes)), *self.last_captures])


def requests(family: Family, way: Way, lengths: Sequence[int] = LENGTHS) -> list[Inputs]:
    """The same at every call."""
    torch.manual_seed(11)
    return [family.inputs(length, way.batch) for length in lengths]


def count(
    family: Family,
    way: Way,
    recorder: Recorder,
    executing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    lengths: Sequence[int] = LENGTHS,
    new_tokens: int = NEW_TOKENS,
) -> Counts:
    """Generates from every prompt in eager, then with `net.forward` compiled.

    Args:
        executing: the compiled calls are made inside of it.
    """
    net, prompts = family.net(), requests(family, way, lengths)
    assistant = family.net() if way.assisted else None
    expected = [_generate(net, prompt, way, assistant, new_tokens) for prompt in prompts]
    before = recorder.snapshot()
    half = before
    net.forward = _compiled(net.forward)
    if assistant is not None:
        assistant.forward = _compiled(assistant.forward)
    wrong = 0
    with executing():
        for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
            if number == math.ceil(len(prompts) / 2):
                half = recorder.snapshot()
            wrong += not torch.equal(_generate(net, prompt, way, assistant, new_tokens), tokens)
    return _between(before, half, recorder.snapshot(), wrong)


def _generate(
    net: PreTrainedModel, prompt: Inputs, way: Way, assistant: PreTrainedModel | None, new_tokens: int
) -> torch.Tensor:
    torch.manual_seed(5)
    settings = {"do_sample": False, "max_new_tokens": new_tokens, **way.settings}
    if assistant is not None:
        settings["assistant_model"] = assistant
    tokens = net.generate(**prompt, **settings)
    assert isinstance(tokens, torch.Tensor)
    return tokens


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Programs are made, not found on disk, where they would not be counted."""
    return torch.compile(forward, backend="dynaxla", options={"cache": False})


def _between(before: Metrics, half: Metrics, after: Metrics, wrong: int) -> Counts:
    return Counts(
        wrong,
        after.compiles - before.compiles,
        len(after.captured) - len(before.captured),
        after.compiles - half.compiles,
        after.exact_shapes[len(before.exact_shapes) :],
        after.eager_ops - before.eager_ops,
        after.last_captures[len(before.last_captures) :],
    )
