"""Compares the zoo's models, moved to the device by `.to("dynaxla")`, with eager PyTorch on the host.

    python -m conformance.device_zoo [--only REGEX] [--modes NAME ...] [--limit SECONDS] [--out FILE] [--bucketed]

Each architecture runs in a forked process for each mode, with a time limit: one forward call op by op ("eager"), one
compiled ("compiled"), and five steps of SGD with the loss compiled ("trained") or op by op ("trained-eager"). Prints a
line for each, with the ops that ran on the host, and the counts.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing as mp
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import dynaxla
from conformance.device_buckets import all_bucketed
from conformance.ops_sweep import load
from conformance.quiet import be_quiet
from conformance.training_record import NOT_TRAINED, SENSITIVE, WIDE_LIMIT
from dynaxla.device import registration
from tests.tolerances import RELATIVE
from tests.zoo.architecture import Architecture
from tests.zoo.compare import worst_leaf
from tests.zoo.registry import ARCHITECTURES
from tests.zoo.training import Trainee, shaken, trainee
from tests.zoo.training_check import LIMIT, difference

MODES = ("eager", "compiled", "trained", "trained-eager")
STEPS = 5
RATE = 1e-3


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one architecture in one mode.

    Attributes:
        status: "right", "sensitive" (see `trained`), "wrong", "raised", "died" or "timed out".
        detail: the largest difference and its place, or the error.
        host: the ops that ran on the host.
    """

    status: str
    detail: str
    host: str = ""


def on_device(value: Any) -> Any:
    """A tree with its tensors on the device; other objects, as caches, in copies whose attributes moved."""
    return pytree.tree_map(_moved, value)


def _moved(value: Any) -> Any:
    if isinstance(value, Tensor | nn.Module):
        return value.to("dynaxla")
    if isinstance(value, torch.device):
        return torch.device("dynaxla")
    return _with_attributes(value, _moved) if _is_opened(value) else value


def _is_opened(value: Any) -> bool:
    """Whether it is an object, as a cache or a layer of one, whose attributes may be tensors."""
    return hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value)


def on_host(value: Any) -> Any:
    """A model's output with its tensors on the host."""
    return pytree.tree_map(_fetched, value)


def _fetched(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return _with_attributes(value, _fetched) if _is_opened(value) else value


def _with_attributes(value: Any, move: Callable[[Any], Any]) -> Any:
    made = copy.copy(value)
    for name, attribute in vars(made).items():
        setattr(made, name, pytree.tree_map(move, attribute))
    return made


@torch.no_grad()
def forward(architecture: Architecture, is_compiled: bool) -> Found:
    """One forward call against eager's on the host."""
    net, args, kwargs = architecture.build(torch.float32)
    net(*copy.deepcopy(args), **copy.deepcopy(kwargs))  # some models install hooks at their first call
    wanted = net(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    net, args, kwargs = architecture.build(torch.float32)
    net(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    mine = net.to("dynaxla")
    args, kwargs = on_device(args), on_device(kwargs)
    run = torch.compile(mine, backend="dynaxla") if is_compiled else mine
    found = on_host(run(*args, **kwargs))
    path, error = worst_leaf(found, on_host(wanted))
    return Found("right" if error <= RELATIVE[torch.float32] else "wrong", f"{path} {error:.1e}")


def train(given: Trainee, compiler: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Losses, and parameters and buffers after the steps, by name, on the host."""
    optimizer = torch.optim.SGD(given.net.parameters(), lr=RATE, momentum=0.9)
    loss, losses = compiler(given.loss), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        losses.append(value.item())
        optimizer.step()
    left = {"losses": torch.tensor(losses)}
    for name, x in (*given.net.named_parameters(), *given.net.named_buffers()):
        left[name] = x.detach().cpu()
    return left


def trained(architecture: Architecture, is_compiled: bool) -> Found:
    """Five steps of SGD against eager's on the host.

    "sensitive" is what differs in float32, as eager itself does from weights that are off by one rounding, and does not in
    float64 (conformance/training_record.py).
    """
    error, name = _trained_difference(architecture, is_compiled, torch.float32)
    if error <= LIMIT:
        return Found("right", f"{name} {error:.1e}")
    alone = _worst(train(shaken(trainee(architecture)), _as_it_is), train(trainee(architecture), _as_it_is))
    wide = _trained_difference(architecture, is_compiled, torch.float64)
    is_sensitive = alone[0] > LIMIT and wide[0] <= WIDE_LIMIT
    told = f"{name} {error:.1e}; eager off by one rounding {alone[0]:.1e}; in float64 {wide[1]} {wide[0]:.1e}"
    return Found(SENSITIVE if is_sensitive else "wrong", told)


def _trained_difference(architecture: Architecture, is_compiled: bool, dtype: torch.dtype) -> tuple[float, str]:
    wanted = train(trainee(architecture, dtype), _as_it_is)
    given = trainee(architecture, dtype)
    there = Trainee(given.net.to("dynaxla"), *map(on_device, (given.args, dict(given.kwargs), given.targets)))
    torch._dynamo.reset()
    mine = train(there, lambda loss: torch.compile(loss, backend="dynaxla") if is_compiled else loss)
    return _worst(mine, wanted)


def _worst(mine: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    assert mine.keys() == wanted.keys()
    return max((difference(mine[name], wanted[name]), name) for name in wanted)


def _as_it_is(loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return loss


def examine(architecture: Architecture, mode: str) -> Found:
    """What comes of it in this process, whose device is PJRT's CPU."""
    registration.use("cpu")
    run = trained if mode.startswith("trained") else forward
    found = run(architecture, mode in ("compiled", "trained"))
    host = Counter(dynaxla.read_metrics().host_ops)
    return Found(found.status, found.detail, " ".join(f"{name}({count})" for name, count in sorted(host.items())))


def examine_apart(architecture: Architecture, mode: str, limit_s: float) -> Found:
    """In a process of its own, which may die or take too long."""
    here, there = mp.Pipe(duplex=False)
    process = mp.get_context("fork").Process(target=_work, args=(architecture, mode, there))
    process.start()
    there.close()
    try:
        if here.poll(limit_s):
            found: Found = here.recv()
            return found
        return Found("timed out", f"{limit_s:.0f} s")
    except EOFError:
        return Found("died", "the process ended")
    finally:
        process.kill()
        process.join()
        here.close()


def _work(architecture: Architecture, mode: str, connection: Connection) -> None:
    be_quiet()
    try:
        found = examine(architecture, mode)
    except Exception as error:  # a model that raises is a line, not the end of the sweep
        found = Found("raised", " ".join(f"{type(error).__name__}: {error}"[:300].split()))
    connection.send(found)
    connection.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="architectures whose name matches")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for an architecture in one mode")
    parser.add_argument(
        "--bucketed", action="store_true", help="every size of ops by themselves varies (device_buckets.py)"
    )
    parser.add_argument("--out", type=Path, help="lines are written there too")
    return parser.parse_args()


def main() -> None:
    options = parse()
    load()
    counts: dict[str, Counter[str]] = {mode: Counter() for mode in options.modes}
    for architecture in ARCHITECTURES:
        for mode in options.modes:
            unwanted = mode.startswith("trained") and architecture.name in NOT_TRAINED
            if unwanted or not re.search(options.only, architecture.name):
                continue
            began = time.perf_counter()
            with all_bucketed(options.bucketed):
                found = examine_apart(architecture, mode, options.limit)
            counts[mode][found.status] += 1
            seconds = f"{time.perf_counter() - began:.0f} s"
            line = "\t".join((found.status, architecture.name, mode, seconds, found.detail, found.host))
            print(line, flush=True)
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    for mode, found_in in counts.items():
        print(f"{mode}: " + ", ".join(f"{count} {status}" for status, count in sorted(found_in.items())))


if __name__ == "__main__":
    main()
