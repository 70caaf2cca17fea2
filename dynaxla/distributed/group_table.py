"""The groups of all processes, which a program of several processes needs: every process tells its own.

Processes of one program make their groups in the same order, as a device mesh does: the groups that they made at one place of
that order are one partition of them, such as the columns of a mesh.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from dynaxla.isolation.forking import new_lock
from dynaxla.isolation.once import once
from dynaxla.runtime.process_set import ProcessSet
from dynaxla.types import Groups


@dataclass(frozen=True, slots=True)
class GroupPartition:
    """Processes that run a program together, and the groups in which they compute.

    Attributes:
        ranks: of the processes among all; a process's number is its place here.
        groups: by the names of this process's groups, all groups that were made with it, of numbers.
    """

    ranks: tuple[int, ...]
    groups: dict[str, Groups]

    def arguments(self, name: str) -> tuple[list[int], int, list[int]]:
        """The last arguments of `custom_ops.process_collectives` for a group of this process's."""
        groups = self.groups[name]
        return [number for group in groups for number in group], len(groups[0]), list(self.ranks)


class GroupTable:
    """The groups of this process, by name, and those of the others, which they tell in a store."""

    def __init__(self) -> None:
        self._own: list[tuple[str, tuple[int, ...]]] = []
        self._processes: ProcessSet | None = None
        self._lock = new_lock()

    def add(self, name: str, ranks: Sequence[int], processes: ProcessSet) -> None:
        """Tells the others of a group that this process takes part in."""
        with self._lock:
            processes.store.set(f"groups/{processes.rank}/{len(self._own)}", json.dumps(list(ranks)))
            self._own.append((name, tuple(ranks)))
            self._processes = processes

    def find_partition(self, names: Sequence[str]) -> GroupPartition | None:
        """The processes that compute together in these groups of this process's, and their groups.

        Waits for processes that have not made their groups.

        Returns:
            None if a name is no group of the device, or if the processes did not make their groups in one order.
        """
        known = {name: (place, ranks) for place, (name, ranks) in enumerate(self._own)}
        if self._processes is None or not known.keys() >= set(names):
            return None
        found: dict[int, set[tuple[int, ...]]] = {known[name][0]: set() for name in names}
        waiting, ranks = [self._processes.rank], {self._processes.rank}
        while waiting:
            rank = waiting.pop()
            for place, groups in found.items():
                group = self._group_of(rank, place)
                if rank not in group:
                    return None
                groups.add(group)
                waiting.extend(set(group) - ranks)
                ranks.update(group)
        ordered = tuple(sorted(ranks))
        made = {name: _number(found[known[name][0]], ordered) for name in names}
        is_one = all(len({*map(len, groups)}) == 1 and _covers(groups, len(ordered)) for groups in made.values())
        return GroupPartition(ordered, made) if is_one else None

    def _group_of(self, rank: int, place: int) -> tuple[int, ...]:
        assert self._processes is not None
        if rank == self._processes.rank:
            return self._own[place][1]
        key, store = f"groups/{rank}/{place}", self._processes.store
        self._processes.wait_until(lambda: store.check([key]))
        return tuple(json.loads(store.get(key)))


def _number(groups: set[tuple[int, ...]], ranks: Sequence[int]) -> Groups:
    return tuple(sorted(tuple(ranks.index(rank) for rank in group) for group in groups))


def _covers(groups: Groups, count: int) -> bool:
    return sorted(number for group in groups for number in group) == list(range(count))


@once
def group_table() -> GroupTable:
    """That of the process."""
    return GroupTable()
