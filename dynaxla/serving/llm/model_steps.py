"""The compiled programs of an engine: tokens of several steps, a chunk of prompts, and what begins or copies a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynaxla.ops.sampling import INT_COLUMNS, MAX_LOGPROBS, sample_tokens
from dynaxla.serving.llm.attention_masks import AttentionWindows
from dynaxla.serving.llm.kv_cache import SlotView, cache_of, empty_slots, list_cache_tensors


@dataclass(frozen=True, slots=True)
class RowTensors:
    """What a call is told of its rows.

    Attributes:
        ints: int64 [rows, len(WHOLE)]: the last token and how many are in the cache, how many tokens may come, and so on.
        floats: float32 [rows, len(REAL)].
        token_mask: int32 [rows, words]: a bit per token that may come.
    """

    ints: Tensor
    floats: Tensor
    token_mask: Tensor

    def int_of(self, name: str) -> Tensor:
        """A column; a copy, as two views of one tensor are not let into a loop."""
        return self.ints[:, INT_COLUMNS.index(name)].clone()


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """What shapes logits, by slot and token: `prompt` (bool) and `counts` (int32) of what was said, `bias` (float32)."""

    prompt: Tensor
    counts: Tensor
    bias: Tensor


class DeviceState:
    """What lies on the device between calls.

    Attributes:
        kept: keys and values, layer by layer, as `SlotLayer`'s; position `max_seq_len` holds zeros, and nobody reads it.
        said: tokens of prompts, counts of those of answers, biases: [slots, vocabulary].
        ends: int64 tokens that end a text; at least one, -1 if there are none.
    """

    def __init__(self, model: PreTrainedModel, slots: int, max_seq_len: int, ends: Sequence[int]) -> None:
        vocabulary, device = vocabulary_of(model), model.device
        self.kept = empty_slots(model, slots, max_seq_len)
        self.said = PenaltyState(
            torch.zeros((slots, vocabulary), dtype=torch.bool, device=device),
            torch.zeros((slots, vocabulary), dtype=torch.int32, device=device),
            torch.zeros((slots, vocabulary), dtype=torch.float32, device=device),
        )
        self.ends = torch.tensor(list(ends) or [-1]).to(device)
        self.slots, self.max_seq_len = slots, max_seq_len

    def every(self) -> list[Tensor]:
        """All that programs write to; slots first."""
        return [*self.kept, self.said.prompt, self.said.counts, self.said.bias]


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many logits the model gives."""
    return int(model.config.get_text_config().vocab_size)


class ModelSteps:
    """The functions that are compiled; each call's sizes are fixed.

    Args:
        model: on the device.
        windows: what its layers see.
        most_steps: most steps of one call of `decode`.
    """

    def __init__(self, model: PreTrainedModel, windows: AttentionWindows, most_steps: int) -> None:
        self._model, self._windows, self._most_steps = model, windows, most_steps
        self._unknown = vocabulary_of(model)  # what is chosen where logits are no numbers

    def decode(self, state: DeviceState, rows: RowTensors, steps: Tensor, kv_length: int) -> tuple[Tensor, ...]:
        """Up to `steps` tokens for each row, that of slot 0, 1, ...; a row with `left` 0, or after its end, stands still.

        Returns:
            Tokens int64 [most_steps, rows], -1 where there is none, and the vocabulary's size where logits are no numbers, with
            which a row ends; logprobs, others and theirs, each with its steps first.
        """
        count = rows.ints.shape[0]
        slots = torch.arange(count, device=steps.device)
        # All of all slots lie in one piece: the position for zeros is not cut off there, which would copy everything.
        reads = kv_length + ((count, kv_length) == (state.slots, state.max_seq_len))
        length = rows.int_of("length")

        def go_on(step: Tensor, last: Tensor, *_: Tensor) -> Tensor:
            return (step < steps) & self._alive(step, last, rows, state.ends).any()

        def turn(
            step: Tensor, last: Tensor, counts: Tensor, out: Tensor, p: Tensor, o: Tensor, op: Tensor, *kept: Tensor
        ) -> Any:
            alive = self._alive(step, last, rows, state.ends)
            known = torch.clamp(last, max=self._unknown - 1)
            positions = torch.minimum(length + step, torch.full_like(last, kv_length - 1))[:, None]
            place = SlotView(
                slots, torch.where(alive[:, None], positions, state.max_seq_len), alive[:, None], reads, leading=True
            )
            cache = cache_of(kept, place)
            logits = self._logits(known[:, None], positions, cache, reads)[:, -1]
            chosen, *details = _choice(logits, rows, _of_slots(state.said, counts, count), step)
            said = (slots, torch.clamp(chosen, max=self._unknown - 1))
            counts = torch.index_put(counts, said, alive.to(torch.int32), accumulate=True)
            where = (step.expand(count), slots)
            return (
                step + 1,
                torch.where(alive, chosen, last),
                counts,
                torch.index_put(out, where, torch.where(alive, chosen, -1)),
                *(torch.index_put(old, where, new) for old, new in zip((p, o, op), details, strict=True)),
                *list_cache_tensors(cache),
            )

        shape = (self._most_steps, count)
        nothing = torch.full(shape, -1, dtype=torch.int64, device=steps.device)
        many = (*shape, MAX_LOGPROBS)
        begin = (
            torch.zeros_like(steps),
            rows.int_of("token").clone(),
            state.said.counts,
            nothing,
            torch.zeros(shape, device=steps.device),
            torch.zeros(many, dtype=torch.int64, device=steps.device),
            torch.zeros(many, device=steps.device),
            *state.kept,
        )
        _, _, counts, out, p, o, op, *kept = torch.while_loop(go_on, turn, begin)
        state.said.counts.copy_(counts)
        write(state.kept, kept)
        return out, p, o, op

    def prefill(self, state: DeviceState, rows: RowTensors, tokens: Tensor, kv_length: int) -> tuple[Tensor, ...]:
        """A chunk [rows, q] of prompts, at `length` of their slots, of which `count` tokens are real; the token after it.

        Returns:
            As `decode`, with one step.
        """
        size = tokens.shape[1]
        slots, start, count = rows.int_of("slot"), rows.int_of("length"), rows.int_of("count")
        along = torch.arange(size, device=tokens.device)[None]
        at = start[:, None] + along
        positions = torch.minimum(at, torch.full_like(at, kv_length - 1))
        valid = along < count[:, None]
        cache = cache_of(
            state.kept,
            SlotView(slots, torch.where(valid, positions, state.max_seq_len), valid, kv_length, leading=False),
        )
        last = torch.clamp(count - 1, min=0)
        logits = self._last_logits(tokens, positions, cache, kv_length, last)
        write(state.kept, list_cache_tensors(cache))
        said = state.said
        mine = PenaltyState(*(kept.index_select(0, slots) for kept in (said.prompt, said.counts, said.bias)))
        choice = _choice(logits, rows, mine, torch.zeros((), dtype=torch.int64, device=tokens.device))
        finishes = (rows.int_of("left") > 0).to(torch.int32)
        chosen = torch.clamp(choice[0], max=self._unknown - 1)
        said.counts.copy_(torch.index_put(said.counts, (slots, chosen), finishes, accumulate=True))
        return tuple(part[None] for part in choice)

    def begin(
        self, state: DeviceState, slot: Tensor, prompt: Tensor, biased: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        """What was said in a slot [1]: the prompt's tokens [1, max_seq_len], biases [1, n] of tokens [1, n]."""
        said, row = state.said, slot[:, None]
        prompts = said.prompt.index_fill(0, slot, False)
        said.prompt.copy_(torch.index_put(prompts, (row, prompt), torch.ones_like(prompt, dtype=torch.bool)))
        said.counts.copy_(said.counts.index_fill(0, slot, 0))
        said.bias.copy_(torch.index_put(said.bias.index_fill(0, slot, 0.0), (row, biased), bias))
        return (slot + 0,)

    def copy(self, state: DeviceState, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        """A slot [1] becomes what another one is."""
        every = state.every()
        write(every, [torch.index_copy(kept, 0, target, kept.index_select(0, source)) for kept in every])
        return (target + 0,)

    def clear(self, state: DeviceState, slot: Tensor) -> tuple[Tensor, ...]:
        """A slot [1] is empty, as at first."""
        every = state.every()
        write(every, [kept.index_fill(0, slot, 0) for kept in every])
        return (slot + 0,)

    def _alive(self, step: Tensor, last: Tensor, rows: RowTensors, ends: Tensor) -> Tensor:
        ended = (last[:, None] == ends[None]).any(-1) & (rows.int_of("ignore_eos") == 0) & (step > 0)
        return (step < rows.int_of("left")) & ~ended & (last < self._unknown)

    def _logits(self, tokens: Tensor, positions: Tensor, cache: Any, reads: int) -> Tensor:
        mask = self._windows.masks(positions, reads, self._model.dtype)
        found = self._model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, attention_mask=mask, use_cache=True
        )
        return found.logits  # type: ignore[no-any-return]

    def _last_logits(self, tokens: Tensor, positions: Tensor, cache: Any, reads: int, last: Tensor) -> Tensor:
        mask = self._windows.masks(positions, reads, self._model.dtype)
        # The head sees one token per row: with several rows, every row's last ones, of which each row takes its own.
        found = self._model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=last,
        )
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        return found.logits[rows, rows]  # type: ignore[no-any-return]


def _of_slots(said: PenaltyState, counts: Tensor, count: int) -> PenaltyState:
    return PenaltyState(said.prompt[:count], counts[:count], said.bias[:count])


def write(kept: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Each becomes what the other is."""
    for old, tensor in zip(kept, new, strict=True):
        old.copy_(tensor)


def _choice(logits: Tensor, rows: RowTensors, said: PenaltyState, step: Tensor) -> tuple[Tensor, ...]:
    return sample_tokens(logits, rows.ints, rows.floats, rows.token_mask, said.prompt, said.counts, said.bias, step)  # type: ignore[no-any-return]
