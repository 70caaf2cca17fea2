"""Writes into part of an input are made in its memory: eager's values, the same tensor, and no copy of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, StaticCache

import dynaxla
from dynaxla.observe.recorder import Recorder
from dynaxla.options import Options
from dynaxla.passes import in_place_writes
from dynaxla.pipeline import Pipeline
from dynaxla.runtime import pjrt_clients
from dynaxla.runtime.client import Executable
from tests.generation.test_generate import _build, _prompt
from tests.tolerances import assert_close

SHAPE = (2, 4, 64, 8)
CACHE_BYTES = 2 * 4 * 64 * 8 * 4


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place_writes, "LEAST_BYTES", 0)


@pytest.fixture
def executables(monkeypatch: pytest.MonkeyPatch) -> list[Executable]:
    """Those that are compiled within the test."""
    found: list[Executable] = []
    compile_graph = Pipeline.compile

    def compile_and_note(self: Pipeline, *args: Any, **kwargs: Any) -> Executable:
        found.append(compile_graph(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(Pipeline, "compile", compile_and_note)
    return found


Write = Callable[[Tensor, Tensor, Tensor], None]


def _index_put(cache: Tensor, at: Tensor, x: Tensor) -> None:
    cache[:, :, at] = x


def _of_rows(cache: Tensor, at: Tensor, x: Tensor) -> None:
    cache[torch.arange(2), :, at] = x[:, :, 0]


def _of_a_slice(cache: Tensor, at: Tensor, x: Tensor) -> None:
    cache[:, :, 5:7] = x


def _of_a_place(cache: Tensor, at: Tensor, x: Tensor) -> None:
    cache[:, :, -3] = x[:, :, 0]


def _of_a_slice_of_a_place(cache: Tensor, at: Tensor, x: Tensor) -> None:
    cache[1, :, 5:7] = x[0]


def _of_places_of_a_layer(cache: Tensor, at: Tensor, x: Tensor) -> None:
    cache[1, :, at] = x[0]


def _scatter(cache: Tensor, at: Tensor, x: Tensor) -> None:
    cache.scatter_(2, at.view(1, 1, 2, 1).expand(2, 4, 2, 8), x)


WRITES: dict[str, Write] = {
    "index_put": _index_put,
    "rows": _of_rows,
    "index_copy": lambda cache, at, x: cache.index_copy_(2, at, x),  # type: ignore[dict-item, return-value]
    "index_fill": lambda cache, at, x: cache.index_fill_(2, at, 3.0),  # type: ignore[dict-item, return-value]
    "scatter": _scatter,
    "slice": _of_a_slice,
    "select": _of_a_place,
    "slice of select": _of_a_slice_of_a_place,
    "index_put of select": _of_places_of_a_layer,
}


def check(step: Callable[..., Any], shapes: list[tuple[int, ...]], *, steps: int = 3, **options: Any) -> None:
    """Steps of a compiled function and of eager, on caches of their own; the caches' memory stays theirs."""
    compiled = torch.compile(step, backend="dynaxla", options=options)
    mine = [torch.randn(shape) for shape in shapes]
    eager = [cache.clone() for cache in mine]
    places = [cache.data_ptr() for cache in mine]
    for i in range(steps):
        at, x = torch.tensor([3 * i, 3 * i + 1]), torch.randn(2, 4, 2, 8)
        assert_close(compiled(*mine, at, x), step(*eager, at, x))
        for cache, other in zip(mine, eager, strict=True):
            assert_close(cache, other)
    assert [cache.data_ptr() for cache in mine] == places


@pytest.mark.parametrize("name", WRITES)
def test_a_write_alone_copies_nothing(name: str, executables: list[Executable], recorder: Recorder) -> None:
    def step(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
        WRITES[name](cache, at, x * 2)
        return x.sum()

    with recorder.expect(eager_ops=0):
        check(step, [SHAPE])
    for executable in executables:
        use = executable.memory_use()
        assert max(use.arguments_bytes, use.outputs_bytes, use.temporaries_bytes) < CACHE_BYTES / 4


@pytest.mark.parametrize("name", WRITES)
def test_what_reads_the_cache_afterwards_sees_the_write(name: str, executables: list[Executable]) -> None:
    def step(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
        WRITES[name](cache, at, x * 2)
        return F.scaled_dot_product_attention(x, cache, cache)

    check(step, [SHAPE])
    assert len(executables) == (1 if name == "index_fill" else 2), "what is written, and what reads"
    for executable in executables:
        assert executable.memory_use().outputs_bytes < CACHE_BYTES / 4


def test_layers() -> None:
    def step(k1: Tensor, v1: Tensor, k2: Tensor, v2: Tensor, at: Tensor, x: Tensor) -> Tensor:
        for keys, values in ((k1, v1), (k2, v2)):
            keys.index_copy_(2, at, x * 2)
            values.index_copy_(2, at, x + 1)
            x = x + F.scaled_dot_product_attention(x, keys, values)
        return x

    check(step, [SHAPE] * 4)


def _reads_before(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
    before = cache.sum((0, 2))
    cache[:, :, at] = x
    return before + cache.sum((0, 2))


def _writes_twice(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
    cache[:, :, at] = x
    cache[:, :, at + 1] = x * 2
    return cache.sum((0, 2))


def _accumulates(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
    cache.index_put_((torch.tensor([0, 0, 1]),), x[0, 0, 0, 0].expand(1), accumulate=True)
    return cache.sum((0, 2))


def _moves(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
    cache[:, :, :2] = cache[:, :, 1:3]
    return cache.sum((0, 2))


def _writes_what_it_reads(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
    cache[:, :, at] = cache.mean() + x
    return cache.sum((0, 2))


def _returns_it(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
    cache[:, :, at] = x
    return cache


def _returns_a_view(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
    cache[:, :, at] = x
    return cache[:, 1:]


def _overwrites(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
    cache[:, :, at] = x
    cache.copy_(cache * 2)
    return cache.sum((0, 2))


STEPS = (
    _reads_before,
    _writes_twice,
    _accumulates,
    _moves,
    _writes_what_it_reads,
    _returns_it,
    _returns_a_view,
    _overwrites,
)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("options", [{}, {"executor": "eager"}])
def test_other_steps(step: Callable[..., Any], options: dict[str, Any]) -> None:
    check(step, [SHAPE], **options)


def _attend(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
    cache[:, :, at] = x
    return F.scaled_dot_product_attention(x, cache, cache)


def test_a_cache_that_is_a_view_of_a_larger_one() -> None:
    compiled = torch.compile(_attend, backend="dynaxla")
    mine = torch.randn(3, 2, 64, 4, 8)
    eager, x = mine.clone(), torch.randn(2, 4, 2, 8)
    for at in (torch.tensor([3, 4]), torch.tensor([7, 9])):
        assert_close(compiled(mine[1].transpose(1, 2), at, x), _attend(eager[1].transpose(1, 2), at, x))
        assert torch.equal(mine, eager)


def test_two_views_of_one_cache() -> None:
    def step(one: Tensor, other: Tensor, at: Tensor, x: Tensor) -> Tensor:
        one[:, :, at] = x
        return other.sum((0, 2)) + one.sum((0, 2))

    compiled = torch.compile(step, backend="dynaxla")
    mine = torch.randn(SHAPE)
    eager, at, x = mine.clone(), torch.tensor([2, 3]), torch.randn(2, 4, 2, 8)
    for _ in range(2):
        assert_close(compiled(mine, mine[:1], at, x), step(eager, eager[:1], at, x))
        assert torch.equal(mine, eager)


def test_a_result_that_is_copied_into_the_cache_stays_apart() -> None:
    """Where eager's result has memory of its own, a later write into the cache must not change it."""

    def step(cache: Tensor, at: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        updated = cache.index_copy(2, at, x)
        cache.copy_(updated)
        view = cache[:, :, 3:5]
        return updated, view.clone()

    mine = torch.randn(SHAPE)
    results = torch.compile(step, backend="dynaxla")(mine, torch.tensor([3, 4]), torch.randn(2, 4, 2, 8))
    before = [result.clone() for result in results]
    mine.zero_()
    assert all(map(torch.equal, results, before))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_and_gradients(mode: Any) -> None:
    layer = nn.Linear(8, 8)

    def step(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
        x = layer(x)
        cache[:, :, at] = x.detach()
        return F.scaled_dot_product_attention(x, cache, cache)

    with mode():
        check(step, [SHAPE])


def test_a_cache_that_grows() -> None:
    options: dict[str, Any] = {"buckets": dynaxla.Explicit((16, 32, 64))}
    compiled = torch.compile(_attend, backend="dynaxla", dynamic=True, options=options)
    at, x = torch.tensor([2, 3]), torch.randn(2, 4, 2, 8)
    for length in (20, 24, 31, 40):
        mine = torch.randn(2, 4, length, 8)
        eager = mine.clone()
        assert_close(compiled(mine, at, x), _attend(eager, at, x))
        assert torch.equal(mine, eager)


@pytest.mark.parametrize("on_miss", ["eager", "next_bucket", "background"])
def test_a_frozen_step_writes_once(on_miss: Any) -> None:
    def step(cache: Tensor, at: Tensor, x: Tensor) -> Tensor:
        cache[:, :, at] = x + 1
        return cache.sum((0, 1, 2)) + x.sum((0, 1, 2))

    compiled = torch.compile(step, backend="dynaxla", dynamic=True)
    compiled(torch.randn(SHAPE), torch.tensor([2, 3]), torch.randn(2, 4, 2, 8))
    dynaxla.freeze(compiled, on_miss=on_miss)
    for length in (64, 700):
        mine = torch.randn(2, 4, length, 8)
        eager, at, x = mine.clone(), torch.tensor([2, 3]), torch.randn(2, 4, 2, 8)
        assert_close(compiled(mine, at, x), step(eager, at, x))
        assert torch.equal(mine, eager)


def test_a_place_that_is_none_raises() -> None:
    compiled = torch.compile(_attend, backend="dynaxla")
    mine, x = torch.randn(SHAPE), torch.randn(2, 4, 2, 8)
    with pytest.raises((IndexError, RuntimeError)):
        compiled(mine, torch.tensor([2, 64]), x)


def test_generation_with_a_static_cache(executables: list[Executable]) -> None:
    """A step of a transformers model costs no copy of its cache, and its logits are eager's."""
    net = _build("llama")
    assert isinstance(net, LlamaForCausalLM)
    prompt = _prompt(1)["input_ids"]
    logits = []
    for forward in (net.forward, torch.compile(net.forward, backend="dynaxla", options={"fallback": "error"})):
        cache = StaticCache(config=net.config, max_cache_len=512)
        found = []
        with torch.no_grad():
            net(prompt, past_key_values=cache, use_cache=True)
            for token in range(4):
                position = torch.tensor([prompt.shape[1] + token])
                given = {"past_key_values": cache, "use_cache": True, "cache_position": position}
                found.append(forward(torch.tensor([[token + 5]]), position_ids=position[None], **given).logits)
        logits.append(torch.cat(found))
    assert_close(logits[1], logits[0])
    layer = 2 * 512 * 8 * 4  # bytes of one layer's keys
    for executable in executables:
        assert executable.memory_use().outputs_bytes < layer


def test_pjrt_copies_a_donated_buffer_of_torchs() -> None:
    """Why torch makes these writes. When this fails, PJRT can make them, and `passes/in_place_writes.py` has had its day."""
    with jax.enable_x64(True):
        write = jax.jit(lambda cache, x: jax.lax.dynamic_update_slice(cache, x, (3, 0)), donate_argnums=0)
        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 16), (1, 16))]
        module = write.lower(*shapes).as_text()
    assert "tf.aliasing_output" in module
    client = pjrt_clients.cpu_client()
    executable = client.compile(module.encode(), Options().compile_limits)
    cache, x = torch.zeros(64, 16), torch.ones(1, 16)
    (result,) = executable.run([client.to_buffer(cache), client.to_buffer(x)])
    written = client.to_tensor(result)
    assert written.sum() == 16
    assert cache.sum() == 0
    assert written.data_ptr() != cache.data_ptr()
