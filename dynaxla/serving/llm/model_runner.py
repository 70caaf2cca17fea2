"""Runs the compiled programs: packs the inputs of rows, picks the program, unpacks its outputs. One thread at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynaxla.aot_cache.module_fingerprint import fingerprint_modules
from dynaxla.errors import OptionError
from dynaxla.ops.sampling import FLOAT_COLUMNS, INT_COLUMNS
from dynaxla.serving.llm.attention_masks import windows_of_config
from dynaxla.serving.llm.engine_cache import EnginePrograms
from dynaxla.serving.llm.model_steps import DeviceState, ModelSteps, RowTensors, vocabulary_of
from dynaxla.serving.llm.requests import MAX_LOGIT_BIASES, GeneratedToken
from dynaxla.serving.llm.slot_attention import use_slot_attention
from dynaxla.serving.llm.tensor_parallel import split_model
from dynaxla.serving.settings import EngineSettings
from dynaxla.torch_api.dynamo import backend_of


@dataclass(frozen=True, slots=True)
class RowInput:
    """The inputs of one row: the columns of `ops.sampling` by name (0 where left out), and a bit per token that may come."""

    ints: Mapping[str, int]
    floats: Mapping[str, float]
    token_mask: Tensor | None = None


IDLE_ROW = RowInput({}, {"top_p": 1.0, "repetition_penalty": 1.0})
"""The inputs of a row without a sequence."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The outputs of a call by row: its tokens, fewer than steps where it ended."""

    tokens: Sequence[Sequence[int]]
    _details: tuple[Tensor, ...] = field(repr=False)

    def read_tokens(self, row: int, top_logprobs: int | None) -> list[GeneratedToken]:
        """The tokens of a row, each with its `top_logprobs` most probable alternatives; None: no logprobs."""
        if top_logprobs is None:
            return [GeneratedToken(token) for token in self.tokens[row]]
        logprobs, tokens, theirs = (detail[:, row].tolist() for detail in self._details)
        return [
            GeneratedToken(token, logprobs[step], tuple(zip(tokens[step][:top_logprobs], theirs[step][:top_logprobs])))
            for step, token in enumerate(self.tokens[row])
        ]


class ModelRunner:
    """The model, its kv cache, and the programs.

    Args:
        model: on torch's device "dynaxla"; one that is split over several devices may also be on the host.
        settings: sizes.
        ends: end-of-sequence tokens.

    Attributes:
        cache_bytes: of the kv cache, on each device.

    Raises:
        OptionError: the model is on another device, has another kind of cache, fewer positions than `max_seq_len`, or cannot
            be split over so many devices.
    """

    def __init__(self, model: PreTrainedModel, settings: EngineSettings, ends: Sequence[int]) -> None:
        self._devices = devices = split_model(model, settings.tensor_parallel)
        if model.device.type != "dynaxla":
            raise OptionError(
                f"the model is on {model.device}",
                'dynaxla.use(); model = model.to("dynaxla"): there the kv cache is written in place',
            )
        if backend_of(model) is not None:
            raise OptionError("the model is compiled already", "give the model itself: an engine compiles what it runs")
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and most > 0 and settings.max_seq_len > most:
            raise OptionError(
                f"max_seq_len={settings.max_seq_len}, and the model has {most} positions", f"write max_seq_len={most}"
            )
        use_slot_attention(model)
        self.vocabulary = vocabulary_of(model)
        self._settings = settings
        self._model = model.eval()
        steps = ModelSteps(model, windows_of_config(model.config), settings.steps, devices)
        self._programs = EnginePrograms(steps, self.programs)
        self._state = DeviceState(model, settings.slots, settings.max_seq_len, ends, devices)
        self.cache_bytes = devices.count_bytes(self._state.kv)
        words = (self.vocabulary + 31) // 32
        self._anything = {rows: torch.full((rows, words), -1, dtype=torch.int32) for rows in self._row_counts()}
        self._anything_there = {rows: devices.send(bits) for rows, bits in self._anything.items()}

    @property
    def programs(self) -> int:
        """The number of programs that a warm-up compiles."""
        return len(self._decode_keys()) + len(self._prefill_keys()) + 3

    def warm_up(self) -> Iterator[None]:
        """Runs every program once; yields after each."""
        for rows, kv_length in self._decode_keys():
            self.decode([IDLE_ROW] * rows, 1, kv_length)
            yield
        for rows, size, kv_length in self._prefill_keys():
            self.prefill([IDLE_ROW] * rows, [[]] * rows, (rows, size), kv_length)
            yield
        self.begin(0, [0], {})
        yield
        self._clear(0)
        yield
        # As after a run that failed: what was emptied shares its memory, and is copied when it is next written.
        self.forget()
        self.copy(0, 0)
        yield

    def check_once(self, check: Callable[..., None], run: Callable[[], None]) -> None:
        """Runs a check of what the programs give, once for a model, its code, settings and versions, as the cache knows."""
        code = fingerprint_modules({type(module).__module__ for module in self._model.modules()})
        self._programs.check_once(check, (self._settings, code), run)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """What the model gives by itself, op by op, without slots: float32 [tokens, vocabulary], on the host."""
        found = self._model(input_ids=self._devices.send(torch.tensor([tokens])), use_cache=False)
        return found.logits[0].float().cpu()  # type: ignore[no-any-return]

    def can_clear(self, slot: int) -> bool:
        """Clears a slot, which may hold NaN. Returns whether the kv cache can still be written and read."""
        try:
            self._clear(slot)
            self._state.penalties.counts[:1, :1].cpu()
        except Exception:  # whatever it is, they cannot
            return False
        return True

    def forget(self) -> None:
        """Clears all slots, after a run that may have left them in any state. The programs keep their tensors."""
        for tensor in self._state.every():
            tensor.zero_()

    def decode(self, row_inputs: Sequence[RowInput], steps: int, kv_length: int) -> StepOutput:
        """Up to `steps` tokens for the slots 0, 1, ...; as many asks as a program has rows."""
        rows, there = len(row_inputs), self._devices.send(torch.tensor(steps))
        args = (self._state, self._rows(row_inputs), there, kv_length)
        return _step_output(self._programs.run(ModelSteps.decode, f"decode_{rows}_{kv_length}", *args))

    def prefill(
        self,
        row_inputs: Sequence[RowInput],
        chunks: Sequence[Sequence[int]],
        shape: tuple[int, int],
        kv_length: int,
    ) -> StepOutput:
        """Computes chunks of prompts. Only a row whose prompt ends has a token that counts."""
        rows, size = shape
        tokens = torch.tensor([[*chunk, *([0] * (size - len(chunk)))] for chunk in chunks], dtype=torch.int64)
        args = (self._state, self._rows(row_inputs), self._devices.send(tokens), kv_length)
        return _step_output(self._programs.run(ModelSteps.prefill, f"prefill_{rows}_{size}_{kv_length}", *args))

    def begin(self, slot: int, prompt: Sequence[int], biases: Mapping[int, float]) -> None:
        """Sets the tokens of the prompt and the biases of a slot."""
        padded = [*prompt, *([prompt[0]] * (self._settings.max_seq_len - len(prompt)))]
        items = list(biases.items()) or [(0, 0.0)]
        items += [items[0]] * (MAX_LOGIT_BIASES - len(items))
        tokens, values = torch.tensor([[token for token, _ in items]]), torch.tensor([[value for _, value in items]])
        given = self._sent(torch.tensor([slot]), torch.tensor([padded]), tokens, values)
        self._programs.run(ModelSteps.begin, "begin", self._state, *given)

    def copy(self, source: int, target: int) -> None:
        """Copies a slot into another."""
        slots = self._sent(torch.tensor([source]), torch.tensor([target]))
        self._programs.run(ModelSteps.copy, "copy", self._state, *slots)

    def _clear(self, slot: int) -> None:
        self._programs.run(ModelSteps.clear, "clear", self._state, *self._sent(torch.tensor([slot])))

    def _row_counts(self) -> set[int]:
        return {*self._settings.rows, *(rows for rows, _ in self._settings.prefill_chunks)}

    def _decode_keys(self) -> list[tuple[int, int]]:
        return [(rows, kv_length) for rows in self._settings.rows for kv_length in self._settings.kv_lengths]

    def _prefill_keys(self) -> list[tuple[int, int, int]]:
        return [
            (rows, size, kv_length)
            for rows, size in self._settings.prefill_chunks
            for kv_length in self._settings.kv_lengths
            if size <= kv_length
        ]

    def _rows(self, row_inputs: Sequence[RowInput]) -> RowTensors:
        ints = torch.tensor(
            [[row_input.ints.get(name, 0) for name in INT_COLUMNS] for row_input in row_inputs], dtype=torch.int64
        )
        floats = torch.tensor(
            [[row_input.floats.get(name, 0.0) for name in FLOAT_COLUMNS] for row_input in row_inputs],
            dtype=torch.float32,
        )
        token_mask = self._anything_there[len(row_inputs)]
        if any(row_input.token_mask is not None for row_input in row_inputs):
            anything = self._anything[len(row_inputs)][0]
            bits = [anything if row_input.token_mask is None else row_input.token_mask for row_input in row_inputs]
            token_mask = self._devices.send(torch.stack(bits))
        return RowTensors(self._devices.send(ints), self._devices.send(floats), token_mask)

    def _sent(self, *tensors: Tensor) -> tuple[Any, ...]:
        return tuple(map(self._devices.send, tensors))


def _step_output(found: tuple[Tensor, ...]) -> StepOutput:
    tokens = found[0].cpu().T.tolist()
    return StepOutput([[token for token in row if token >= 0] for row in tokens], found[1:])


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
    chosen = output.read_tokens(0, 0)
    steps = min(settings.steps, settings.max_seq_len - len(prompt) - 1)
    if not steps or chosen[0].token >= runner.vocabulary:
        return chosen
    ints = {"token": chosen[0].token, "length": num_computed, "left": steps, "drawn": 1, "ignore_eos": 1, "logprobs": 1}
    rows, kv_length = settings.rows_for(1), settings.kv_length_for(num_computed + steps)
    output = runner.decode([RowInput(ints, _PLAIN), *[IDLE_ROW] * (rows - 1)], steps, kv_length)
    return [*chosen, *output.read_tokens(0, 0)]
