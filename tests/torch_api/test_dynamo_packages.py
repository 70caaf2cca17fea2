"""What the package relies on of Dynamo's captures on disk."""

from __future__ import annotations

import gc
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import config, guards, output_graph
from torch._dynamo.utils import counters
from torch.fx import Graph

from dynaxla.torch_api import dynamo_packages, modules
from dynaxla.torch_api.gc_guard import pause_collection
from tests import wrapping
from tests.torch_api.boundary import boundary


@wrapping.scaled(2.0)
def doubled(x: Tensor) -> Tensor:
    return x + 1


@wrapping.scaled(2.0)
def squared(x: Tensor) -> Tensor:
    return x * x


def captured(function: Callable[[Tensor], Tensor]) -> int:
    before, x = counters["stats"]["unique_graphs"], torch.full((3,), 5.0)
    torch.testing.assert_close(torch.compile(function, backend="eager")(x), function(x))
    return counters["stats"]["unique_graphs"] - before  # type: ignore[no-any-return]


@boundary("dynamo_packages.mend_packages")
def test_torch_is_as_it_was() -> None:
    assert dynamo_packages.mend_packages()


@boundary("dynamo_packages.mend_packages")
def test_nothing_is_altered_while_dynamo_keeps_nothing() -> None:
    assert not config.caching_precompile
    assert vars(output_graph)["unique_id"]("name").count("_") == 1
    stream, wrapper = io.BytesIO(), wrapping.scaled(3.0)(doubled)
    guards.GuardsStatePickler({id(wrapper): wrapper}, {}, {}, stream).dump(wrapper)
    assert isinstance(pickle.loads(stream.getvalue()), guards._Missing)


@boundary("dynamo_guards.Pickler", "dynamo_guards.module_of")
def test_a_wrapper_is_kept_with_what_guards_read_of_it() -> None:
    """What they do not read may be anything, as a lock."""
    wrapper = wrapping.scaled(3.0)(doubled)
    wrapper.lock = threading.Lock()
    factor = 3.0
    stream = io.BytesIO()
    with config.patch(caching_precompile=True):
        guards.GuardsStatePickler({id(wrapper): wrapper, id(factor): factor}, {}, {}, stream).dump(wrapper)
    kept: Any = pickle.loads(stream.getvalue())
    closed = dict(zip(kept.__code__.co_freevars, kept.__closure__, strict=True))
    assert (kept.__code__, kept.__kwdefaults__) == (wrapper.__code__, {"weight": 0.5})
    assert kept.__globals__ is vars(wrapping)
    assert closed["factor"].cell_contents == factor
    assert {type(kept.lock), type(closed["function"].cell_contents)} == {guards._Missing}


@boundary("dynamo_packages.mend_packages", "dynamo_guards.save_function_code", "dynamo_guards.check_guards_unchanged")
def test_functions_in_one_wrapper_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch alone serves the second function by the first one's result."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    with config.patch(caching_precompile=True):
        assert (captured(doubled), captured(squared)) == (1, 1)


@boundary("dynamo_guards.skip_unpicklable_guards")
def test_guards_that_cannot_be_saved_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    class Local:
        factor = 2.0

    local = Local()
    torch._dynamo.reset()
    with config.patch(caching_precompile=True):
        assert captured(lambda x: x * local.factor) == 1


@boundary("modules.graph_module")
def test_the_code_of_a_graph_is_made_when_it_runs() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    result = graph.output(graph.call_function(torch.neg, (x,)))
    module = modules.graph_module(torch.nn.Module(), graph)
    with graph.inserting_before(result):
        result.args = (graph.call_function(torch.exp, (x,)),)
    module.recompile()
    assert "_code" not in vars(module)
    torch.testing.assert_close(module(torch.ones(2)), torch.ones(2).exp())


@boundary("gc_guard.pause_collection")
def test_pauses_of_the_collector_nest() -> None:
    assert gc.isenabled()
    with pause_collection():
        with pause_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
