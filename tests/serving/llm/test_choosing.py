"""The choice of a token: torch's probabilities with transformers' filters, seeds, penalties, logprobs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dynaxla.ops.sampling import FLOAT_COLUMNS, INT_COLUMNS, MAX_LOGPROBS, sample_tokens
from dynaxla.serving.llm.requests import SamplingParams
from tests.serving.llm.small import Served, prompts

SIZE = 40
ROWS = 4000


def _choose(logits: Tensor, **how: Tensor | float) -> tuple[Tensor, ...]:
    """Chooses for each row of logits, with the same parameters but for those that are given as tensors."""
    rows = logits.shape[0]
    told: Mapping[str, Tensor | float] = {"top_p": 1.0, "repetition_penalty": 1.0, **how}

    def columns(names: tuple[str, ...], dtype: torch.dtype) -> Tensor:
        return torch.stack([torch.as_tensor(told.get(name, 0)).expand(rows).to(dtype) for name in names], 1)

    nothing = torch.zeros(rows, SIZE)
    said = [told.get(name, nothing.to(dtype)) for name, dtype in (("prompt", torch.bool), ("counts", torch.int32))]
    allowed = torch.full((rows, (SIZE + 31) // 32), -1, dtype=torch.int32)
    return sample_tokens(
        logits,
        columns(INT_COLUMNS, torch.int64),
        columns(FLOAT_COLUMNS, torch.float32),
        told.get("allowed", allowed),
        *said,
        told.get("bias", nothing),
        torch.tensor(0),
    )


@pytest.mark.parametrize(
    ("how", "warpers"),
    [
        ({"temperature": 1.0}, []),
        ({"temperature": 0.6, "top_k": 7}, [TemperatureLogitsWarper(0.6), TopKLogitsWarper(7)]),
        ({"temperature": 1.3, "top_p": 0.7}, [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.7)]),
        ({"temperature": 1.0, "min_p": 0.2}, [MinPLogitsWarper(0.2)]),
        (
            {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
            [TemperatureLogitsWarper(0.9), TopKLogitsWarper(12), TopPLogitsWarper(0.8), MinPLogitsWarper(0.05)],
        ),
    ],
)
def test_draws_have_the_distribution_of_transformers(how: dict[str, float], warpers: list) -> None:  # type: ignore[type-arg]
    logits = torch.randn(1, SIZE, generator=torch.Generator().manual_seed(3)) * 2
    expected = LogitsProcessorList(warpers)(torch.zeros(1, 1, dtype=torch.int64), logits.clone()).softmax(-1)[0]
    tokens = _choose(logits.expand(ROWS, SIZE).contiguous(), seed=torch.arange(ROWS), **how)[0]
    counts = torch.bincount(tokens, minlength=SIZE).double()
    assert counts[expected == 0].sum() == 0
    often = expected > 5 / ROWS
    seen = torch.cat([counts[often], counts[~often].sum()[None]])
    chances = torch.cat([expected[often].double(), expected[~often].sum().double()[None]])
    kept = chances > 0
    assert chisquare(seen[kept], chances[kept] / chances[kept].sum() * seen[kept].sum()).pvalue > 1e-3


def test_draws_of_one_seed_differ_by_position() -> None:
    tokens = _choose(torch.zeros(ROWS, SIZE), seed=5, drawn=torch.arange(ROWS), temperature=1.0)[0]
    assert chisquare(torch.bincount(tokens, minlength=SIZE)).pvalue > 1e-3
    pairs = tokens[:-1] * SIZE + tokens[1:]
    assert len(pairs.unique()) > 0.8 * min(ROWS, SIZE * SIZE)


def test_greedy_takes_the_first_of_equal_ones() -> None:
    logits = torch.zeros(2, SIZE)
    logits[1, [7, 9]] = 1.0
    assert _choose(logits)[0].tolist() == [0, 7]


def test_penalties_and_biases() -> None:
    logits = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))
    prompt = torch.rand(3, SIZE) < 0.3
    said = torch.randint(0, 3, (3, SIZE), dtype=torch.int32)
    bias = torch.randn(3, SIZE)
    expected = logits + bias
    for row in range(3):
        ids = torch.nonzero(prompt[row] | (said[row] > 0)).T
        expected[row] = RepetitionPenaltyLogitsProcessor(1.5)(ids, expected[row : row + 1])[0]
    expected = expected - 0.4 * (said > 0) - 0.3 * said
    how = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "prompt": prompt,
        "counts": said,
        "bias": bias,
    }
    assert torch.equal(_choose(logits, shaped=1, **how)[0], expected.argmax(-1))
    assert torch.equal(_choose(logits, shaped=0, **how)[0], logits.argmax(-1))


def test_what_a_grammar_leaves_out() -> None:
    bits = torch.tensor([[0b1001, 1 << 3]], dtype=torch.int32)
    logits = torch.arange(SIZE).float()[None]
    assert _choose(logits, shaped=1, allowed=bits)[0].item() == 35


def test_logprobs() -> None:
    logits = torch.randn(2, SIZE)
    tokens, own, top_logprobs, theirs = _choose(logits, logprobs=1)
    expected = logits.log_softmax(-1)
    top = expected.topk(MAX_LOGPROBS)
    assert torch.equal(top_logprobs, top.indices)
    torch.testing.assert_close(theirs, top.values)
    torch.testing.assert_close(own, expected.gather(1, tokens[:, None])[:, 0])


def test_a_seed_repeats_whatever_the_company(llama: Served) -> None:
    prompt, *company = prompts(9, 3, 14, 6)
    how = SamplingParams(12, temperature=0.8, top_p=0.9, top_k=30, seed=41, ignore_eos=True)
    alone = llama.engine.submit(prompt, how).result(30)
    top_logprobs = [llama.engine.submit(other, SamplingParams(20, temperature=2.0)) for other in company]
    again = llama.engine.submit(prompt, how).result(30)
    other_seed = llama.engine.submit(prompt, SamplingParams(12, temperature=0.8, seed=42, ignore_eos=True)).result(30)
    assert [chosen.token for chosen in alone.chosen] == [chosen.token for chosen in again.chosen]
    assert [chosen.token for chosen in alone.chosen] != [chosen.token for chosen in other_seed.chosen]
    for other in top_logprobs:
        other.result(30)


def test_logprobs_are_eagers(llama: Served) -> None:
    prompt = prompts(11)[0]
    answer = llama.engine.submit(prompt, SamplingParams(6, temperature=0, logprobs=3, ignore_eos=True)).result(30)
    tokens = [chosen.token for chosen in answer.chosen]
    expected = llama.logits([*prompt, *tokens]).log_softmax(-1)[len(prompt) - 1 :]
    for chosen, row in zip(answer.chosen, expected):
        top = row.topk(3)
        assert [token for token, _ in chosen.top_logprobs] == top.indices.tolist()
        torch.testing.assert_close(
            torch.tensor([value for _, value in chosen.top_logprobs]), top.values, atol=1e-4, rtol=0
        )
        assert chosen.logprob == pytest.approx(row[chosen.token].item(), abs=1e-4)


def test_penalties_are_transformers(llama: Served) -> None:
    prompt = prompts(11)[0]
    how = SamplingParams(16, temperature=0, repetition_penalty=1.7, ignore_eos=True)
    answer = llama.engine.submit(prompt, how).result(30)
    expected = llama.greedy(prompt, 16, repetition_penalty=1.7, eos_token_id=None)
    assert [chosen.token for chosen in answer.chosen] == expected


def test_a_stop_text_ends_the_answer(llama: Served) -> None:
    prompt = prompts(7, seed=5)[0]
    whole = llama.engine.submit(prompt, SamplingParams(24, temperature=0, ignore_eos=True)).result(30).text
    stop = whole[9:12]
    answer = llama.engine.submit(prompt, SamplingParams(24, temperature=0, ignore_eos=True, stop=(stop,))).result(30)
    assert answer.text == whole[: whole.index(stop)]
    assert answer.finish_reason == "stop"
    assert len(answer.chosen) < 24


@pytest.mark.parametrize("field", ["temperature", "top_p", "logprobs", "stop", "seed"])
def test_wrong_values_are_rejected(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: -1 if field != "seed" else 1.5})
