"""What a run of a benchmark found, as plain values, and the JSON file that keeps them: the only form in which results are
written."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dynaxla import __version__
from dynaxla.bench.answers import Check
from dynaxla.errors import OptionError
from dynaxla.versions import installed_versions

FORMAT = 1
"""Of the file. A reader refuses others."""


@dataclass(frozen=True, slots=True)
class StartTimes:
    """A process's first pass over the inputs.

    Attributes:
        seconds: of the pass, wall-clock time.
        stages: of these, by stage (compile_counters.py).
        compiled, loaded: programs of dynaxla that were compiled, and loaded from disk.
        graphs: graphs that Dynamo captured.
        cpu_s: processor time of all threads; 0 where several backends share the process.
        begin_s: what the backend does once per process, before: libraries, compiler processes.
        again_s: seconds of later passes.
        before_bytes, peak_bytes: memory that the process had resident before the pass, with libraries and model, and at most; 0
            where several backends share it.
        own_process: whether the backend had a process of its own, else those that came before it had compiled there, too.
    """

    seconds: float
    stages: Mapping[str, float]
    compiled: int = 0
    loaded: int = 0
    graphs: int = 0
    cpu_s: float = 0.0
    begin_s: float = 0.0
    again_s: Sequence[float] = ()
    before_bytes: int = 0
    peak_bytes: int = 0
    own_process: bool = False


@dataclass(frozen=True, slots=True)
class BackendResult:
    """One backend's part of a case.

    Attributes:
        name: as it was asked for.
        check: of its results; only a backend whose results are right is timed.
        first: with compilers' caches empty; for several backends that share a process, see `StartTimes.own_process`.
        second: in a process that finds what the first one stored; "captures": with Dynamo's captures found, too.
        first_pass_s: seconds of the first run of each input, compiles included.
        programs: of dynaxla, made ready in the first run of each input.
        samples_s: seconds of a run, round by round, the inputs in order in each.
        recompiles: programs made ready, and graphs captured, while samples were taken.
        elements: for each input the elements of its sizes that vary, and those of the buckets in which it ran; else empty.
        facts: other numbers, by name with unit.
    """

    name: str
    check: Check = field(default_factory=lambda: Check("unchecked"))
    first: StartTimes | None = None
    second: StartTimes | None = None
    captures: StartTimes | None = None
    first_pass_s: Sequence[float] = ()
    programs: Sequence[int] = ()
    samples_s: Sequence[float] = ()
    recompiles: int = 0
    elements: Sequence[tuple[int, int]] = ()
    facts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Attributes:
    name: of the case.
    results: of each backend.
    baseline: the backend that the others are compared with.
    inputs: the sizes that vary, by name; one empty mapping where none do.
    items: what a run processes, in `unit`, such as tokens; 0: nothing that is counted.
    about: what was measured, for a reader.
    """

    name: str
    results: Sequence[BackendResult]
    baseline: str = "eager"
    inputs: Sequence[Mapping[str, int]] = ({},)
    items: float = 0.0
    unit: str = ""
    about: str = ""

    def of(self, name: str) -> BackendResult | None:
        """The result of a backend."""
        return next((each for each in self.results if each.name == name), None)


@dataclass(frozen=True, slots=True)
class BenchRecord:
    """A run of a benchmark.

    Attributes:
        command: the arguments of the command line.
        made: when, in UTC.
        machine: processor, cores, threads, memory, load.
        versions: of the libraries.
        commit: of the folder's repository, if it is one: `git describe --always --dirty`.
    """

    command: Sequence[str]
    cases: Sequence[CaseResult]
    made: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    commit: str | None = None
    format: int = FORMAT

    @classmethod
    def collect(cls, command: Sequence[str], cases: Sequence[CaseResult]) -> Self:
        """A record of this machine, now."""
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        versions = {"dynaxla": __version__, **installed_versions()}
        return cls(list(command), cases, made, describe_machine(), versions, find_commit())

    @property
    def is_bad(self) -> bool:
        """Whether a backend raised or gave other results."""
        return any(result.check.is_bad for case in self.cases for result in case.results)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """
        Raises:
            OptionError: there is no such file, or it is none of these, or of another format.
        """
        try:
            given = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(given, dict) or given.get("format") != FORMAT:
                raise OptionError(f"{path} is no record of format {FORMAT}", "write one with bench --json FILE")
            cases = [_read_case(case) for case in given.pop("cases")]
            return cls(cases=cases, **given)
        except OSError as error:
            raise OptionError(
                f"{path} cannot be read: {error.strerror}", "name a file that bench --json wrote"
            ) from None
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(f"{path} is no record: {error}", "write one with bench --json FILE") from None


def describe_machine() -> dict[str, Any]:
    """Processor, cores that this process may use, torch's threads, memory in bytes, and the load of the last minute."""
    import torch

    names = [line.partition(":")[2].strip() for line in _read("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": platform.platform(),
        "load": round(os.getloadavg()[0], 2),
    }


def find_commit() -> str | None:
    """What git calls the commit of this folder; None where there is none."""
    try:
        command = ["git", "describe", "--always", "--dirty"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() or None


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []


def _read_case(given: dict[str, Any]) -> CaseResult:
    return CaseResult(**{**given, "results": [_read_result(result) for result in given["results"]]})


def _read_result(given: dict[str, Any]) -> BackendResult:
    starts = {name: StartTimes(**given[name]) if given[name] else None for name in ("first", "second", "captures")}
    return BackendResult(**{**given, **starts, "check": Check(**given["check"])})
