"""Compares an engine's tokens with its model's, before it accepts requests.

A model may have a mask of its own, or count positions by the length of its cache, without an entry in its config. Its answers
would be wrong without an error.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dynaxla.errors import OptionError
from dynaxla.serving.llm.model_runner import IDLE_ROW, ModelRunner, RowInput
from dynaxla.serving.llm.requests import GeneratedToken
from dynaxla.serving.settings import EngineSettings

NEAR = {torch.float32: 0.05, torch.float64: 0.05}
"""By how much logprobs may differ. Those of 16-bit models are rounded in other places."""
NEAR_NARROW = 0.3

_PLAIN = {"top_p": 1.0, "repetition_penalty": 1.0}


def check_against_model(runner: ModelRunner, settings: EngineSettings, dtype: torch.dtype) -> None:
    """Compares the first tokens behind a prompt with what the model says of them by itself. Slot 0 is not empty afterwards.

    A prompt or an answer for which the model gives no numbers says nothing.

    Raises:
        OptionError: a token is far from the most probable one, or its probability is another.
    """
    length = min(max(size for _, size in settings.prefill_chunks) + 3, settings.max_seq_len - 1)
    prompt = torch.randint(runner.vocabulary, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    chosen = _answer(runner, settings, prompt)
    if any(each.token >= runner.vocabulary for each in chosen):
        return
    logits = runner.logits([*prompt, *(each.token for each in chosen[:-1])])[length - 1 :]
    if not logits.isfinite().all():
        return
    near = NEAR.get(dtype, NEAR_NARROW)
    for index, (each, row) in enumerate(zip(chosen, logits.log_softmax(-1), strict=True)):
        ours, theirs, best = each.logprob or 0.0, row[each.token].item(), row.max().item()
        if max(best - theirs, abs(ours - theirs)) > near:
            raise OptionError(
                f"with slots the model gives token {each.token} behind {length + index} others a logprob of {ours:.3f}, "
                f"by itself {theirs:.3f}, and {best:.3f} to the most probable one",
                "it has masks or positions of its own, which slots do not know: it cannot be served",
            )


def _answer(runner: ModelRunner, settings: EngineSettings, prompt: Sequence[int]) -> list[GeneratedToken]:
    """The first token of a call of prompts, and those of a call of steps."""
    num_computed, output = 0, None
    while output is None or num_computed < len(prompt):
        rows, size = settings.chunk_for([len(prompt) - num_computed])
        part = prompt[num_computed : num_computed + size]
        left = int(num_computed + len(part) == len(prompt))
        row_input = RowInput(
            {"length": num_computed, "count": len(part), "left": left, "ignore_eos": 1, "logprobs": 1}, _PLAIN
        )
        num_computed += len(part)
        kv_length = settings.kv_length_for(max(size, num_computed))
        output = runner.prefill(
            [row_input, *[IDLE_ROW] * (rows - 1)], [part, *[()] * (rows - 1)], (rows, size), kv_length
        )
    chosen = output.chosen(0, 0)
    steps = min(settings.steps, settings.max_seq_len - len(prompt) - 1)
    if not steps or chosen[0].token >= runner.vocabulary:
        return chosen
    ints = {"token": chosen[0].token, "length": num_computed, "left": steps, "drawn": 1, "ignore_eos": 1, "logprobs": 1}
    rows, kv_length = settings.rows_for(1), settings.kv_length_for(num_computed + steps)
    output = runner.decode([RowInput(ints, _PLAIN), *[IDLE_ROW] * (rows - 1)], steps, kv_length)
    return [*chosen, *output.chosen(0, 0)]
