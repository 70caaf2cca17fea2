"""Answers that obey a grammar, by llguidance, in company of others that obey none."""

from __future__ import annotations

import json
import re

import pytest

from dynaxla.errors import RequestRejected
from dynaxla.serving.llm.requests import FinishReason, Grammar, SamplingParams
from tests.serving.llm.small import Served, prompts

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": 0}, "b": {"enum": ["x", "yz"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)


def test_a_schema(llama: Served) -> None:
    asked = prompts(4, 9, 6)
    company = llama.engine.submit(asked[0], SamplingParams(20, temperature=0, ignore_eos=True))
    how = SamplingParams(50, temperature=1.0, seed=3, grammar=Grammar("json_schema", SCHEMA))
    answer = llama.engine.submit(asked[1], how).result(30)
    assert answer.finish_reason is FinishReason.STOP or len(answer.chosen) == 50
    if answer.finish_reason is FinishReason.STOP:
        assert json.loads(answer.text)["b"] in ("x", "yz")
    expected = llama.greedy(asked[0], 20, eos_token_id=None)
    assert [chosen.token for chosen in company.result(30).chosen] == expected


def test_a_pattern(llama: Served) -> None:
    how = SamplingParams(30, temperature=0, grammar=Grammar("regex", "[a-c]{3,5}-[0-9]{2}"))
    answer = llama.engine.submit(prompts(5)[0], how).result(30)
    assert re.fullmatch("[a-c]{3,5}-[0-9]{2}", answer.text)
    assert answer.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("grammar", [Grammar("json_schema", "{"), Grammar("regex", "("), Grammar("lark", "start: ][")])
def test_grammars_that_cannot_be_read(llama: Served, grammar: Grammar) -> None:
    with pytest.raises(RequestRejected, match="grammar"):
        llama.engine.submit([1], SamplingParams(grammar=grammar))
