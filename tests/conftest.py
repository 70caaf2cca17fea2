"""Every test starts with a clean Dynamo and reads compile counts from the process's recorder.

There are two lists of tests: the quick one, and with --full also what is marked `long` or took over three seconds
(CONTRIBUTING.md says how to decide).
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import dynaxla
from dynaxla import backend
from dynaxla.isolation.disk import CACHE_VARIABLE, OFF
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime_state import process
from tests.bucketing.poison import faults
from tests.times import TimeLimit, TimesWriter, is_long, read_times

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)
settings.register_profile("quick", max_examples=20, derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("full", max_examples=60, derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=_SLOW)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run also the tests that are long")
    parser.addoption(
        "--write-times", action="store_true", help="write what takes over three seconds to tests/times.tsv"
    )
    help_text = "leave long tests out, counted as skipped, where the list would else take more minutes at its pace"
    parser.addoption("--minutes", type=float, help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("--full") else "quick")
    if chosen := config.getoption("--hypothesis-profile"):
        settings.load_profile(chosen)
    if config.getoption("--write-times") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(TimesWriter({} if config.getoption("--full") else read_times()))
    if (minutes := config.getoption("--minutes")) is not None:
        config.pluginmanager.register(TimeLimit(minutes))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Last, as a process has its device for good once a test used it; long ones last of each, where time may be up, and of
    # these the marked ones, which repeat what others show.
    last = ("tests/device/", "tests/serving/llm/")
    items.sort(
        key=lambda item: (item.nodeid.startswith(last), is_long(item), item.get_closest_marker("long") is not None)
    )
    if config.getoption("--full"):
        return
    left_out = [item for item in items if is_long(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not is_long(item)]


def pytest_collectstart(collector: pytest.Collector) -> None:
    """What a file draws where it is imported is the same in every run: a sum that cancels fails one run of hundreds."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Failures that tests provoke are not remembered in the user's cache, and programs are compiled when a test says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, OFF)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def _own_captures(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A test finds no capture of another's in torch's folder, which is made when something is stored."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / f"torch{next(_NUMBERS)}"))


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether the long list runs: a test of many cases may take fewer in the quick one."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(autouse=True, scope="session")
def _guards_are_not_timed() -> Iterator[None]:
    """Dynamo flushes the processor's caches and times each capture's guards for its log: 25 ms of each capture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: 0.0)
        yield


@pytest.fixture(autouse=True, scope="module")
def _looked_through_once() -> Iterator[None]:
    """What stays when a file's tests have run is looked through for cycles once: a worker comes to hold millions of objects."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _no_fault_of_our_own(request: pytest.FixtureRequest) -> Iterator[None]:
    """An exception at a border leaves the numbers right: without this a test would not see it."""
    before = dynaxla.read_metrics()
    yield
    if request.node.get_closest_marker("faulty") is None:
        assert not faults(before, dynaxla.read_metrics())


@pytest.fixture
def nothing_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function is kept of other tests' calls."""
    own = dataclasses.replace(process(), functions=FunctionTable())
    monkeypatch.setattr(backend, "process", lambda: own)


@pytest.fixture
def recorder() -> Recorder:
    return dynaxla.recorder()
