"""Runs the programs: packs what is asked of each row, picks the program, unpacks what came. One thread at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynaxla.aot_cache.module_fingerprint import fingerprint_modules
from dynaxla.errors import OptionError
from dynaxla.ops.sampling import REAL, WHOLE
from dynaxla.serving.llm.attention import use_slot_attention
from dynaxla.serving.llm.attention_masks import windows_of
from dynaxla.serving.llm.engine_cache import EngineProgram, EnginePrograms
from dynaxla.serving.llm.model_steps import Bodies, Rows, State, vocabulary_of
from dynaxla.serving.llm.requests import MOST_BIASES, Chosen
from dynaxla.serving.llm.settings import EngineSettings
from dynaxla.torch_api.dynamo import backend_of


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of one row: the columns of `choosing.Rows` by name (those left out are 0), and a grammar's bits."""

    whole: Mapping[str, int]
    real: Mapping[str, float]
    allowed: Tensor | None = None


IDLE = Ask({}, {"top_p": 1.0, "repetition": 1.0})
"""A row that stands still."""


@dataclass(frozen=True, slots=True)
class Told:
    """What a call gave, by row: its tokens, fewer than steps where it ended."""

    tokens: Sequence[Sequence[int]]
    _details: tuple[Tensor, ...] = field(repr=False)

    def chosen(self, row: int, others: int | None) -> list[Chosen]:
        """The tokens of a row, with that many of the most probable ones beside each."""
        if others is None:
            return [Chosen(token) for token in self.tokens[row]]
        logprobs, tokens, theirs = (detail[:, row].tolist() for detail in self._details)
        return [
            Chosen(token, logprobs[step], tuple(zip(tokens[step][:others], theirs[step][:others])))
            for step, token in enumerate(self.tokens[row])
        ]


class Runner:
    """The model, its slots, and the programs.

    Args:
        model: on torch's device "dynaxla".
        settings: sizes.
        ends: tokens that end a text.

    Raises:
        OptionError: the model lies elsewhere, has another kind of cache, or fewer positions than a slot has room.
    """

    def __init__(self, model: PreTrainedModel, settings: EngineSettings, ends: Sequence[int]) -> None:
        if model.device.type != "dynaxla":
            raise OptionError(
                f"the model lies on {model.device}",
                'dynaxla.use(); model = model.to("dynaxla"): there a cache is written in place',
            )
        if backend_of(model) is not None:
            raise OptionError("the model is compiled already", "give the model itself: an engine compiles what it runs")
        most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if most is not None and most > 0 and settings.room > most:
            raise OptionError(f"room={settings.room}, and the model has {most} positions", f"write room={most}")
        use_slot_attention(model)
        self.vocabulary = vocabulary_of(model)
        self._settings = settings
        self._model = model.eval()
        self._bodies = bodies = EnginePrograms(Bodies(model, windows_of(model.config), settings.steps))
        self._state = State(model, settings.slots, settings.room, ends)
        self._device = model.device
        words = (self.vocabulary + 31) // 32
        self._anything = {rows: torch.full((rows, words), -1, dtype=torch.int32) for rows in self._row_counts()}
        self._anything_there = {rows: bits.to(self._device) for rows, bits in self._anything.items()}
        self._decode = {
            key: EngineProgram(bodies, Bodies.decode, f"decode_{key[0]}_{key[1]}") for key in self._decode_keys()
        }
        self._prefill = {
            key: EngineProgram(bodies, Bodies.prefill, f"prefill_{key[0]}_{key[1]}_{key[2]}")
            for key in self._prefill_keys()
        }
        self._begin = EngineProgram(bodies, Bodies.begin, "begin")
        self._copy = EngineProgram(bodies, Bodies.copy, "copy")
        self._clear = EngineProgram(bodies, Bodies.clear, "clear")

    @property
    def programs(self) -> int:
        """How many programs a warm-up makes."""
        return len(self._decode) + len(self._prefill) + 3

    def warm_up(self) -> Iterator[None]:
        """Runs every program once; yields after each."""
        for rows, reach in self._decode:
            self.decode([IDLE] * rows, 1, reach)
            yield
        for rows, size, reach in self._prefill:
            self.prefill([IDLE] * rows, [[]] * rows, (rows, size), reach)
            yield
        self.begin(0, [0], {})
        yield
        self._clear(self._state, self._number(0))
        yield
        # As after a run that failed: what was emptied shares its memory, and is copied when it is next written.
        self.forget()
        self.copy(0, 0)
        yield

    def check_once(self, check: Callable[..., None], run: Callable[[], None]) -> None:
        """Runs a check of what the programs give, once for a model, its code, settings and versions, as the cache knows."""
        code = fingerprint_modules({type(module).__module__ for module in self._model.modules()})
        self._bodies.check_once(check, (self._settings, code), run)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """What the model gives by itself, op by op, without slots: float32 [tokens, vocabulary], on the host."""
        found = self._model(input_ids=torch.tensor([tokens]).to(self._device), use_cache=False)
        return found.logits[0].float().cpu()  # type: ignore[no-any-return]

    def can_clear(self, slot: int) -> bool:
        """Empties a slot, whose values may be no numbers; False if slots cannot be written and read any more."""
        try:
            self._clear(self._state, self._number(slot))
            self._state.said.counts[:1, :1].cpu()
        except Exception:  # whatever it is, they cannot
            return False
        return True

    def forget(self) -> None:
        """Empty slots again: after a run that may have left them in any state. The tensors stay, as programs know them."""
        for tensor in self._state.every():
            tensor.zero_()

    def decode(self, asks: Sequence[Ask], steps: int, reach: int) -> Told:
        """Up to `steps` tokens for the slots 0, 1, ...; as many asks as a program has rows."""
        rows, there = len(asks), torch.tensor(steps).to(self._device)
        return _told(self._decode[rows, reach](self._state, self._rows(asks), there, reach))

    def prefill(self, asks: Sequence[Ask], chunks: Sequence[Sequence[int]], shape: tuple[int, int], reach: int) -> Told:
        """Takes in chunks of prompts; a row's token means something where its prompt ends."""
        rows, size = shape
        tokens = torch.tensor([[*chunk, *([0] * (size - len(chunk)))] for chunk in chunks], dtype=torch.int64)
        return _told(self._prefill[rows, size, reach](self._state, self._rows(asks), tokens.to(self._device), reach))

    def begin(self, slot: int, prompt: Sequence[int], biases: Mapping[int, float]) -> None:
        """Tells a slot what its penalties and biases are about."""
        padded = [*prompt, *([prompt[0]] * (self._settings.room - len(prompt)))]
        items = list(biases.items()) or [(0, 0.0)]
        items += [items[0]] * (MOST_BIASES - len(items))
        tokens, values = torch.tensor([[token for token, _ in items]]), torch.tensor([[value for _, value in items]])
        self._begin(
            self._state, self._number(slot), torch.tensor([padded]).to(self._device), *self._sent(tokens, values)
        )

    def copy(self, source: int, target: int) -> None:
        """Makes a slot what another one is."""
        self._copy(self._state, self._number(source), self._number(target))

    def _row_counts(self) -> set[int]:
        return {*self._settings.rows, *(rows for rows, _ in self._settings.chunks)}

    def _decode_keys(self) -> list[tuple[int, int]]:
        return [(rows, reach) for rows in self._settings.rows for reach in self._settings.reaches]

    def _prefill_keys(self) -> list[tuple[int, int, int]]:
        return [
            (rows, size, reach)
            for rows, size in self._settings.chunks
            for reach in self._settings.reaches
            if size <= reach
        ]

    def _rows(self, asks: Sequence[Ask]) -> Rows:
        whole = torch.tensor([[ask.whole.get(name, 0) for name in WHOLE] for ask in asks], dtype=torch.int64)
        real = torch.tensor([[ask.real.get(name, 0.0) for name in REAL] for ask in asks], dtype=torch.float32)
        allowed = self._anything_there[len(asks)]
        if any(ask.allowed is not None for ask in asks):
            anything = self._anything[len(asks)][0]
            bits = [anything if ask.allowed is None else ask.allowed for ask in asks]
            allowed = torch.stack(bits).to(self._device)
        return Rows(whole.to(self._device), real.to(self._device), allowed)

    def _sent(self, *tensors: Tensor) -> tuple[Any, ...]:
        return tuple(tensor.to(self._device) for tensor in tensors)

    def _number(self, slot: int) -> Tensor:
        return torch.tensor([slot]).to(self._device)


def _told(found: tuple[Tensor, ...]) -> Told:
    tokens = found[0].cpu().T.tolist()
    return Told([[token for token in row if token >= 0] for row in tokens], found[1:])
