"""JAX's attention kernels for a TPU, interpreted on the CPU: the numbers of the body that XLA compiles."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from dynaxla.custom_ops import internal
from dynaxla.ops import attention as bodies
from dynaxla.ops import segment_attention, splash_attention
from dynaxla.ops.table import core_table

LENGTHS = {"square": (256, 256), "more keys": (128, 384), "more queries": (384, 256)}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    make = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", make)
    monkeypatch.setattr(splash_attention, "_LEAST_SCORES_BYTES", 0)
    with jax.enable_x64(True):
        yield


def operands(lengths: tuple[int, int], heads: int = 4, groups: int = 2, sizes: tuple[int, int] = (64, 64)) -> Any:
    random = np.random.default_rng(0)
    rows, columns = lengths
    shapes = (
        (2, heads, rows, sizes[0]),
        (2, groups, columns, sizes[0]),
        (2, groups, columns, sizes[1]),
        (2, heads, rows, sizes[1]),
    )
    return [jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes]


def check(
    on_tpu: Any, body: Any, on_tpu_backward: Any, backward: Any, tensors: Any, *masks: Any, is_causal: bool
) -> None:
    """Compares with the body in float32: outputs and logsumexp, and the gradients of query, key and value."""
    *given, grad = tensors
    wide = [x.astype(jnp.float32) for x in tensors]
    found, expected = on_tpu(*given, *masks, is_causal, None), body(*wide[:3], *masks, is_causal, None)
    grads = on_tpu_backward(grad, *given, *masks, *found, is_causal, None)
    expected_grads = backward(wide[3], *wide[:3], *masks, *expected, is_causal, None)
    assert (found[0].dtype, found[1].dtype) == (jnp.bfloat16, jnp.float32)
    for result, wanted in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        assert result.shape == wanted.shape
        # Rounded operands, and a rounded query times the scale: two roundings of bfloat16.
        np.testing.assert_allclose(np.asarray(result, np.float32), wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_kernels_give_the_numbers_of_the_body(lengths: tuple[int, int], is_causal: bool) -> None:
    check(
        bodies.attention_on_tpu,
        bodies.attention,
        bodies.attention_backward_on_tpu,
        bodies.attention_backward,
        operands(lengths),
        None,
        is_causal=is_causal,
    )


@pytest.mark.parametrize(("heads", "groups", "sizes"), [(2, 2, (128, 128)), (4, 1, (64, 128)), (3, 3, (32, 32))])
def test_heads_and_their_sizes(heads: int, groups: int, sizes: tuple[int, int]) -> None:
    tensors = operands((256, 256), heads, groups, sizes)
    check(
        bodies.attention_on_tpu,
        bodies.attention,
        bodies.attention_backward_on_tpu,
        bodies.attention_backward,
        tensors,
        None,
        is_causal=True,
    )


KEPT = np.arange(256)[None, None, None] < np.array([256, 70])[:, None, None, None]
LEFT = np.arange(256)[None, None, None] >= np.array([0, 70])[:, None, None, None]
DOCUMENTS = np.cumsum(np.arange(256) % 100 == 99)
SEGMENTS: dict[str, tuple[list[Any], list[Any]]] = {
    "padding": ([KEPT], []),
    "padding on the left": ([LEFT], []),  # with a causal mask some queries attend to nothing
    "nothing at all": ([np.zeros((1, 1, 1, 256), bool)], []),
    "two conditions": ([KEPT, LEFT], []),
    "documents": ([], [DOCUMENTS[None, None, :, None], DOCUMENTS[None, None, None]]),
    "documents and padding": ([KEPT], [DOCUMENTS[None, None, :, None], DOCUMENTS[None, None, None]]),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SEGMENTS)
def test_segments(name: str, is_causal: bool) -> None:
    kept, ids = ([jnp.asarray(each) for each in some] for some in SEGMENTS[name])
    check(
        segment_attention.attention_of_segments_on_tpu,
        segment_attention.attention_of_segments,
        segment_attention.attention_of_segments_backward_on_tpu,
        segment_attention.attention_of_segments_backward,
        operands((256, 256)),
        kept,
        ids,
        is_causal=is_causal,
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("keeps", ["all", "the first", "the last", "none"])
def test_the_output_alone(keeps: str, lengths: tuple[int, int], is_causal: bool) -> None:
    *given, _ = operands(lengths)
    places = np.arange(lengths[1])[None, None, None]
    bounds = np.array([lengths[1], 70])[:, None, None, None]
    kept = {"all": [], "the first": [places < bounds], "the last": [places >= bounds - 70], "none": [places < 0]}[keeps]
    masks = [jnp.asarray(each) for each in kept], []
    found, unread = segment_attention.attention_of_segments_on_tpu(*given, *masks, is_causal, None, saves=False)
    wide = [x.astype(jnp.float32) for x in given]
    expected, logsumexp = segment_attention.attention_of_segments(*wide, *masks, is_causal, None)
    assert (found.dtype, unread.shape, unread.dtype) == (jnp.bfloat16, logsumexp.shape, logsumexp.dtype)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=2e-2, atol=2e-2)


def test_a_query_that_attends_to_nothing_gives_zeros() -> None:
    query, key, value, grad = operands((256, 256))
    kept = [jnp.asarray(LEFT)]
    output, logsumexp = segment_attention.attention_of_segments_on_tpu(query, key, value, kept, [], True, None)
    assert not output[1, :, :70].any()
    assert jnp.isneginf(logsumexp[1, :, :70]).all()
    grads = segment_attention.attention_of_segments_backward_on_tpu(
        grad, query, key, value, kept, [], output, logsumexp, True, None
    )
    assert all(jnp.isfinite(each).all() for each in grads)
    assert not grads[0][1, :, :70].any()


@pytest.mark.parametrize("told", [False, True])
def test_without_a_kernel_a_gradient_computes_its_scores_again(monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    """XLA would keep the scores of the forward for it, where one program has both."""
    monkeypatch.setattr(splash_attention, "takes", lambda *of_call: False)
    query, key, value, grad = operands((7, 9))
    out, logsumexp = bodies.attention(query, key, value, None, True, None)
    masks = ([], []) if told else (None,)
    of_tpu, body = (
        (segment_attention.attention_of_segments_backward_on_tpu, segment_attention.attention_of_segments_backward)
        if told
        else (bodies.attention_backward_on_tpu, bodies.attention_backward)
    )

    def differentiate(query: Any, run: Any) -> Any:
        return run(grad, query, key, value, *masks, out, logsumexp, True, None)

    for found, expected in zip(differentiate(query, of_tpu), differentiate(query, body), strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(expected, np.float32))
    barriers = [
        str(jax.make_jaxpr(differentiate, 1)(query, run)).count("optimization_barrier") for run in (of_tpu, body)
    ]
    assert barriers == [1, 0]


def test_what_the_kernels_take() -> None:
    takes = splash_attention.takes
    assert takes((1, 2, 256, 64), (1, 2, 256, 64), "bfloat16")
    assert not takes((1, 2, 256, 64), (1, 2, 256, 64), "float32")  # the kernels multiply in one pass
    assert not takes((1, 2, 200, 64), (1, 2, 256, 64), "bfloat16")
    assert not takes((2, 2, 256, 64), (1, 2, 256, 64), "bfloat16")


def test_small_scores_are_left_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not splash_attention.takes((1, 2, 256, 64), (1, 2, 256, 64), "bfloat16")
    assert splash_attention.takes((1, 32, 2048, 64), (1, 8, 2048, 64), "bfloat16")


def test_only_programs_for_one_tpu_have_kernels() -> None:
    record = core_table().records[internal.ATTENTION]
    assert record.body_on("tpu", is_sharded=False) is bodies.attention_on_tpu
    assert record.body_on("tpu", is_sharded=True) is bodies.attention
    assert record.body_on("cpu", is_sharded=False) is bodies.attention
