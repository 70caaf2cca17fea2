"""Programs that several processes run together: on which devices, and what is checked before a run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dynaxla.errors import ExecutionError
from dynaxla.observe.collectives import list_collectives
from dynaxla.runtime import xla
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.executable_info import MemoryUse
from dynaxla.runtime.loaded_executables import PjrtExecutable
from dynaxla.runtime.peer_watch import JointProgram, PeerWatch
from dynaxla.runtime.process_set import ProcessSet

_HEADER = re.compile(rb"joint (\S+) (\S+) ([\d,]+)\n")


def describe_module(module: bytes) -> JointProgram | None:
    """The program of a module that says on which processes it runs (`xla.processes_of`); None: on this one alone.

    Programs of several processes are the same but for numbers that are a process's own, such as where its slice begins: XLA
    then brings their collectives into the same order.
    """
    ranks = xla.processes_of(module)
    if ranks is None:
        return None
    text = _without_own_numbers(module.decode())
    main, *functions = text.split("\n  func.func private")
    digest = hashlib.sha256("\n".join([main, *sorted(set(functions))]).encode()).hexdigest()[:32]
    kinds = sorted(set(re.findall(r"stablehlo\.(all_\w+|reduce_scatter|collective_\w+)", text)))
    types = re.findall(r"%arg\d+: tensor<([^>]*)>", main)
    sizes = ",".join(types[:2]) + (",..." if len(types) > 2 else "")
    return JointProgram(digest, f"{'+'.join(kinds) or 'program'}({sizes}):{digest[:6]}", ranks)


_OWN_NUMBERS = (
    (re.compile(r"\.[0-9a-f]{32}\b"), ""),
    (re.compile(r"(stablehlo\.constant dense)<[^>]*>"), r"\1"),
    (re.compile(r"(stablehlo\.slice %\S+ )\[[^\]]*\]"), r"\1"),
    (re.compile(r"(%\d+)#\d+"), r"\1#"),
    (re.compile(r"(low|high) = \[[^\]]*\]"), r"\1"),
)
"""Names of functions, which are made of their numbers; constants; where slices and paddings begin and end; which
piece of a split is read."""


def _without_own_numbers(text: str) -> str:
    for pattern, replacement in _OWN_NUMBERS:
        text = pattern.sub(replacement, text)
    return text


def add_header(program: JointProgram | None, serialized: bytes) -> bytes:
    """A serialized executable with what is known of its program, as a client of several processes loads it."""
    if program is None:
        return serialized
    return f"joint {program.digest} {program.what} {','.join(map(str, program.ranks))}\n".encode() + serialized


def split_header(serialized: bytes) -> tuple[JointProgram | None, bytes]:
    """The opposite of `add_header`."""
    found = _HEADER.match(serialized)
    if found is None:
        return None, serialized
    ranks = tuple(map(int, found[3].split(b",")))
    return JointProgram(found[1].decode(), found[2].decode(), ranks), serialized[found.end() :]


class JointExecutable:
    """An executable that the processes of a set run together. It is the protocol `runtime.client.Executable`.

    Its module has a last result that is nobody's (`lowering.link.WORK`): PJRT's CPU client runs programs of next to no work in
    the caller's thread, which would wait there for the other processes and hear of nothing.
    """

    def __init__(self, program: JointProgram, own: PjrtExecutable, processes: ProcessSet, watch: PeerWatch) -> None:
        order = hashlib.sha256(repr(list_collectives(own.hlo_text())).encode()).hexdigest()[:16]
        self.program = replace(program, digest=f"{program.digest}.{order}")
        self._own, self._described = own, program
        self._processes = processes
        self._watch = watch

    def run(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Submits the program; the first time when all its processes have it.

        Raises:
            DistributedError: the processes run different programs, or one is lost.
            ExecutionError: PJRT refused the arguments or the run failed at once.
        """
        self._watch.begin(self.program)
        try:
            results = self._own.run(arguments)
        except ExecutionError as error:
            raise self._processes.explain(error) from error
        self._watch.note(self.program, results.pop())
        return results

    def note_sizes(self, sizes: tuple[int, ...]) -> None:
        """Is told of the true sizes of the next run, which all processes are to have."""
        self._watch.note_sizes(self.program, sizes)

    def hlo_text(self) -> str:
        return self._own.hlo_text()

    def memory_use(self) -> MemoryUse:
        return self._own.memory_use()

    def cost(self) -> dict[str, float]:
        return self._own.cost()

    def serialize(self) -> bytes | None:
        serialized: Any = self._own.serialize()
        return None if serialized is None else add_header(self._described, serialized)
