"""Programs that several processes run together: on which devices, and what is checked before a run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dynaxla.errors import CompileError, DistributedError, ExecutionError
from dynaxla.observe.collectives import list_collectives
from dynaxla.runtime.client import Buffer
from dynaxla.runtime.executable_info import processes_of
from dynaxla.runtime.loaded_executables import PjrtExecutable
from dynaxla.runtime.peer_watch import JointProgram, PeerWatch
from dynaxla.runtime.process_set import ProcessSet

_HEADER = re.compile(rb"joint (\S+) ([\d,]+) (.*)\n")


def describe_module(module: bytes) -> JointProgram | None:
    """The program of a module that says on which processes it runs (`processes_of`); None: on this one alone.

    Programs of process groups are the same but for numbers that are a process's own, such as where its slice begins: XLA
    then brings their collectives into the same order. A program that is partitioned over a mesh is one for all.
    """
    ranks = processes_of(module)
    if ranks is None:
        return None
    text = _WHERE.sub("", module.decode())
    is_partitioned = "sdy.mesh @" in text
    text = text if is_partitioned else _without_own_numbers(text)
    main, *functions = text.split("\n  func.func private")
    digest = hashlib.sha256("\n".join([main, *sorted(set(functions))]).encode()).hexdigest()[:32]
    kinds = sorted(set(re.findall(r"stablehlo\.(all_\w+|reduce_scatter|collective_\w+)", text)))
    types = re.findall(r"%arg\d+: tensor<([^>]*)>", main)
    sizes = ",".join(types[:2]) + (",..." if len(types) > 2 else "")
    what = found[1] if (found := _NAME.match(text)) else "+".join(kinds) or "program"
    return JointProgram(digest, f"{what}({sizes}):{digest[:6]}", ranks)


_WHERE = re.compile(r"(?<=^module )@\S+ |^#call\d+ = .*\n", re.MULTILINE)
"""The module's name, and the lines of the user's program that its calls come from: they may differ from host to host."""

_NAME = re.compile(r"// joint \S+ (.+)\n")


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
    return f"joint {program.digest} {','.join(map(str, program.ranks))} {program.what}\n".encode() + serialized


def split_header(serialized: bytes) -> tuple[JointProgram | None, bytes]:
    """The opposite of `add_header`."""
    found = _HEADER.match(serialized)
    if found is None:
        return None, serialized
    ranks = tuple(map(int, found[2].split(b",")))
    return JointProgram(found[1].decode(), found[3].decode(), ranks), serialized[found.end() :]


class Peers:
    """The processes that a client's programs run with, and their devices.

    Args:
        client: PJRT's, which knows these.

    Attributes:
        devices: of all processes: one process after the other.

    Raises:
        DistributedError: the client does not know the devices of all processes, or has another number than this process.
    """

    def __init__(self, processes: ProcessSet, client: Any) -> None:
        self.devices = tuple(sorted(client.devices(), key=lambda device: (device.process_index, device.id)))
        known = {device.process_index for device in self.devices}
        if known != set(range(processes.size)) or client.process_index() != processes.rank:
            raise DistributedError(
                f"process {processes.rank} of {processes.size} has a client that takes itself for process "
                f"{client.process_index()} and knows devices of {sorted(known)}",
                "the platform's PJRT plugin joins no processes, or numbers them otherwise",
            )
        self.processes = processes
        assert processes.watch is not None
        self.watch: PeerWatch = processes.watch

    def devices_of(self, ranks: Sequence[int], partitions: int = 1) -> Sequence[Any]:
        """The devices of a program that these processes run: the first ones of all, or one of each process.

        Raises:
            CompileError: there are no such processes.
        """
        if not set(range(self.processes.size)) >= set(ranks):
            raise CompileError(f"a program of the processes {ranks}, of which some are not joined")
        if partitions > 1:
            return self.devices[:partitions]
        return [next(device for device in self.devices if device.process_index == rank) for rank in ranks]

    def ranks_of(self, devices: Sequence[Any]) -> tuple[int, ...]:
        """The processes that have these devices."""
        return tuple(sorted({device.process_index for device in devices}))


class JointExecutable(PjrtExecutable):
    """An executable that several processes run together.

    Its module has a last result that is nobody's (`lowering.link.WORK`): PJRT's CPU client runs programs of next to no work in
    the caller's thread, which would wait there for the other processes and hear of nothing.
    """

    def __init__(
        self,
        program: JointProgram,
        peers: Peers,
        load: Callable[[], Any],
        serialized: Callable[[Any], bytes | None] | None = None,
    ) -> None:
        super().__init__(load, serialized)
        order = hashlib.sha256(repr(list_collectives(self.hlo_text())).encode()).hexdigest()[:16]
        self.program = replace(program, digest=f"{program.digest}.{order}")
        self._described, self._peers = program, peers

    def run(self, arguments: Sequence[Buffer]) -> list[Buffer]:
        """Submits the program; the first time when all its processes have it.

        Raises:
            DistributedError: the processes run different programs, or one is lost.
            ExecutionError: PJRT refused the arguments or the run failed at once.
        """
        watch = self._peers.watch
        watch.begin(self.program)
        try:
            results = super().run(arguments)
        except ExecutionError as error:
            raise self._peers.processes.explain(error) from error
        watch.note(self.program, results.pop())
        return results

    def note_sizes(self, sizes: tuple[int, ...]) -> None:
        """Is told of the true sizes of the next run, which all processes are to have."""
        self._peers.watch.note_sizes(self.program, sizes)

    def serialize(self) -> bytes | None:
        serialized = super().serialize()
        return None if serialized is None else add_header(self._described, serialized)
