"""Which overloads does torch-mlir itself lower right? Every collected call of every row, lowered, run and compared.

    python benchmarks/mlir_sweep.py [--tables NAME ...] [--only REGEX] [--skip REGEX] [--new] [--out FILE]

Writes `results/mlir_sweep.json` (overload -> calls, right dtypes, failures) and prints a line for
each overload. Each runs in a forked process with a time limit: torch-mlir aborts on some inputs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing as mp
import os
import pkgutil
import re
from collections import Counter
from collections.abc import Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import dynaxla.ops.tables
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from benchmarks.op_calls import Call, collect
from dynaxla.lowering import mlir

CALL_LIMIT_S = 10.0
FAILURES_KEPT = 3
DIED, HUNG = "the process died", "time limit"
REFUSED = "eager refuses this call when it is run again"  # which says nothing about torch-mlir
TO_TORCH_BACKEND = (
    "builtin.module(func.func(torch-match-quantized-custom-ops), "
    "torchdynamo-export-to-torch-backend-pipeline{extra-library=})"
)
TO_STABLEHLO = "builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})"
TOLERANCES = {  # relative, absolute
    torch.float64: (1e-7, 1e-7),
    torch.float32: (2e-5, 1e-5),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.complex64: (2e-5, 1e-5),
}


def graph_of(call: Call) -> torch.fx.Graph:
    """Return a graph of placeholders, the one call and its outputs, with fake tensors in `meta["val"]`."""
    mode = FakeTensorMode()
    graph = torch.fx.Graph()
    leaves = []
    for leaf in call.leaves:
        if isinstance(leaf, torch.Tensor):
            node = graph.placeholder(f"x{len(leaves)}")
            node.meta["val"] = mode.from_tensor(leaf)
            leaves.append(node)
        else:
            leaves.append(leaf)
    args, kwargs = pytree.tree_unflatten(leaves, call.treespec)
    node = graph.call_function(call.target, args, kwargs)
    fakes = [x.meta["val"] if isinstance(x, torch.fx.Node) else x for x in leaves]
    args, kwargs = pytree.tree_unflatten(fakes, call.treespec)
    with mode:
        node.meta["val"] = call.target(*args, **kwargs)
    if isinstance(node.meta["val"], (tuple, list)):
        node.meta["val"] = tuple(node.meta["val"])
        graph.output(tuple(_get_items(graph, node)))
    else:
        graph.output((node,))
    return graph


def _get_items(graph: torch.fx.Graph, node: torch.fx.Node) -> list[torch.fx.Node]:
    import operator

    items = []
    for index, value in enumerate(node.meta["val"]):
        if isinstance(value, torch.Tensor):
            item = graph.call_function(operator.getitem, (node, index))
            item.meta["val"] = value
            items.append(item)
    return items


def lower(call: Call) -> bytes:
    """Return the call as a portable artifact of pure StableHLO, lowered by torch-mlir alone."""
    loaded = mlir.load()
    context = loaded.context()
    importer = loaded.fx_importer.FxImporter(context=context, config_check=False)
    importer.import_stateless_graph(graph_of(call), func_name="main")
    module = importer.module
    with context:
        for pipeline in (TO_TORCH_BACKEND, TO_STABLEHLO):
            loaded._pass_manager.parse(pipeline).run(module.operation)
        text = module.operation.get_asm().replace("arith.constant", "stablehlo.constant")
        pure = loaded.ir.Module.parse(text, context)
        return bytes(loaded._stablehlo.serialize_portable_artifact(pure, "1.17.0"))


def run(client: Any, artifact: bytes, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Compile and run an artifact on the CPU client."""
    import jax
    import numpy as np
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo
    from jaxlib import _jax

    context = ir.Context()
    stablehlo.register_dialect(context)
    with context:
        module = str(stablehlo.deserialize_portable_artifact(context, artifact))
    devices = _jax.DeviceList((client.local_devices()[0],))
    with jax.enable_x64(True):
        executable = client.compile_and_load(module, devices)
        buffers = [jax.device_put(_to_numpy(t), client.local_devices()[0]) for t in tensors]
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


def difference(expected: list[torch.Tensor], actual: list[torch.Tensor]) -> str | None:
    """Return what is wrong with `actual`, or None."""
    if len(expected) != len(actual):
        return f"{len(actual)} results, not {len(expected)}"
    for want, got in zip(expected, actual, strict=True):
        if (want.dtype, want.shape) != (got.dtype, got.shape):
            return f"{got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"
        relative, absolute = TOLERANCES.get(want.dtype, (0.0, 0.0))
        close = torch.isclose(got.to(want.dtype), want.resolve_conj(), relative, absolute, equal_nan=True)
        if not close.all():
            index = tuple(int(i) for i in (~close).nonzero()[0])
            return f"{int((~close).sum())} of {close.numel()} values differ, {got[index]} not {want[index]}"
    return None


def check(client: Any, call: Call) -> str | None:
    """Return why torch-mlir gets this call wrong, or None."""
    try:
        results = call.run()
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return REFUSED
    expected = [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
    try:
        return difference(expected, run(client, lower(call), call.tensors))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        told = [line for line in lines if "error:" in line or "failed to legalize" in line] or lines
        return f"{type(error).__name__}: {told[0].strip()[:160] if told else ''}"


def _worker(calls: list[Call], start: int, connection: Connection) -> None:
    from jaxlib import xla_client

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.dup2(null, 1)
    client = xla_client.make_cpu_client()
    for call in calls[start:]:
        connection.send(check(client, call))
    connection.close()


def sweep(calls: list[Call]) -> list[str | None]:
    """Check every call in forked processes; one that dies or hangs costs only its own call."""
    found: list[str | None] = []
    while len(found) < len(calls):
        here, there = mp.Pipe(duplex=False)
        process = mp.get_context("fork").Process(target=_worker, args=(calls, len(found), there))
        process.start()
        there.close()
        try:
            while len(found) < len(calls):
                if not here.poll(CALL_LIMIT_S):
                    found.append(HUNG)
                    break
                found.append(here.recv())
        except EOFError:
            found.append(DIED)
        process.kill()
        process.join()
    return found


def wanted_overloads(options: argparse.Namespace, known: Collection[str]) -> dict[OpOverload, str]:
    """The overloads of the tables that the options ask for, with the name of their table."""
    wanted: dict[OpOverload, str] = {}
    for info in pkgutil.iter_modules(dynaxla.ops.tables.__path__):
        rows = getattr(importlib.import_module(f"dynaxla.ops.tables.{info.name}"), "ROWS", ())
        if options.tables and info.name not in options.tables:
            continue
        wanted |= {row.target: info.name for row in rows if _is_wanted(str(row.target), options, known)}
    return wanted


def _is_wanted(name: str, options: argparse.Namespace, known: Collection[str]) -> bool:
    skipped = options.skip and re.search(options.skip, name)
    return not skipped and bool(re.search(options.only, name)) and not (options.new and name in known)


def summary(calls: list[Call], found: list[str | None]) -> dict[str, Any]:
    """Return the record of one overload, with the dtypes in which every call was right."""
    told = [(call, reason) for call, reason in zip(calls, found, strict=True) if reason != REFUSED]
    failures: dict[str, str] = {}
    for call, reason in told:
        if reason is not None:
            failures.setdefault(f"{call.dtype}: {reason}", f"{call.dtype}: {reason} | {call.exact_key()[:160]}")
    count = Counter(call.dtype for call, _ in told)
    wrong = Counter(call.dtype for call, reason in told if reason is not None and len(call.dtypes) == 1)
    mixed = [call for call, reason in told if reason is not None and len(call.dtypes) > 1]
    # A call of several dtypes is no news when one of these is wrong by itself, or was never right.
    wrong.update(call.dtype for call in mixed if call.dtypes <= set(count) - set(wrong))
    return {
        "calls": len(told),
        "right": sum(reason is None for _, reason in told),
        "calls_by_dtype": dict(count),
        "right_dtypes": sorted(set(count) - set(wrong)),
        "died": sum(reason in (DIED, HUNG) for _, reason in told),
        "wrong_dtypes": {dtype: f"{wrong[dtype]}/{count[dtype]}" for dtype in sorted(wrong)},
        "failures": list(failures.values())[:FAILURES_KEPT],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="*", help="sweep these tables of dynaxla/ops/tables")
    parser.add_argument("--only", default="", help="sweep the overloads whose name matches")
    parser.add_argument("--skip", default="", help="leave out the overloads whose name matches")
    parser.add_argument("--new", action="store_true", help="leave out the overloads that the record has")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "mlir_sweep.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    wanted = wanted_overloads(options, report)
    calls = collect(wanted).calls()
    print(f"{len(wanted)} overloads, {sum(map(len, calls.values()))} calls", flush=True)
    mlir.load()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for target in sorted(wanted, key=str):
        record = summary(calls.get(target, []), sweep(calls.get(target, [])))
        report[str(target)] = record
        print(f"{target}: {record['right']} of {record['calls']}; {' '.join(record['right_dtypes'])}", flush=True)
        options.out.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
