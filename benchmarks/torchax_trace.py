"""Writes a model's computation as JAX has it, by torchax's trace of the same module: StableHLO for a TPU, as text.

    python -m benchmarks.torchax_trace MODEL FILE [--train]

A process of its own, as torchax takes torch's name for devices of others for itself. Two ops are written by hand in JAX:
attention, since torchax rounds the scores to bfloat16, which neither torch's kernels nor `jax.nn` do, and products of groups,
of which torchax has none. A training step gives the mean of the result and its gradients of the parameters.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import torch

from benchmarks.tpu_models import Built, build


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--train", action="store_true")
    given = parser.parse_args()
    if importlib.util.find_spec("torchax") is None:
        print("torchax is not installed: pip install 'dynaxla[bench]'", file=sys.stderr)
        return 2
    given.file.write_text(trace_in_jax(build(given.model), train=given.train))
    return 0


def trace_in_jax(built: Built, *, train: bool) -> str:
    """The computation of a call, or of a training step; what the call writes is donated and given back."""
    env = load_torchax().default_env()
    state = _describe({**dict(built.model.named_buffers()), **dict(built.model.named_parameters())})
    parameters = {name: state.pop(name) for name, _ in built.model.named_parameters()}

    def call(parameters: Any, buffers: Any, fixed: Any, written: Any) -> Any:
        parameters, buffers, fixed, written = env.j2t_iso((parameters, buffers, fixed, written))
        with env:
            result = torch.func.functional_call(built.model, {**parameters, **buffers}, (*fixed, *written))
        return env.t2j_iso((result, written))

    def step(parameters: Any, *others: Any) -> Any:
        return jax.value_and_grad(lambda own: call(own, *others)[0].astype(jnp.float32).mean())(parameters)

    split = len(built.arguments) if built.first_written is None else built.first_written
    given = [_describe(built.arguments[:split]), _describe(built.arguments[split:])]
    jitted = jax.jit(step if train else call, donate_argnums=(3,))
    traced = jitted.trace(parameters, state, *given)
    return str(traced.lower(lowering_platforms=("tpu",)).as_text())


def load_torchax() -> ModuleType:
    """torchax, whose table of ops names overloads that torch no longer has: these find nothing."""
    with _forgive_overloads():
        import torchax

        env = torchax.default_env()

    def attend(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **how: Any) -> Any:
        del dropout_p
        how.pop("enable_gqa", None)
        operands = (jnp.swapaxes(each.jax(), 1, 2) for each in (query, key, value))
        mask = None if attn_mask is None else attn_mask.jax()
        name = "mask" if mask is None or mask.dtype == jnp.bool_ else "bias"
        return env.j2t_iso(jnp.swapaxes(jax.nn.dot_product_attention(*operands, **{name: mask}, **how), 1, 2))

    def multiply_groups(rows: Any, matrices: Any, offs: Any, bias: None = None, out_dtype: Any = None) -> Any:
        del bias, out_dtype  # Mixtral has neither
        sizes = jnp.diff(offs.jax().astype(jnp.int32), prepend=jnp.zeros(1, jnp.int32))
        return env.j2t_iso(jax.lax.ragged_dot(rows.jax(), matrices.jax(), sizes))

    env.override_op_definition(torch.nn.functional.scaled_dot_product_attention, attend)
    for op in (torch._grouped_mm, torch.nn.functional.grouped_mm):
        env.override_op_definition(op, multiply_groups)
    return torchax  # type: ignore[no-any-return]


@contextmanager
def _forgive_overloads() -> Iterator[None]:
    """Names of overloads that ops do not have are values that no op equals."""
    packet: Any = torch._ops.OpOverloadPacket
    read = packet.__getattr__

    def forgive(self: Any, name: str) -> Any:
        try:
            return read(self, name)
        except AttributeError as error:
            if "no overload name" not in str(error):
                raise
            return str(self), name

    with mock.patch.object(packet, "__getattr__", forgive):
        yield


def _describe(tensors: Any) -> Any:
    """What JAX makes of tensors: 64-bit numbers are 32-bit ones there."""

    def describe(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(tensor.shape), jax.dtypes.canonicalize_dtype(_name(tensor.dtype)))

    return jax.tree.map(describe, tensors, is_leaf=lambda leaf: isinstance(leaf, torch.Tensor))


def _name(dtype: torch.dtype) -> Any:
    return jnp.dtype(str(dtype).removeprefix("torch."))


if __name__ == "__main__":
    sys.exit(main())
