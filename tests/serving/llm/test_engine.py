"""What an engine promises beside its tokens: bounds, deadlines, cancellation, faults, an end."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable

import pytest
import torch

from dynaxla.errors import (
    DeadlineExceeded,
    NotNumbers,
    NotServing,
    OptionError,
    QueueFull,
    RequestRejected,
    RequestTooLarge,
)
from dynaxla.observe.recorder import Recorder
from dynaxla.serving import State
from dynaxla.serving.llm.engine import LanguageEngine
from dynaxla.serving.llm.generation import GenerationStream
from dynaxla.serving.llm.model_runner import ModelRunner
from dynaxla.serving.llm.requests import FinishReason, SamplingParams
from dynaxla.serving.settings import EngineSettings
from tests.serving.llm.small import ROOM, SETTINGS, Served, build, letters, prompts

GREEDY = SamplingParams(8, temperature=0, ignore_eos=True)
LONG = SamplingParams(ROOM, temperature=0, ignore_eos=True)


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


class Paused:
    """The worker stops in front of each of its turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._turns, self._over = threading.Semaphore(0), False
        turn = LanguageEngine._turn

        def paused(engine: LanguageEngine) -> None:
            if not self._over:
                self._turns.acquire(timeout=20)
            turn(engine)

        monkeypatch.setattr(LanguageEngine, "_turn", paused)

    def let(self, turns: int) -> None:
        self._turns.release(turns)

    def end(self) -> None:
        self._over = True
        self.let(1)


def _tokens(served: Served, prompt: list[int], tokens: int = 8) -> list[int]:
    return served.greedy(prompt, tokens, eos_token_id=None)


def test_pieces_are_the_answer(llama: Served) -> None:
    prompt = prompts(5)[0]
    deltas = list(llama.engine.submit(prompt, GREEDY).deltas())
    assert len(deltas) > 1
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert [chosen.token for delta in deltas for chosen in delta.chosen] == _tokens(llama, prompt)


def test_an_answer_can_be_asked_for_again(llama: Served) -> None:
    """Whoever has read the pieces, or a part of them, and how often."""

    async def read(generation: GenerationStream, most: int) -> list[str]:
        found = []
        async for delta in generation.deltas_async():
            found.append(delta.text)
            if len(found) == most:
                break
        return found

    async def twice(generation: GenerationStream) -> list[str]:
        first = await read(generation, 1)
        rest = await read(generation, 100)
        return [*first, *rest, *await read(generation, 100)]

    generation = llama.engine.submit(prompts(4)[0], LONG)
    texts = asyncio.run(asyncio.wait_for(twice(generation), 60))
    answer = generation.result(0)
    assert "".join(texts) == answer.text == generation.result(0).text
    assert list(generation.deltas()) == []
    assert asyncio.run(asyncio.wait_for(read(generation, 100), 10)) == []


def test_what_the_models_own_config_asks_for_is_told(caplog: pytest.LogCaptureFixture) -> None:
    net = build("llama").to("dynaxla")
    LanguageEngine(net, letters(), SETTINGS)
    assert "generation config" not in caplog.text
    net.generation_config.repetition_penalty = 1.3
    LanguageEngine(net, letters(), SETTINGS)
    assert "{'repetition_penalty': 1.3}" in caplog.text


def test_pieces_for_an_event_loop(llama: Served) -> None:
    asked = prompts(5, 9, 14)

    async def read(prompt: list[int]) -> list[int]:
        generation = llama.engine.submit(prompt, GREEDY)
        return [chosen.token async for delta in generation.deltas_async() for chosen in delta.chosen]

    async def read_all() -> list[list[int]]:
        return await asyncio.gather(*map(read, asked))

    assert asyncio.run(read_all()) == [_tokens(llama, prompt) for prompt in asked]


def test_an_answer_fills_the_room_and_no_more(llama: Served) -> None:
    prompt = prompts(ROOM - 1)[0]
    answer = llama.engine.submit(prompt, LONG).result(30)
    assert (len(answer.chosen), answer.finish_reason) == (1, FinishReason.LENGTH)
    prompt = prompts(ROOM - 7, seed=3)[0]
    answer = llama.engine.submit(prompt, LONG).result(30)
    assert [chosen.token for chosen in answer.chosen] == _tokens(llama, prompt, 7)


@pytest.mark.parametrize("prompt", [[], [1, -1], [128], [1.5], [True]])
def test_a_prompt_that_is_none(engine: LanguageEngine, prompt: list[int]) -> None:
    with pytest.raises(RequestRejected):
        engine.submit(prompt, GREEDY)


def test_a_prompt_that_is_too_long(engine: LanguageEngine) -> None:
    with pytest.raises(RequestTooLarge):
        engine.submit([1] * ROOM, GREEDY)


def test_a_cancelled_request_frees_its_slot(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Paused(monkeypatch)
    going = [llama.engine.submit(prompt, LONG) for prompt in prompts(4, 5, 6, 7, 8)]
    pause.let(5)
    _wait(lambda: llama.engine.slots_used == 4)
    going[1].cancel()
    going[4].cancel()
    pause.end()
    answers = [generation.result(30) for generation in going]
    kinds = [answer.finish_reason for answer in answers]
    assert kinds == [
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
        FinishReason.CANCELLED,
    ]
    assert len(answers[1].chosen) < 20
    assert not answers[4].chosen
    _wait(lambda: llama.engine.slots_used == 0)


def test_a_full_queue(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Paused(monkeypatch)
    waiting = [llama.engine.submit(prompt, GREEDY) for prompt in prompts(*[3] * SETTINGS.max_queue)]
    with pytest.raises(QueueFull):
        llama.engine.submit([1], GREEDY)
    pause.end()
    assert all(generation.result(30).finish_reason is FinishReason.LENGTH for generation in waiting)


def test_a_deadline(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    pause = Paused(monkeypatch)
    late = llama.engine.submit(prompts(4)[0], LONG, deadline_s=0.05)
    other = llama.engine.submit(prompts(5)[0], GREEDY)
    time.sleep(0.1)
    pause.end()
    with pytest.raises(DeadlineExceeded):
        late.result(30)
    assert len(other.result(30).chosen) == 8
    with pytest.raises(RequestRejected):
        llama.engine.submit([1], GREEDY, deadline_s=0)


@pytest.mark.faulty
def test_who_is_guilty_fails_alone(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step raises whenever the second request takes part."""
    asked = prompts(4, 5, 6)
    decode = ModelRunner.decode

    def fail(runner: ModelRunner, row_inputs: list, *args: object) -> object:  # type: ignore[type-arg]
        if any(ask.ints.get("length", 0) in (7, 8) and ask.ints["seed"] == 13 for ask in row_inputs):
            raise ValueError("a fault")
        return decode(runner, row_inputs, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "decode", fail)
    going = [
        llama.engine.submit(prompt, SamplingParams(8, temperature=0, ignore_eos=True, seed=seed))
        for prompt, seed in zip(asked, (1, 13, 2), strict=True)
    ]
    with pytest.raises(ValueError, match="a fault"):
        going[1].result(30)
    for number in (0, 2):
        assert [chosen.token for chosen in going[number].result(30).chosen] == _tokens(llama, asked[number])
    _wait(lambda: llama.engine.slots_used == 0)


@pytest.mark.faulty
def test_a_lost_cache_is_made_anew(llama: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompts(6)[0]
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "prefill", lambda *_: 1 / 0)
        patch.setattr(ModelRunner, "can_clear", lambda *_: False)
        with pytest.raises(ZeroDivisionError):
            llama.engine.submit(prompt, GREEDY).result(30)
    answer = llama.engine.submit(prompt, GREEDY).result(30)
    assert [chosen.token for chosen in answer.chosen] == _tokens(llama, prompt)
    assert answer.cached_tokens == 0


def test_logits_that_are_no_numbers_fail_alone() -> None:
    """A token whose row of the embedding is NaN: alone it gets the error, and what it leaves in its slot is read by nobody."""
    bad, prompt = 9, [5, 6, 7, 8]
    net, tokenizer = build("llama"), letters()
    with torch.no_grad():
        net.get_input_embeddings().weight[bad] = math.nan
    engine = LanguageEngine(copy.deepcopy(net).to("dynaxla"), tokenizer, SETTINGS)
    here = Served(engine, net, tokenizer)
    with engine:
        for _ in range(2):  # the second time they have slots in which one failed
            asked = [[5, bad, 7], prompt, [bad], [*prompt, 3, 1, 4, 1, 5, 9 - 1, 2, 6, bad, 3, 3]]
            first, good, *others = [engine.submit(each, GREEDY) for each in asked]
            for failing in (first, *others):
                with pytest.raises(NotNumbers, match="NaN after 0 tokens"):
                    failing.result(30)
            assert [chosen.token for chosen in good.result(30).chosen] == _tokens(here, prompt)
        going = [engine.submit(each, GREEDY) for each in prompts(40, 30, 20, 10)]
        for each, generation in zip(prompts(40, 30, 20, 10), going, strict=True):
            if bad not in [*each, *_tokens(here, each)]:
                assert [chosen.token for chosen in generation.result(30).chosen] == _tokens(here, each)


@pytest.mark.parametrize("late", [False, True])
def test_what_a_prompt_left_halfway_is_read_by_nobody(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are no numbers, and no logits were looked at yet."""
    bad, prompt, pause = 9, [5, 6, 7, 8], Paused(monkeypatch)
    net, tokenizer = build("llama"), letters()
    with torch.no_grad():
        net.get_input_embeddings().weight[bad] = math.nan
    few = EngineSettings(slots=1, max_seq_len=ROOM, rows=(1,), kv_lengths=(ROOM,), prefill_chunks=((1, 8),), steps=3)
    ahead = [0.0]
    engine = LanguageEngine(copy.deepcopy(net).to("dynaxla"), tokenizer, few, clock=lambda: time.monotonic() + ahead[0])
    with engine:
        going = engine.submit([1, 2, bad, *range(10, 40)], GREEDY, deadline_s=1000 if late else None)
        pause.let(1)
        _wait(lambda: engine.slots_used == 1)
        if late:
            ahead[0] = 2000.0
        else:
            going.cancel()
        pause.end()
        if late:
            with pytest.raises(DeadlineExceeded):
                going.result(30)
        else:
            assert going.result(30).finish_reason is FinishReason.CANCELLED
        answer = engine.submit(prompt, GREEDY).result(30)
        assert [chosen.token for chosen in answer.chosen] == _tokens(Served(engine, net, tokenizer), prompt)


@pytest.mark.parametrize("top_p", [1e-30, 1e-40, 5e-324])
def test_the_least_top_p_leaves_the_most_probable_token(top_p: float, llama: Served) -> None:
    prompt = prompts(6, seed=3)[0]
    answer = llama.engine.submit(prompt, SamplingParams(8, temperature=1, top_p=top_p, seed=1)).result(30)
    assert [chosen.token for chosen in answer.chosen] == _tokens(llama, prompt)


def test_prefixes_are_shared(llama: Served, recorder: Recorder) -> None:
    """With a slot that is free, and with one that is running: the answers are eager's."""
    first, *rests = prompts(30, 4, 9, seed=11)
    asked = [first, [*first[:26], *rests[0]], [*first[:20], *rests[1]], first]
    with recorder.expect(compiles=0):
        answers = [llama.engine.submit(asked[0], GREEDY).result(30)]
        answers += [g.result(30) for g in [llama.engine.submit(prompt, GREEDY) for prompt in asked[1:]]]
    assert [answer.cached_tokens for answer in answers[1:]] == [26, 20, 26]
    for prompt, answer in zip(asked, answers, strict=True):
        assert [chosen.token for chosen in answer.chosen] == _tokens(llama, prompt)


def test_not_served_before_and_after() -> None:
    engine = LanguageEngine(build("llama").to("dynaxla"), letters(), SETTINGS)
    with pytest.raises(NotServing):
        engine.submit([1], GREEDY)
    assert engine.progress == (0, 5)
    with engine:
        assert engine.progress == (5, 5)
        assert engine.state == State.SERVING
        going = [engine.submit(prompt, GREEDY) for prompt in prompts(3, 4, 5, 6, 7, 8)]
        engine.drain(30)
        assert all(generation.result(0).finish_reason is FinishReason.LENGTH for generation in going)
    assert engine.state == State.CLOSED
    with pytest.raises(NotServing):
        engine.submit([1], GREEDY)


def test_a_drain_that_runs_out_of_time_and_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama").to("dynaxla")
    engine, pause = LanguageEngine(model, letters(), SETTINGS), Paused(monkeypatch)
    engine.start()
    engine.wait_until_ready()
    going = [engine.submit(prompt, LONG) for prompt in prompts(4, 4, 4, 4, 4, 4)]
    engine.drain(0.05)
    for generation in going:
        with pytest.raises(NotServing):
            generation.result(0)
    pause.end()
    engine.drain(30)
    kept = weakref.ref(engine._runner._state.kept[0])
    del engine, going, generation
    gc.collect()
    assert kept() is None


def test_a_model_that_is_compiled_already() -> None:
    with pytest.raises(OptionError, match="compiled already"):
        LanguageEngine(torch.compile(build("llama").to("dynaxla"), backend="dynaxla"), letters(), SETTINGS)  # type: ignore[arg-type]


def test_a_model_on_the_host() -> None:
    with pytest.raises(OptionError, match="is on cpu"):
        LanguageEngine(build("llama"), letters(), SETTINGS)
