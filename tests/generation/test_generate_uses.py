"""What else `generate` is asked for: caches that are handed on, cut, quantized; chunks of prompts; scores; streams."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache, StoppingCriteria, StoppingCriteriaList

from dynaxla.observe.recorder import Recorder
from tests.bucketing.eager_programs import eager_programs
from tests.generation.families import FAMILIES, VOCABULARY

LENGTHS = (26, 8, 60, 100, 33, 150, 5, 200)

Run = Callable[[PreTrainedModel], list[Tensor]]


def _prompt(length: int, seed: int) -> Tensor:
    return torch.randint(5, VOCABULARY - 1, (1, length), generator=torch.Generator().manual_seed(seed))


def _generate(net: PreTrainedModel, ids: Tensor, **settings: Any) -> Any:
    torch.manual_seed(5)
    given = {"do_sample": False, "max_new_tokens": 9, **settings}
    return net.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **given)


def _flat(made: Any) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, (list, tuple)):
        for each in made:
            yield from _flat(each)


def _with(*fields: str, **settings: Any) -> Run:
    """Prompts of every length; of the results the sequences and these fields."""

    def run(net: PreTrainedModel) -> list[Tensor]:
        more = {"return_dict_in_generate": True, **{f"output_{name}": True for name in fields}}
        made = [_generate(net, _prompt(length, length), **more, **settings) for length in LENGTHS]
        return [tensor for each in made for tensor in _flat([each.sequences, *(each[name] for name in fields)])]

    return run


def _talk(net: PreTrainedModel, cache: DynamicCache | StaticCache, first: int) -> Iterator[Tensor]:
    history = torch.empty(1, 0, dtype=torch.int64)
    for turn in range(5):
        history = torch.cat([history, _prompt(3 + 7 * turn + first, turn)], 1)
        history = _generate(net, history, past_key_values=cache)
        yield history


def talks(net: PreTrainedModel) -> list[Tensor]:
    return [each for first in range(3) for each in _talk(net, DynamicCache(config=net.config), first)]


def talks_in_a_static_cache(net: PreTrainedModel) -> list[Tensor]:
    return [each for first in range(3) for each in _talk(net, StaticCache(config=net.config, max_cache_len=256), first)]


def cropped(net: PreTrainedModel) -> list[Tensor]:
    made = []
    for length in LENGTHS:
        cache = DynamicCache(config=net.config)
        made.append(_generate(net, _prompt(length, length), past_key_values=cache))
        cache.crop(-5)
        other = torch.cat([made[-1][:, : cache.get_seq_length()], _prompt(4, length)], 1)
        made.append(_generate(net, other, past_key_values=cache))
    return made


def shared_prefix(net: PreTrainedModel) -> list[Tensor]:
    prefix, cache = _prompt(37, 1), DynamicCache(config=net.config)
    with torch.no_grad():
        net(input_ids=prefix, past_key_values=cache)
    prompts = [torch.cat([prefix, _prompt(length, length)], 1) for length in LENGTHS]
    return [_generate(net, prompt, past_key_values=copy.deepcopy(cache)) for prompt in prompts]


def embedded(net: PreTrainedModel) -> list[Tensor]:
    given = [net.get_input_embeddings()(_prompt(length, length)).detach() for length in LENGTHS]
    return [net.generate(inputs_embeds=each, do_sample=False, max_new_tokens=9) for each in given]


class Sevens(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return input_ids[:, -1] % 7 == 3


@dataclass
class Stream:
    """Keeps what it is given."""

    put_so_far: list[Tensor] = field(default_factory=list)

    def put(self, value: Tensor) -> None:
        self.put_so_far.append(value.reshape(-1).clone())

    def end(self) -> None:
        pass


def streamed(net: PreTrainedModel) -> list[Tensor]:
    stream = Stream()
    for length in LENGTHS:
        _generate(net, _prompt(length, length), streamer=stream)
    return stream.put_so_far


USES: Mapping[str, tuple[Run, int]] = {
    "talks": (talks, 8),
    "talks in a static cache": (talks_in_a_static_cache, 8),
    "cropped": (cropped, 11),
    "shared prefix": (shared_prefix, 10),
    "embedded": (embedded, 8),
    "streamed": (streamed, 8),
    "chunks": (_with(prefill_chunk_size=16), 12),
    "scores": (_with("scores", repetition_penalty=1.3, no_repeat_ngram_size=2), 8),
    "stopped": (_with(stopping_criteria=StoppingCriteriaList([Sevens()])), 8),
    "several": (_with("scores", do_sample=True, num_return_sequences=3), 8),
    "beams": (_with("scores", num_beams=3, num_return_sequences=2), 8),
    "guided": (_with(guidance_scale=1.5), 12),
    "dynamic": (_with(cache_implementation="dynamic"), 8),
    "hybrid": (_with(cache_implementation="hybrid", disable_compile=True), 8),
    # Every length has a static cache of its own size.
    "static": (_with(cache_implementation="static", disable_compile=True), 10),
}
"""What is run, and the most programs that may be made for it."""

QUICK = ("talks", "cropped")


def _check(run: Run, most: int, recorder: Recorder, how: str = "forward", dtype: torch.dtype = torch.float32) -> None:
    net = FAMILIES["llama"].net().to(dtype)
    expected, before = run(net), recorder.snapshot()
    if how == "forward":
        net.forward = torch.compile(net.forward, backend="dynaxla")
    else:
        net.compile(backend="dynaxla")
    with eager_programs():
        for mine, eager in itertools.zip_longest(run(net), expected):
            torch.testing.assert_close(mine, eager, rtol=1e-4, atol=1e-4)
    after = recorder.snapshot()
    assert 0 < after.compiles - before.compiles <= most
    assert (after.exact_shapes, after.fallbacks) == (before.exact_shapes, before.fallbacks)
    assert after.last_captures == before.last_captures


@pytest.mark.parametrize("use", [pytest.param(use, marks=() if use in QUICK else pytest.mark.long) for use in USES])
def test_results_are_eagers_from_few_programs(use: str, recorder: Recorder) -> None:
    _check(*USES[use], recorder)


@pytest.mark.long
def test_a_module_that_is_compiled_in_place(recorder: Recorder) -> None:
    _check(*USES["dynamic"], recorder, how="compile")


@pytest.mark.long
def test_16_bits(recorder: Recorder) -> None:
    _check(*USES["dynamic"], recorder, dtype=torch.bfloat16)


@pytest.mark.long
def test_attention_weights(recorder: Recorder) -> None:
    """By the attention that gives them; another warns at every call, which ends a graph."""
    weights = _with("attentions", "hidden_states")

    def run(net: PreTrainedModel) -> list[Tensor]:
        net.set_attn_implementation("eager")
        return weights(net)

    _check(run, 10, recorder)


@pytest.mark.long
def test_a_quantized_cache_needs_programs_by_the_logarithm_of_its_length(recorder: Recorder) -> None:
    """Its 8-bit floats are stored, cut and converted in the parts."""
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    net = FAMILIES["llama"].net()
    run = _with(**settings)
    expected, before = run(net), recorder.snapshot()
    net.forward = torch.compile(net.forward, backend="dynaxla")
    with eager_programs():
        assert all(torch.equal(mine, eager) for mine, eager in zip(run(net), expected, strict=True))
    after = recorder.snapshot()
    assert after.compiles - before.compiles <= 20
    assert after.exact_shapes == before.exact_shapes
    assert after.fallbacks[len(before.fallbacks) :] == ()
