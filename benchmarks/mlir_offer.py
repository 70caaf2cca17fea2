"""Calls of one op offered to torch-mlir: lowered, run and compared with eager, in forked processes that may die."""

from __future__ import annotations

import multiprocessing as mp
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch
from dynaxla.lowering.expansion import expand
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from benchmarks.op_calls import Call
from dynaxla.lowering import mlir, passes
from dynaxla.lowering.choice import unseen
from dynaxla.lowering.importer import ImportedModule, import_graph
from dynaxla.lowering.jax_mlir import artifact_version
from dynaxla.lowering.link import Linker
from dynaxla.ops.aten_calls import Form
from dynaxla.ops.record import Finding

LIMIT_S = 20.0  # for a module, and one more for each of its calls
DIED, HUNG = "the process died", "time limit"
REFUSED = "eager refuses this call when it is run again"  # which says nothing about torch-mlir
UNKNOWN = "failed to legalize operation 'torch.operator'"
BODY = "takes the JAX body: "
TOLERANCES = {  # relative, absolute
    torch.float64: (1e-7, 1e-7),
    torch.float32: (2e-5, 1e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.complex64: (2e-5, 1e-5),
}
NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Offer:
    """How calls are offered.

    Attributes:
        forms: the op's aten form, where it is not offered as it is.
        linker: knows the op's JAX body, with which results are compared that eager does not settle.
        findings: what the op's record says; calls of which one speaks alone are left out.
    """

    forms: dict[Any, Form]
    linker: Linker
    findings: tuple[Finding, ...] = ()

    def sweep(self, calls: Sequence[Call]) -> list[str | None]:
        """What is wrong with torch-mlir's results of each call, or None; a call that kills costs only itself."""
        calls = list(calls)
        if not calls:
            return []
        found = _in_child(lambda: self._check(calls), LIMIT_S + len(calls))
        if isinstance(found, list):
            return found
        if len(calls) == 1:
            return [found]
        middle = len(calls) // 2
        return self.sweep(calls[:middle]) + self.sweep(calls[middle:])

    def _check(self, calls: list[Call]) -> list[str | None]:
        """In the child: all in one module or, if that is refused, half of them."""
        found: list[str | None] = [self._outside(call) for call in calls]
        offered = [call for call, reason in zip(calls, found, strict=True) if reason is None]
        told = iter(self._offered(offered))
        return [next(told) if reason is None else reason for reason in found]

    def _outside(self, call: Call) -> str | None:
        try:
            call.run()
            graph = graph_of([call])
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
            return REFUSED
        node = next(node for node in graph.nodes if node.target is call.target)
        bound = (one.reason for one in self.findings if one.calls is not None and one.calls(node))
        reason = unseen(node) or next(bound, None)
        return None if reason is None else BODY + reason

    def _offered(self, calls: list[Call]) -> list[str | None]:
        if not calls:
            return []
        refused = self._refusals(calls)
        taken = iter(self._compared([call for call, reason in zip(calls, refused, strict=True) if reason is None]))
        return [next(taken) if reason is None else reason for reason in refused]

    def _refusals(self, calls: list[Call]) -> list[str | None]:
        """What torch-mlir says against each call; it is asked before anything is compiled, which takes much longer."""
        if self._refusal(calls) is None:
            return [None] * len(calls)
        found: list[str | None] = []
        for call in calls:
            found.append(self._refusal([call]))
            if found[0] is not None and UNKNOWN in found[0]:
                return [found[0]] * len(calls)
        return found

    def _refusal(self, calls: list[Call]) -> str | None:
        try:
            self._lowered(calls, by_body=False)
        except Exception as error:  # whatever it is, it is what is to be reported
            return _told(error)
        return None

    def _compared(self, calls: list[Call]) -> list[str | None]:
        if not calls:
            return []
        try:
            results = self._run(calls, by_body=False)
        except Exception as error:  # XLA refuses one
            if len(calls) > 1:
                middle = len(calls) // 2
                return self._compared(calls[:middle]) + self._compared(calls[middle:])
            return [_told(error)]
        wanted = [_tensors(call.run()) for call in calls]
        found = [difference(want, got) for want, got in zip(wanted, results, strict=True)]
        narrow = (any(x.dtype in NARROW for x in want) for want in wanted)
        told = [i for i, (reason, is_narrow) in enumerate(zip(found, narrow, strict=True)) if reason or is_narrow]
        for i, body in zip(told, self._bodies([calls[i] for i in told]), strict=True):
            if found[i] is None:
                found[i] = lost_roundings(wanted[i], results[i], body)
            elif difference(body, results[i]) is None:  # eager is at fault, or what it gives is another's
                found[i] = None
        return found

    def _bodies(self, calls: list[Call]) -> list[list[torch.Tensor]]:
        """What the JAX body gives of each call; eager's results where it cannot be had."""
        try:
            return self._run(calls, by_body=True)
        except Exception:  # a call that the record refuses
            return [_tensors(call.run()) for call in calls]

    def _run(self, calls: list[Call], *, by_body: bool) -> list[list[torch.Tensor]]:
        if not calls:
            return []
        artifact, imported = self._lowered(calls, by_body=by_body)
        linked = self.linker.link(artifact, imported.calls, "cpu", "HIGHEST")
        outputs = iter(_execute(linked.bytecode, [tensor for call in calls for tensor in call.tensors]))
        return [[next(outputs) for _ in _tensors(call.run())] for call in calls]

    def _lowered(self, calls: list[Call], *, by_body: bool) -> tuple[bytes, ImportedModule]:
        graph = graph_of(calls)
        expanded = expand(graph, {} if by_body else self.forms, lambda node: True)
        imported = import_graph(mlir.load(), expanded.graph, lambda node: by_body)
        lowered = passes.lower(imported.bytecode, artifact_version())
        if isinstance(lowered, passes.Rejected):
            raise RuntimeError(lowered.diagnostics)
        return lowered.artifact, imported


def graph_of(calls: Sequence[Call]) -> Graph:
    """A graph of placeholders, the calls and their results, with fake tensors in `meta["val"]`."""
    mode, graph = FakeTensorMode(), Graph()
    inputs = [_placeholders(graph, mode, call) for call in calls]
    results: list[Node] = []
    for call, leaves in zip(calls, inputs, strict=True):
        args, kwargs = pytree.tree_unflatten(leaves, call.treespec)
        node = graph.call_function(call.target, args, kwargs)
        fakes = [x.meta["val"] if isinstance(x, Node) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(fakes, call.treespec)
        with mode:
            values = call.target(*args, **kwargs)
        several = isinstance(values, (tuple, list))
        node.meta["val"] = tuple(values) if several else values
        results += _items(graph, node) if several else [node]
    graph.output(tuple(results))
    return graph


def _placeholders(graph: Graph, mode: FakeTensorMode, call: Call) -> list[Any]:
    leaves: list[Any] = []
    for leaf in call.leaves:
        if isinstance(leaf, torch.Tensor):
            node = graph.placeholder(f"x{len(graph.nodes)}")
            node.meta["val"] = mode.from_tensor(leaf.resolve_conj().resolve_neg().contiguous())
            leaves.append(node)
        else:
            leaves.append(leaf)
    return leaves


def _items(graph: Graph, node: Node) -> list[Node]:
    items = []
    for index, value in enumerate(node.meta["val"]):
        if isinstance(value, torch.Tensor):
            item = graph.call_function(operator.getitem, (node, index))
            item.meta["val"] = value
            items.append(item)
    return items


def difference(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> str | None:
    """What is wrong with `actual`, or None."""
    for want, got in zip(expected, actual, strict=True):
        if (want.dtype, want.shape) != (got.dtype, got.shape):
            return f"{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
        relative, absolute = TOLERANCES.get(want.dtype, (0.0, 0.0))
        close = torch.isclose(got, want.resolve_conj(), relative, absolute, equal_nan=True)
        if not close.all():
            index = tuple(int(i) for i in (~close).nonzero()[0])
            return f"{int((~close).sum())} of {close.numel()} values differ, {got[index]} not {want[index]}"
    return None


def lost_roundings(expected: list[torch.Tensor], actual: list[torch.Tensor], body: list[torch.Tensor]) -> str | None:
    """What says that `actual`, of 16 bits, is farther from eager than the JAX body's results, or None."""
    for want, got, ours in zip(expected, actual, body, strict=True):
        if want.dtype in NARROW and (far := _farthest(got, want)) > _farthest(ours, want):
            return f"{far:.1e} of the value off eager; the JAX body {_farthest(ours, want):.1e}"
    return None


def _farthest(got: torch.Tensor, want: torch.Tensor) -> float:
    finite = want.isfinite() & got.isfinite()
    wide, exact = got[finite].double(), want[finite].double()
    return float(((wide - exact).abs() / exact.abs().clamp(min=1e-6)).max()) if finite.any() else 0.0


def _told(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "error:" in line or "failed to legalize" in line] or lines
    return f"refused: {told[0].strip() if told else type(error).__name__}"


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@cache
def _client() -> Any:
    from jaxlib import xla_client

    return xla_client.make_cpu_client()


def _execute(module: bytes, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compiles and runs a module on a CPU client of this process."""
    import jax
    import numpy as np
    from jaxlib import _jax

    device = _client().local_devices()[0]
    with jax.enable_x64(True):
        executable = _client().compile_and_load(module, _jax.DeviceList((device,)))
        buffers = [jax.device_put(_to_numpy(t), device) for t in tensors]
        outputs = executable.execute_sharded(buffers).disassemble_into_single_device_arrays()
    return [_from_numpy(np.asarray(shards[0])) for shards in outputs]


def _to_numpy(tensor: torch.Tensor) -> Any:
    import ml_dtypes

    plain = tensor.resolve_conj().resolve_neg().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return plain.numpy()


def _from_numpy(array: Any) -> torch.Tensor:
    import numpy as np

    writable = np.array(array)
    if writable.dtype.name == "bfloat16":
        return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(writable)


def _in_child(work: Callable[[], list[str | None]], limit_s: float) -> list[str | None] | str:
    """The result of the work in a forked process, or how that ended."""
    here, there = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=_send, args=(work, there))
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(limit_s) else HUNG  # type: ignore[no-any-return]
    except EOFError:
        return DIED
    finally:
        process.kill()
        process.join()


def _send(work: Callable[[], list[str | None]], connection: Connection) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.dup2(null, 1)
    connection.send(work())
    connection.close()
