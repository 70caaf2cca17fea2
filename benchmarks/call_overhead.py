"""Measures what a call costs beside its work, on small tensors of the host: in eager, by `jax.jit`, Inductor and dynaxla, and
what each layer of a compiled call takes.

python -m benchmarks.call_overhead

"Dynamo" is a call whose graph computes nothing and returns what was computed before, "and AOTAutograd" the same behind
AOTAutograd's wrapper, "PJRT" a run of the executable on buffers. What dynaxla takes beyond the last two is this package's.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from benchmarks.device_overhead import Many, of_many, of_one, read
from dynaxla.bench.bench_session import run_cases
from dynaxla.bench.cases import Case, Prepare
from dynaxla.options import Options
from dynaxla.runtime.pjrt_clients import cpu_client

Function = Callable[..., Any]


def of_ten(x: Any, *others: Any) -> Any:
    return of_many(x, others)


def return_at_once(module: torch.fx.GraphModule, _: object) -> Function:
    """A backend whose function returns what the graph gave once."""
    found: list[Any] = []

    def run(*args: Any) -> Any:
        if not found:
            found.append(module(*args))
        return found[0]

    return run


def return_behind_aot(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Function:
    backend = aot_autograd(fw_compiler=lambda graph, args: make_boxed_func(return_at_once(graph, args)))
    compiled: Function = backend(module, inputs)
    return compiled


def compile_by_jax(function: Function, inputs: Sequence[torch.Tensor]) -> Function:
    """A run of the executable of a function on buffers."""
    specs = [jax.ShapeDtypeStruct(tuple(each.shape), jnp.float32) for each in inputs]
    module = io.BytesIO()
    jax.jit(lambda *given: (function(*given),)).lower(*specs).compiler_ir("stablehlo").operation.write_bytecode(module)
    client = cpu_client()
    executable = client.compile(module.getvalue(), Options().compile_limits)
    buffers = [client.to_buffer(each) for each in inputs]
    return lambda: client.to_tensor(executable.run(buffers)[0])


def make_ways(
    function: Function, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor] = ()
) -> dict[str, Prepare]:
    """The ways to run a function of these inputs.

    Args:
        weights: of a module; JAX takes them as a second argument.
    """
    given = [jnp.asarray(each.detach().numpy()) for each in inputs]
    held = [[jnp.asarray(each.detach().numpy()) for each in weights]] if weights else []
    plain = of_many if weights else function
    jitted = jax.jit(plain)
    everything = [*inputs, *(each.detach() for each in weights)]
    run = compile_by_jax(of_ten if weights else function, everything)
    backends = {
        "Dynamo": return_at_once,
        "and AOTAutograd": return_behind_aot,
        "inductor": "inductor",
        "dynaxla": "dynaxla",
    }
    calls: dict[str, Callable[[], Function]] = {
        name: lambda backend=backend: torch.compile(function, backend=backend)  # type: ignore[misc]
        for name, backend in backends.items()
    }
    ways: dict[str, Prepare] = {"eager": lambda: torch.no_grad()(lambda _: function(*inputs))}
    ways["jax.jit"] = lambda: lambda _: jitted(*given, *held)
    ways["PJRT"] = lambda: lambda _: run()
    for name, prepare in calls.items():
        ways[name] = lambda prepare=prepare: _call(prepare(), inputs)  # type: ignore[misc]
    return ways


def _call(compiled: Function, inputs: Sequence[torch.Tensor]) -> Callable[[int], Any]:
    return torch.no_grad()(lambda _: compiled(*inputs))


def make_cases(given: argparse.Namespace) -> Iterator[Case]:
    model = Many(200)
    inputs = [torch.randn(4) for _ in range(10)]
    yield Case("one input", make_ways(of_one, inputs[:1]), read=read)
    yield Case("ten inputs", make_ways(of_ten, inputs), read=read)
    yield Case("one input and 200 parameters", make_ways(model, inputs[:1], list(model.parameters())), read=read)


if __name__ == "__main__":
    run_cases(__doc__, make_cases)
