"""One process of several that run PyTorch's distributed tests, many one after the other.

PyTorch starts processes anew for each test (`MultiProcessTestCase`). Here a team of processes stays, and calls what a started
process would call, `_run` of the test's class. Tests whose ranks are threads of one process get a base class whose ranks are
these processes. The tests are named for CUDA or for the CPU: their source is changed as it is
imported, and the groups that they make are of this team's backend.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import random
import re
import sys
import unittest
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from conformance.quiet import be_quiet

WHEEL = "distributed_test.py"
"""The file of tests that is part of torch's wheel; others are of a checkout."""

PASSES, SKIPPED, FAILS = "passes", "skipped", "fails"
_DETAIL = 300
_HELPERS = (
    "torch.testing._internal.common_distributed",
    "torch.testing._internal.common_fsdp",
    "torch.testing._internal.distributed._tensor.common_dtensor",
)


@dataclass(frozen=True)
class Team:
    """What the processes of a team have in common.

    Attributes:
        device: "cpu" or "dynaxla".
        size: the number of processes.
        folder: for the files by which the processes of a test meet.
        tests: folder test/distributed of a checkout; None: there is none.
    """

    device: str
    size: int
    folder: Path
    tests: Path | None

    @property
    def meeting(self) -> Path:
        """The file by which the processes meet at their start."""
        return self.folder / "meeting"

    @property
    def backend(self) -> str:
        return "gloo" if self.device == "cpu" else self.device


def load_helpers(size: int) -> None:
    """Imports what all files need, before the processes are forked, and starts nothing."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size))
    for name in ("dynaxla.device.registration", "torch.testing._internal.distributed.distributed_test", *_HELPERS):
        importlib.import_module(name)


def serve(team: Team, file: str, rank: int, connection: Connection) -> None:
    """Imports a file of tests, sends their names, then runs those that it is told; sends a status and a detail of each."""
    os.setsid()
    be_quiet()
    try:
        tests = _find_tests(_import(team, file, rank), team.size)
    except (Exception, SystemExit) as error:  # the file as a whole is an outcome
        connection.send(f"import: {_describe(error)}")
        return
    connection.send(sorted(tests))
    while (message := connection.recv()) is not None:
        number, name = message
        connection.send(_run(team, rank, tests[name], name.partition(".")[2], number))


def _run(team: Team, rank: int, test_class: Any, name: str, number: int) -> tuple[str, str]:
    import torch
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import TEST_SKIPS, MultiProcessTestCase

    folder = team.folder / f"{team.device}{number}"
    for part in ("barrier", "test_dir"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    os.environ.update(TEMP_DIR=str(folder), INIT_METHOD=f"file://{folder}/shared_init_file")
    random.seed(0)
    told, here = torch.multiprocessing.Pipe(duplex=False)
    try:
        with patch.object(MultiProcessTestCase, "_spawn_processes", lambda _: None):
            test_class._run(rank, name, str(folder / "store"), here)
        return PASSES, ""
    except SystemExit as end:
        skip = next((each for each in TEST_SKIPS.values() if each.exit_code == end.code), None)
        if skip is not None or not end.code:
            return (PASSES, "") if skip is None else (SKIPPED, skip.message)
        return FAILS, _last_line(told.recv() if told.poll() else f"exit code {end.code}")
    except unittest.SkipTest as skipped:
        return SKIPPED, str(skipped)[:_DETAIL]
    except Exception as error:  # a test may raise anything
        return FAILS, _describe(error)
    finally:
        torch._dynamo.reset()
        if dist.is_initialized():
            dist.destroy_process_group()


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_DETAIL]


def _last_line(trace: str) -> str:
    """The error of a traceback's text, without C++'s stack below it, and the last line of a file of tests above it."""
    *above, error = re.split(r"^(?=[\w.]+: )", trace.partition("Exception raised from")[0], flags=re.MULTILINE)
    lines = re.findall(r'test_?\w*\.py", line (\d+)', "".join(above)) or re.findall(r"line (\d+)", "".join(above))
    error = error.partition("To execute this test")[0] if above else error[-_DETAIL:]
    return f"{' '.join(error.split())[:_DETAIL]} (line {lines[-1] if lines else '?'})"


# The modules of tests


def _import(team: Team, file: str, rank: int) -> ModuleType:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        TEMP_DIR=str(team.folder),
        MASTER_ADDR="127.0.0.1",
    )
    import torch

    torch.set_num_threads(1)
    if team.device != "cpu":
        import dynaxla

        dynaxla.use("cpu")
        _meet(team, rank)
    _name_devices(team)
    if file == WHEEL:
        return _import_of_wheel(team)
    assert team.tests is not None
    path = team.tests / file
    sys.path[:0] = [str(path.parent), str(team.tests.parent)]
    name = "_".join(Path(file).with_suffix("").parts)
    spec = importlib.util.spec_from_loader(name, None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(retarget(path.read_text(encoding="utf-8"), team.device, team.size), str(path), "exec"), vars(module))
    return module


def _meet(team: Team, rank: int) -> None:
    """Some tests use the device before they make a group: after that its client would join no other."""
    import torch.distributed as dist

    dist.init_process_group(team.backend, init_method=f"file://{team.meeting}", rank=rank, world_size=team.size)
    dist.destroy_process_group()


def _import_of_wheel(team: Team) -> ModuleType:
    """The tests name no device: their tensors are of torch's default device."""
    import torch
    from torch.testing._internal.distributed import distributed_test as found

    torch.set_default_device(team.device)
    bases = (found.TestDistBackend, found.DistributedTest._DistTestBase)
    module = ModuleType(WHEEL)
    module.DistributedTest = type("DistributedTest", bases, {"__module__": WHEEL})  # type: ignore[attr-defined]
    return module


def retarget(source: str, device: str, size: int) -> str:
    """The source of a file of tests with another device in CUDA's place, of which there is one for each of `size` processes."""
    for pattern, replacement in (
        (r"\btorch\.cuda\.device_count\(\)", str(size)),
        (r"\btorch\.cuda\.is_available\(\)", "True"),
        (r"\bnot (TEST_CUDA|TEST_MULTIGPU)\b", "False"),
        (r"(?<!import )\bTEST_CUDA\b(?=[^,\n]*:)", "True"),
        (
            r"\btorch\.cuda\.(current_device|set_device|current_stream|synchronize|Stream|stream|Event)\b",
            rf"torch.{device}.\1",
        ),
        (r"\.cuda\([^()]*\)", f'.to("{device}")'),
        (r"""(["'])cuda(:0)?\1""", rf"\g<1>{device}\g<1>"),
        (
            r"\bdevice_ids=\[self\.rank\]",
            "device_ids=None",
        ),  # which DDP refuses on the CPU, and a process has one device
        (r"\bdist\.Backend\.NCCL\b", '"nccl"'),
        (r"""^DEVICE_TYPE = (["'])cpu\1$""", f'DEVICE_TYPE = "{device}"'),
        (r"^ *assert len\(matching_opinfos\) >= 1.*$", ""),  # ops that later versions of torch do not list
        (r"\bonly_for=\(DEVICE_TYPE,\)", 'only_for=("cpu",)'),  # names the class, whose samples are of DEVICE_TYPE
    ):
        source = re.sub(pattern, replacement, source, flags=re.MULTILINE)
    return source


def _name_devices(team: Team) -> None:
    """Tells torch's helpers of tests which device there is, and that each process has one."""
    import torch

    common_distributed, common_fsdp, common_dtensor = map(importlib.import_module, _HELPERS)
    torch.accelerator.device_count = lambda: team.size
    common_distributed.DEFAULT_WORLD_SIZE = team.size
    common_distributed.skip_if_lt_x_gpu = _require_devices(team.size)
    for name in ("requires_nccl", "requires_accelerator_dist_backend"):
        setattr(common_distributed, name, lambda *_: lambda test: test)
    common_fsdp.DEVICE_TYPE, common_fsdp.DEVICE_COUNT = team.device, team.size
    common_fsdp.DISTRIBUTED_BACKEND = team.backend
    common_fsdp.skip_if_lt_x_gpu = common_distributed.skip_if_lt_x_gpu
    common_dtensor.NUM_DEVICES = common_dtensor.DEVICE_COUNT = team.size
    common_dtensor.DEVICE_TYPE, common_dtensor.PG_BACKEND = team.device, team.backend
    common_dtensor.skip_if_lt_x_gpu = common_distributed.skip_if_lt_x_gpu
    common_dtensor.DTensorTestBase.device_type = team.device
    common_dtensor.DTensorTestBase.backend = "gloo"
    of_processes = _make_ranks_processes(common_fsdp.FSDPTest, team.device)
    common_distributed.MultiThreadedTestCase = common_fsdp.FSDPTestMultiThread = of_processes
    common_dtensor.DTensorOpTestBase = of_processes
    common_fsdp.test_compiled_fsdp = lambda **_: lambda test: test  # of earlier versions: the test, not compiled
    _name_backend(team.backend)


def _make_ranks_processes(base: Any, device: str) -> Any:
    """A class in the place of torch's `MultiThreadedTestCase` and of its subclasses in torch."""

    class RanksAreProcesses(base):  # type: ignore[misc]
        device_type = device

        def build_device_mesh(self) -> Any:
            from torch.distributed.device_mesh import init_device_mesh

            return init_device_mesh(device, (self.world_size,))

        def perThreadSetUp(self) -> None: ...

        def perThreadTearDown(self) -> None: ...

        def run_test(self, name: str, pipe: Any) -> None:
            self.perThreadSetUp()
            try:
                super().run_test(name, pipe)
            finally:
                self.perThreadTearDown()

        def assertEqualOnRank(self, x: Any, y: Any, msg: Any = None, *, rank: int = 0) -> None:
            if self.rank == rank:
                self.assertEqual(x, y, msg)  # noqa: PT009 (torch's own, of tensors)

    return RanksAreProcesses


def _require_devices(size: int) -> Callable[..., Any]:
    def require(count: int, **_: Any) -> Callable[[Any], Any]:
        return lambda test: test if count <= size else unittest.skip(f"needs {count} devices")(test)

    return require


def _name_backend(backend: str) -> None:
    """Groups that are asked for by another backend's name are of the team's, which takes the host's tensors as well."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    init = c10d.init_process_group
    for name in ("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group"):
        original = getattr(c10d, name)
        signature = inspect.signature(original)

        def make(*args: Any, original: Any = original, signature: Any = signature, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            asked = bound.arguments.get("backend")
            if original is init if asked is None else asked != "fake":
                bound.arguments["backend"] = backend
            bound.arguments.pop("device_id", None)
            return original(*bound.args, **bound.kwargs)

        setattr(c10d, name, make)
        setattr(dist, name, make)


def _find_tests(module: ModuleType, size: int) -> Mapping[str, Any]:
    """The class of each test of several processes, by the names of the class and of the test."""
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    found: dict[str, Any] = {}
    for name, made in list(vars(module).items()):
        if isinstance(made, type) and issubclass(made, MultiProcessTestCase) and made.__module__ == module.__name__:
            made.world_size = property(lambda _: size)  # some ask for more, and would wait for them
            found |= {f"{name}.{test}": made for test in _names(made)}
    return found


def _names(test_class: type[unittest.TestCase]) -> Sequence[str]:
    return unittest.defaultTestLoader.getTestCaseNames(test_class)
