"""Greedy answers of every kind of model are eager's, token for token, whoever else is in the batch."""

from __future__ import annotations

import pytest

from dynaxla.observe.recorder import Recorder
from dynaxla.serving.llm.requests import FinishReason, SamplingParams
from dynaxla.serving.settings import EngineSettings
from tests.lists import quick
from tests.serving.llm.small import KINDS, ROOM, SETTINGS, prompts, served

FEW = EngineSettings(
    slots=4,
    max_seq_len=ROOM,
    rows=(1, 2, 4),
    kv_lengths=(16, 32, ROOM),
    prefill_chunks=((1, 8), (3, 8), (1, 16)),
    steps=5,
)
"""Steps of fewer slots and positions than there are."""


@pytest.mark.parametrize("kind", quick(KINDS, "gemma3", "gpt2"))
def test_greedy_answers_are_eagers(kind: str, recorder: Recorder) -> None:
    _check(kind, SETTINGS, recorder)


@pytest.mark.parametrize("kind", quick(("llama", "gemma2"), "llama"))
def test_greedy_answers_of_parts_of_the_slots_are_eagers(kind: str, recorder: Recorder) -> None:
    _check(kind, FEW, recorder)


def _check(kind: str, settings: EngineSettings, recorder: Recorder) -> None:
    """Seven prompts of several chunks in four slots: they wait, join, and leave at different times."""
    asked = list(zip(prompts(3, 20, 9, 31, 1, 12, 8), (20, 6, 17, 12, 9, 3, 25), strict=True))
    with served(kind, settings) as here:
        with recorder.expect(compiles=0):
            going = [here.engine.submit(prompt, SamplingParams(n, temperature=0)) for prompt, n in asked]
            answers = [generation.result(60) for generation in going]
        for (prompt, tokens), answer in zip(asked, answers, strict=True):
            expected = here.greedy(prompt, tokens)
            assert [chosen.token for chosen in answer.chosen] == expected
            assert answer.text == here.tokenizer.decode(expected)
            assert answer.finish_reason is (FinishReason.LENGTH if len(expected) == tokens else FinishReason.STOP)
            assert answer.prompt_tokens == len(prompt)
