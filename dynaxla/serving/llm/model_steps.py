"""The functions that an engine compiles: decode steps, a prefill of prompt chunks, and the begin, copy and clear of a slot."""

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
from dynaxla.serving.llm.tensor_parallel import ModelDevices


@dataclass(frozen=True, slots=True)
class RowTensors:
    """The inputs of a call that differ by row.

    Attributes:
        ints: int64 [rows, len(INT_COLUMNS)]: the last token, the number of tokens in the cache, of tokens left, and others.
        floats: float32 [rows, len(FLOAT_COLUMNS)].
        token_mask: int32 [rows, words]: a bit per token of the vocabulary; a token without its bit is never sampled.
    """

    ints: Tensor
    floats: Tensor
    token_mask: Tensor

    def int_of(self, name: str) -> Tensor:
        """Copies a column: `torch.while_loop` refuses two views of one tensor."""
        return self.ints[:, INT_COLUMNS.index(name)].clone()


@dataclass(frozen=True, slots=True)
class PenaltyState:
    """The state of penalties and biases, each [slots, vocabulary].

    Attributes:
        prompt: bool: the tokens of the prompt.
        counts: int32: how often the answer has a token.
        bias: float32: added to the logits.
    """

    prompt: Tensor
    counts: Tensor
    bias: Tensor


class DeviceState:
    """The tensors that stay on the device between calls.

    Attributes:
        kv: keys and values, layer by layer, as `SlotLayer`'s. No row reads position `max_seq_len`, which holds zeros.
        penalties: of all slots.
        ends: int64: the end-of-sequence tokens; -1 alone if there are none.
    """

    def __init__(
        self, model: PreTrainedModel, slots: int, max_seq_len: int, ends: Sequence[int], devices: ModelDevices
    ) -> None:
        vocabulary = vocabulary_of(model)
        self.kv = empty_slots(model, slots, max_seq_len, devices)
        self.penalties = PenaltyState(
            *(devices.make_zeros((slots, vocabulary), each) for each in (torch.bool, torch.int32, torch.float32))
        )
        self.ends = devices.send(torch.tensor(list(ends) or [-1]))
        self.slots, self.max_seq_len = slots, max_seq_len

    def every(self) -> list[Tensor]:
        """All tensors that programs write to; their first dim is the slot."""
        return [*self.kv, self.penalties.prompt, self.penalties.counts, self.penalties.bias]


def vocabulary_of(model: PreTrainedModel) -> int:
    """The number of logits that the model returns for a token."""
    return int(model.config.get_text_config().vocab_size)


class ModelSteps:
    """The functions that an engine compiles, each for fixed sizes.

    Args:
        model: on the device.
        windows: the attention windows of its layers.
        most_steps: the maximum number of steps of one call of `decode`.
        devices: over which the model is split.
    """

    def __init__(
        self, model: PreTrainedModel, windows: AttentionWindows, most_steps: int, devices: ModelDevices
    ) -> None:
        self._model, self._windows, self._most_steps, self._devices = model, windows, most_steps, devices
        self._unknown = vocabulary_of(model)  # the token that is sampled where logits are NaN

    def decode(self, state: DeviceState, rows: RowTensors, steps: Tensor, kv_length: int) -> tuple[Tensor, ...]:
        """Samples up to `steps` tokens for each row; row i is slot i. A row with `left` 0, or after its end, samples none.

        Returns:
            Tokens, int64 [most_steps, rows]: -1 where a row has none, and the vocabulary's size where its logits are NaN, which
            ends the row. Then their logprobs, the most probable tokens, and the logprobs of these, each with the steps first.
        """
        count = rows.ints.shape[0]
        slots = torch.arange(count, device=steps.device)
        # With all slots at full length the position of zeros is read too: cutting it off would copy the whole cache.
        reads = kv_length + ((count, kv_length) == (state.slots, state.max_seq_len))
        length = rows.int_of("length")

        def go_on(step: Tensor, last: Tensor, *_: Tensor) -> Tensor:
            return (step < steps) & self._alive(step, last, rows, state.ends).any()

        def turn(
            step: Tensor, last: Tensor, counts: Tensor, out: Tensor, p: Tensor, o: Tensor, op: Tensor, *kv: Tensor
        ) -> Any:
            alive = self._alive(step, last, rows, state.ends)
            known = torch.clamp(last, max=self._unknown - 1)
            positions = torch.minimum(length + step, torch.full_like(last, kv_length - 1))[:, None]
            place = SlotView(
                slots, torch.where(alive[:, None], positions, state.max_seq_len), alive[:, None], reads, leading=True
            )
            cache = cache_of(kv, place)
            logits = self._logits(known[:, None], positions, cache, reads)[:, -1]
            chosen, *details = _choice(logits, rows, _of_slots(state.penalties, counts, count), step)
            sampled = (slots, torch.clamp(chosen, max=self._unknown - 1))
            counts = torch.index_put(counts, sampled, alive.to(torch.int32), accumulate=True)
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
            state.penalties.counts,
            nothing,
            torch.zeros(shape, device=steps.device),
            torch.zeros(many, dtype=torch.int64, device=steps.device),
            torch.zeros(many, device=steps.device),
            *state.kv,
        )
        _, _, counts, out, p, o, op, *kv = torch.while_loop(go_on, turn, begin)
        state.penalties.counts.copy_(counts)
        write(state.kv, kv)
        return out, p, o, op

    def prefill(self, state: DeviceState, rows: RowTensors, tokens: Tensor, kv_length: int) -> tuple[Tensor, ...]:
        """Computes a chunk of each row's prompt, and samples the token after it.

        Args:
            tokens: int64 [rows, q], for the slots' positions from `length` on; `count` of a row's tokens are real.

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
            state.kv,
            SlotView(slots, torch.where(valid, positions, state.max_seq_len), valid, kv_length, leading=False),
        )
        last = torch.clamp(count - 1, min=0)
        logits = self._last_logits(tokens, positions, cache, kv_length, last)
        write(state.kv, list_cache_tensors(cache))
        every = state.penalties
        mine = PenaltyState(*(each.index_select(0, slots) for each in (every.prompt, every.counts, every.bias)))
        choice = _choice(logits, rows, mine, torch.zeros((), dtype=torch.int64, device=tokens.device))
        finishes = (rows.int_of("left") > 0).to(torch.int32)
        chosen = torch.clamp(choice[0], max=self._unknown - 1)
        every.counts.copy_(torch.index_put(every.counts, (slots, chosen), finishes, accumulate=True))
        return tuple(part[None] for part in choice)

    def begin(
        self, state: DeviceState, slot: Tensor, prompt: Tensor, biased: Tensor, bias: Tensor
    ) -> tuple[Tensor, ...]:
        """Sets the penalties of a slot [1]: the prompt's tokens [1, max_seq_len], and the biases [1, n] of tokens [1, n]."""
        every, row = state.penalties, slot[:, None]
        prompts = every.prompt.index_fill(0, slot, False)
        every.prompt.copy_(torch.index_put(prompts, (row, prompt), torch.ones_like(prompt, dtype=torch.bool)))
        every.counts.copy_(every.counts.index_fill(0, slot, 0))
        every.bias.copy_(torch.index_put(every.bias.index_fill(0, slot, 0.0), (row, biased), bias))
        return (slot + 0,)

    def copy(self, state: DeviceState, source: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        """Copies a slot [1] into another."""
        every = state.every()
        write(every, [torch.index_copy(each, 0, target, each.index_select(0, source)) for each in every])
        return (target + 0,)

    def clear(self, state: DeviceState, slot: Tensor) -> tuple[Tensor, ...]:
        """Clears a slot [1]."""
        every = state.every()
        write(every, [each.index_fill(0, slot, 0) for each in every])
        return (slot + 0,)

    def _alive(self, step: Tensor, last: Tensor, rows: RowTensors, ends: Tensor) -> Tensor:
        ended = (last[:, None] == ends[None]).any(-1) & (rows.int_of("ignore_eos") == 0) & (step > 0)
        return (step < rows.int_of("left")) & ~ended & (last < self._unknown)

    def _logits(self, tokens: Tensor, positions: Tensor, cache: Any, reads: int) -> Tensor:
        mask = self._windows.masks(positions, reads, self._model.dtype)
        found = self._model(
            input_ids=tokens, position_ids=positions, past_key_values=cache, attention_mask=mask, use_cache=True
        )
        return self._devices.gather(found.logits)

    def _last_logits(self, tokens: Tensor, positions: Tensor, cache: Any, reads: int, last: Tensor) -> Tensor:
        mask = self._windows.masks(positions, reads, self._model.dtype)
        # `logits_to_keep` selects positions for all rows alike: each row takes its own of them.
        found = self._model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=cache,
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=last,
        )
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        return self._devices.gather(found.logits[rows, rows])


def _of_slots(every: PenaltyState, counts: Tensor, count: int) -> PenaltyState:
    return PenaltyState(every.prompt[:count], counts[:count], every.bias[:count])


def write(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copies each source into its target."""
    for old, tensor in zip(targets, sources, strict=True):
        old.copy_(tensor)


def _choice(logits: Tensor, rows: RowTensors, penalties: PenaltyState, step: Tensor) -> tuple[Tensor, ...]:
    state = (penalties.prompt, penalties.counts, penalties.bias)
    return sample_tokens(logits, rows.ints, rows.floats, rows.token_mask, *state, step)  # type: ignore[no-any-return]
