"""A Pallas kernel inside a compiled PyTorch model: the gate of a feed-forward layer, silu(gate) * up, in one pass.

    python examples/pallas_kernel.py

On the CPU the kernel runs in Pallas's interpret mode; for a TPU it is the real one. With libtpu installed, the same
model is also compiled for a TPU v5e, which needs no TPU.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental import pallas as pl
from torch import Tensor
from torch.nn.functional import linear, silu

import dynaxla

ROWS = 128  # of one block: a TPU core works on one block at a time, in its own memory


@torch.library.custom_op("pallas_example::gate", mutates_args=())
def gate(x: Tensor, up: Tensor) -> Tensor:
    """silu(x) * up: two matrices of one shape and dtype. This is what runs in eager."""
    return silu(x) * up


@gate.register_fake
def _(x: Tensor, up: Tensor) -> Tensor:
    return torch.empty_like(x)


def gate_block(x: Any, up: Any, out: Any) -> None:
    """The kernel: reads a block of each operand, writes a block of the result."""
    wide = x[...].astype(jnp.float32)
    out[...] = (wide * jax.nn.sigmoid(wide) * up[...].astype(jnp.float32)).astype(out.dtype)


def run_kernel(x: jax.Array, up: jax.Array, interpret: bool) -> jax.Array:
    rows, width = x.shape
    block = pl.BlockSpec((min(rows, ROWS), width), lambda i: (i, 0))
    call = pl.pallas_call(
        gate_block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(pl.cdiv(rows, ROWS),),
        in_specs=[block, block],
        out_specs=block,
        interpret=interpret,
    )
    result: jax.Array = call(x, up)
    return result


def gate_in_jax(x: jax.Array, up: jax.Array) -> jax.Array:
    """The body of `gate`: only the branch of the platform it is lowered for is compiled."""
    real, interpreted = (partial(run_kernel, interpret=interpret) for interpret in (False, True))
    result: jax.Array = jax.lax.platform_dependent(x, up, tpu=real, default=interpreted)
    return result


def gate_backward(cotangent: jax.Array, x: jax.Array, up: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cotangents of x and up. Any JAX function will do; this one lets JAX derive it from the formula."""
    _, pull_back = jax.vjp(lambda x, up: jax.nn.silu(x) * up, x, up)
    derived: tuple[jax.Array, jax.Array] = pull_back(cotangent)
    return derived


def register() -> None:
    dynaxla.register_lowering(
        torch.ops.pallas_example.gate.default,
        gate_in_jax,
        pad_rule="elementwise",
        backward=gate_backward,
        dtypes=(torch.float32, torch.bfloat16),
    )


class FeedForward(torch.nn.Module):
    """What a layer of Llama does to every token: [tokens, size] to [tokens, size]."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(2 * hidden, size) * size**-0.5)
        self.down = torch.nn.Parameter(torch.randn(size, hidden) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        x, up = linear(x, self.up).chunk(2, dim=-1)
        return linear(gate(x.contiguous(), up.contiguous()), self.down)


def main() -> None:
    register()
    model = FeedForward(256, 512)
    compiled = torch.compile(model, backend="dynaxla", dynamic=True)
    before = dynaxla.read_metrics()
    for tokens in (60, 50, 100, 120):
        x = torch.randn(tokens, 256)
        result, expected = compiled(x), model(x)
        compiled(x).sum().backward()
        print(f"{tokens:4} tokens: largest difference to eager {(result - expected).abs().max():.1e}")
    after = dynaxla.read_metrics()
    compiles, eager_ops = after.compiles - before.compiles, after.eager_ops - before.eager_ops
    print(f"{compiles} executables for 4 sizes, forward and backward; {eager_ops} ops in eager")
    if importlib.util.find_spec("libtpu") is not None:
        for report in dynaxla.compile_for_target(model, (torch.randn(1024, 256),), target="tpu:v5e:1x1"):
            print(f"{report.name} for a TPU v5e: {report.compile_s:.1f} s, {report.memory.total_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
