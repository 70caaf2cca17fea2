"""A stored capture that is damaged, or not what was stored, is removed and captured anew; so many are stored at most."""

from __future__ import annotations

import functools
import logging
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from torch import Tensor

import dynaxla
from dynaxla import graph_builder
from dynaxla.aot_cache import cached_graph, capture_directory
from dynaxla.aot_cache.cached_graph import CachedGraph, pack_content, unpack_content
from dynaxla.cache.entry import MAGIC
from dynaxla.errors import PackageError
from dynaxla.observe.recorder import Recorder
from tests.aot_cache.stored import assert_all_close, compile_anew, gradients, mlp
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("captures")


def damage(folder: Path, change: Callable[[bytes], bytes]) -> None:
    files = list(folder.glob("dynaxla-*/*"))
    assert files
    for path in files:
        path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[::-1],
        lambda content: bytes([content[0] ^ 1]) + content[1:],
    ],
)
@torch.no_grad()
def test_what_is_damaged_is_captured_again(
    change: Callable[[bytes], bytes], captures: Path, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """And removed, so that it is once: neither torch nor this package warns."""
    model, x = mlp(), torch.randn(5, 8)
    compile_anew(model)(x)
    damage(captures, change)
    before = len(dynaxla.read_metrics().captures_discarded)
    for loaded in (0, 1):
        with recorder.expect(captures_loaded=loaded):
            assert_close(compile_anew(model)(x), model(x))
        assert len(dynaxla.read_metrics().captures_discarded) == before + 1
    assert not [each for each in caplog.records if each.name.startswith("torch") and each.levelno >= logging.WARNING]


@torch.no_grad()
def test_what_cannot_be_built_is_captured_again(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    model, x = mlp(), torch.randn(5, 8)
    compile_anew(model)(x)

    def fail(*args: object) -> Any:
        raise PackageError("it does not fit")

    with monkeypatch.context() as during:
        during.setattr(cached_graph, "_build_from", fail)
        with recorder.expect(captures_loaded=0):
            assert_close(compile_anew(model)(x), model(x))
    assert "it does not fit" in dynaxla.read_metrics().captures_discarded[-1]
    with recorder.expect(captures_loaded=1):
        assert_close(compile_anew(model)(x), model(x))


@torch.no_grad()
def test_the_captures_that_were_used_least_recently_go(
    captures: Path, monkeypatch: pytest.MonkeyPatch, recorder: Recorder
) -> None:
    """Those of this package alone."""
    functions = [lambda x: x.sin(), lambda x: x.cos(), lambda x: x.exp()]
    others = captures / "a0123" / "ones"
    others.parent.mkdir(parents=True)
    others.write_bytes(bytes(1 << 20))
    used = functools.partial(compile_anew, dynamic=False)

    def find(index: int, loaded: int) -> None:
        with recorder.expect(captures_loaded=loaded):
            used(functions[index])(torch.ones(3))

    find(0, loaded=0)
    size = sum(path.stat().st_size for path in captures.glob("dynaxla-*/*"))
    monkeypatch.setattr(capture_directory, "MAX_BYTES", 5 * size // 2)
    find(1, loaded=0)
    find(0, loaded=1)
    find(2, loaded=0)
    assert len(list(captures.glob("dynaxla-*"))) == 2
    find(0, loaded=1)
    find(2, loaded=1)
    find(1, loaded=0)
    assert others.stat().st_size == 1 << 20


@torch.no_grad()
def test_a_flipped_bit_of_a_recipe_is_seen(captures: Path, recorder: Recorder) -> None:
    model, x = mlp(), torch.randn(5, 8)
    compile_anew(model)(x)

    def flip(content: bytes) -> bytes:
        place = content.index(MAGIC + b"\0\0\0\2") + 2000
        return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]

    damage(captures, flip)
    with recorder.expect(captures_loaded=0):
        assert_close(compile_anew(model)(x), model(x))


@torch.no_grad()
def test_a_stored_graph_on_which_a_pass_fails_is_captured_anew(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sines(x: Tensor) -> Tensor:
        return x.sin() * 2

    x, larger = torch.randn(5, 8), torch.randn(40, 8)
    compile_anew(sines, dynamic=True)(x)
    before = len(dynaxla.read_metrics().captures_discarded)
    fails_once = Mock(wraps=graph_builder.run_passes, side_effect=[KeyError("s45"), DEFAULT, DEFAULT])
    monkeypatch.setattr(graph_builder, "run_passes", fails_once)
    compiled = compile_anew(sines, dynamic=True)
    with recorder.expect(captures_loaded=1):
        for given in (x, larger, x):
            assert_close(compiled(given), sines(given))
    (told,) = dynaxla.read_metrics().captures_discarded[before:]
    assert "KeyError: 's45'" in told


def replace_recipes(captures: Path, other: Path, change: Callable[[bytes], bytes] = lambda recipe: recipe) -> None:
    """Gives the graphs of a stored capture the recipes of another one, and leaves their warm starts."""

    def graphs(entry: Any) -> list[CachedGraph]:
        return [each.result for each in (entry.compiled_fw, entry.compiled_bw) if each is not None]

    (path,), (donor,) = ([p for p in folder.glob("*/*") if p.is_file()] for folder in (captures, other))
    entry = pickle.loads(path.read_bytes())
    for mine, its in zip(graphs(entry), graphs(pickle.loads(donor.read_bytes())), strict=True):
        recipe, (_, bundle, warm_start, _) = unpack_content(its.content or b"")[0], unpack_content(mine.content or b"")
        mine.content = pack_content(change(recipe), bundle, warm_start)
    path.write_bytes(pickle.dumps(entry))


@pytest.mark.parametrize("change", [lambda recipe: recipe, lambda recipe: recipe[: len(recipe) // 2]])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_that_is_not_what_was_stored_is_captured_anew_in_the_call(
    change: Any,
    trains: bool,
    dynamic: bool,
    captures: Path,
    tmp_path: Path,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sines(x: Tensor) -> Tensor:
        return x.sin() * 2

    def call() -> None:
        x = torch.randn(5, 8, requires_grad=trains)
        if trains:
            assert_all_close(gradients(compiled, x), gradients(sines, x))
        else:
            assert_close(compiled(x), sines(x))

    compiled = compile_anew(sines, dynamic)
    call()
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
        compiled = compile_anew(lambda x: x.cos() * 2, dynamic)
        gradients(compiled, torch.randn(5, 8, requires_grad=True)) if trains else compiled(torch.randn(5, 8))
    replace_recipes(captures, tmp_path / "other" / "aotautograd", change)
    shutil.rmtree(tmp_path / "own")
    before = len(dynaxla.read_metrics().captures_discarded)
    compiled = compile_anew(sines, dynamic)
    with recorder.expect(captures_loaded=1 + trains):
        call()
        call()
    (told,) = dynaxla.read_metrics().captures_discarded[before:]
    assert "sines" in told
    assert not [each for each in captures.glob("*/*") if each.is_file()]
    for loaded in (0, 1 + trains):
        compiled = compile_anew(sines, dynamic)
        with recorder.expect(captures_loaded=loaded):
            call()


def test_a_backward_is_captured_anew_in_the_state_of_its_forward(
    tmp_path: Path, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are not on disk, and the backward's graph cannot be read; the forward ran under autocast."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).float().sin()

    def run(function: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return function(x, y)

    x, y = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    wanted = gradients(lambda x: run(product, x, y), x)
    assert_all_close(gradients(lambda x: run(compile_anew(product), x, y), x), wanted)
    shutil.rmtree(tmp_path / "own")
    with recorder.expect(captures_loaded=2, compiles=1):
        loss = run(compile_anew(product), x, y).square().sum()
    really = cached_graph.deserialize_graph
    monkeypatch.setattr(cached_graph, "deserialize_graph", lambda content: refuse_backward(really(content)))
    with recorder.expect(compiles=1):
        loss.backward()
    assert_close(x.grad, wanted[1])
    assert "is not known here" in dynaxla.read_metrics().captures_discarded[-1]


def refuse_backward(recipe: Any) -> Any:
    if recipe.kind == "backward":
        raise PackageError("a class is not known here")
    return recipe
