"""Whether an engine answers as its model does: tried before it takes requests.

A model may have a mask of its own, or positions that it counts by the length of its cache, of which no config tells. Answers
would then be wrong without a word.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dynaxla.errors import OptionError
from dynaxla.serving.llm.model_runner import IDLE, Ask, Runner
from dynaxla.serving.llm.requests import Chosen
from dynaxla.serving.llm.settings import EngineSettings

NEAR = {torch.float32: 0.05, torch.float64: 0.05}
"""By how much logprobs may differ. Those of 16-bit models are rounded in other places."""
NEAR_NARROW = 0.3

_PLAIN = {"top_p": 1.0, "repetition": 1.0}


def try_out(runner: Runner, settings: EngineSettings, dtype: torch.dtype) -> None:
    """Compares the first tokens behind a prompt with what the model says of them by itself. Slot 0 is not empty afterwards.

    A prompt or an answer for which the model gives no numbers says nothing.

    Raises:
        OptionError: a token is far from the most probable one, or its probability is another.
    """
    length = min(max(size for _, size in settings.chunks) + 3, settings.room - 1)
    prompt = torch.randint(runner.vocabulary, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = _answer(runner, settings, prompt)
    if any(each.token >= runner.vocabulary for each in chosen):
        return
    logits = runner.logits([*prompt, *(each.token for each in chosen[:-1])])[length - 1 :]
    if not logits.isfinite().all():
        return
    near = NEAR.get(dtype, NEAR_NARROW)
    for place, (each, row) in enumerate(zip(chosen, logits.log_softmax(-1), strict=True)):
        ours, theirs, best = each.logprob or 0.0, row[each.token].item(), row.max().item()
        if max(best - theirs, abs(ours - theirs)) > near:
            raise OptionError(
                f"with slots the model gives token {each.token} behind {length + place} others a logprob of {ours:.3f}, "
                f"by itself {theirs:.3f}, and {best:.3f} to the most probable one",
                "it has masks or positions of its own, which slots do not know: it cannot be served",
            )


def _answer(runner: Runner, settings: EngineSettings, prompt: Sequence[int]) -> list[Chosen]:
    """The first token of a call of prompts, and those of a call of steps."""
    filled, told = 0, None
    while told is None or filled < len(prompt):
        rows, size = settings.chunk_for([len(prompt) - filled])
        part = prompt[filled : filled + size]
        left = int(filled + len(part) == len(prompt))
        ask = Ask({"length": filled, "count": len(part), "left": left, "ignore_end": 1, "logprobs": 1}, _PLAIN)
        filled += len(part)
        reach = settings.reach_for(max(size, filled))
        told = runner.prefill([ask, *[IDLE] * (rows - 1)], [part, *[()] * (rows - 1)], (rows, size), reach)
    chosen = told.chosen(0, 0)
    steps = min(settings.steps, settings.room - len(prompt) - 1)
    if not steps or chosen[0].token >= runner.vocabulary:
        return chosen
    whole = {"token": chosen[0].token, "length": filled, "left": steps, "drawn": 1, "ignore_end": 1, "logprobs": 1}
    rows, reach = settings.rows_for(1), settings.reach_for(filled + steps)
    told = runner.decode([Ask(whole, _PLAIN), *[IDLE] * (rows - 1)], steps, reach)
    return [*chosen, *told.chosen(0, 0)]
