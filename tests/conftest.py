"""Every test starts with a clean Dynamo and reads compile counts from the process's recorder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import dynaxla
from dynaxla.observe.recorder import Recorder
from tests.bucketing.poison import faults

_SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture)
settings.register_profile("ci", max_examples=60, derandomize=True, deadline=None, suppress_health_check=_SLOW)
settings.register_profile("thorough", max_examples=2000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile("ci")  # pytest --hypothesis-profile=thorough comes later and wins


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Failures that tests provoke are not remembered in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


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
def recorder() -> Recorder:
    return dynaxla.recorder()
