"""Captures outlive their process: a graph is built of what torch kept of it, and gives what eager gives."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

import dynaxla
from dynaxla.aot_cache import cached_graph, serialized_graph
from dynaxla.aot_cache.cached_graph import CachedGraph, pack_content, unpack_content
from dynaxla.cache.key import Key
from dynaxla.cache.package import Archive
from dynaxla.errors import PackageError
from dynaxla.observe.recorder import Recorder
from dynaxla.ops.table import OpRegistry
from dynaxla.runtime.executable_cache import ExecutableCache
from dynaxla.torch_api import aot_calls
from tests.aot_cache.stored import assert_all_close, compile_anew, gradients, mlp
from tests.tolerances import assert_close

pytestmark = pytest.mark.usefixtures("captures")


def test_training_at_several_sizes(recorder: Recorder) -> None:
    model = mlp()
    for loaded in (0, 2):
        compiled = compile_anew(model, dynamic=True)
        with recorder.expect(captures_loaded=loaded, compiles=0 if loaded else 4, loads=4 if loaded else 0):
            for rows in (5, 7, 20):
                x = torch.randn(rows, 8, requires_grad=True)
                assert_all_close(gradients(compiled, x), gradients(model, x))


@pytest.mark.parametrize("train", [False, True])
def test_a_capture_holds_for_the_sizes_of_its_guards(train: bool) -> None:
    """The number of classes is what a guard says of two sizes, of which another guard fixes one."""

    def function(scale: Tensor, classes: Tensor, most: int, least: int) -> Tensor:
        chosen = F.one_hot(classes, max(most + 1, least))[..., -least:]
        return chosen.to(scale.dtype) * scale if train else chosen

    compiled = torch.compile(function, backend="dynaxla", dynamic=True)
    for classes, most, least in (([3, 1, 3], 3, 4), ([3, 2, 1], 7, 4), ([3, 2, 1], 2, 5), ([0, 2, 1], 9, 5)):
        scale = torch.tensor(1.5, requires_grad=train)
        made = [f(scale, torch.tensor(classes), most, least) for f in (compiled, function)]
        assert_close(*made)
        if train:
            assert_close(*(torch.autograd.grad(each.sum(), scale)[0] for each in made))


def test_a_backward_runs_again(recorder: Recorder) -> None:
    model, x = mlp(), torch.randn(5, 8)
    for loaded in (0, 2):
        with recorder.expect(captures_loaded=loaded):
            model.zero_grad()
            loss = compile_anew(model)(x).sum()
            loss.backward(retain_graph=True)
            once = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
            loss.backward()
        assert_all_close([parameter.grad for parameter in model.parameters()], [2 * each for each in once])


def test_a_backward_of_tensor_subclasses_runs_again(recorder: Recorder) -> None:
    for loaded in (0, 2):
        x = TwoTensor(torch.randn(5, 8), torch.randn(5, 8)).requires_grad_()
        with recorder.expect(captures_loaded=loaded):
            loss = compile_anew(lambda x: (x.sin() * x.cos()).sum())(x)
            loss.backward(retain_graph=loaded > 0)  # what the first run keeps is not stored
        if loaded:
            loss.backward()
            for grad, inner in ((x.grad.a, x.a), (x.grad.b, x.b)):
                assert_close(grad, 2 * (2 * inner.detach()).cos())


def aliased(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y.t()


def changes_its_input(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


def has_constants(x: Tensor) -> Tensor:
    return x[torch.tensor([1, 0])] + torch.tensor([[1.5], [2.5]])


def by_several_graphs(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y + x.shape[0]


def under_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.t()).float()


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.cos(), lambda x: x * 2, (x,))


def attends(x: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize(
    ("function", "graphs"),
    [
        (aliased, 1),
        (changes_its_input, 1),
        (has_constants, 1),
        (by_several_graphs, 2),
        (under_autocast, 1),
        (attends, 1),
    ],
)
@torch.no_grad()
def test_what_is_loaded_gives_eagers_numbers(function: Any, graphs: int, recorder: Recorder) -> None:
    for loaded in (0, graphs):
        compiled = compile_anew(function, dynamic=True)
        with recorder.expect(captures_loaded=loaded):
            x, y = (torch.arange(6.0).reshape(2, 3) for _ in range(2))
            results, expected = compiled(x), function(y)
        assert_all_close(results, expected)
        assert_close(x, y)
        if function is aliased:
            results[0].zero_()
            assert not results[1].any()


def asserts(x: Tensor) -> Tensor:
    torch._assert_async((x >= 0).all(), "negative")
    return x.sqrt() + torch.rand_like(x).floor()


@pytest.fixture
def graphs_read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The recipes whose graphs were read."""
    contents: list[bytes] = []

    def noting(content: bytes) -> Any:
        contents.append(content)
        return serialized_graph.deserialize_graph(content)

    monkeypatch.setattr(cached_graph, "deserialize_graph", noting)
    return contents


@pytest.mark.parametrize("function", [aliased, changes_its_input, has_constants, by_several_graphs, attends, asserts])
@torch.no_grad()
def test_no_graph_is_read_where_programs_are_found(function: Any, graphs_read: list[bytes], recorder: Recorder) -> None:
    """Views, constants, seeds, messages of assertions and sizes are known without it. Another size is compiled of the graph."""
    for rows, compiles, reads in ((2, True, False), (2, False, False), (40, True, True)):
        compiled = compile_anew(function, dynamic=True)
        before, compiled_before = len(graphs_read), recorder.snapshot().compiles
        x, y = (torch.arange(3.0 * rows).reshape(rows, 3) for _ in range(2))
        assert_all_close(compiled(x), function(y))
        assert_close(x, y)
        assert (recorder.snapshot().compiles > compiled_before, len(graphs_read) > before) == (compiles, reads)
    if function is asserts:
        with pytest.raises(RuntimeError, match="negative"):
            compile_anew(function, dynamic=True)(-torch.ones(2, 3))


@torch.no_grad()
def test_a_stored_graph_whose_checks_compare_sizes(recorder: Recorder) -> None:
    """The checks of a bag's values are traced on the sizes that were stored, and narrow their ranges."""

    def bags(weight: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        return F.embedding_bag(indices, weight, offsets)

    args = torch.randn(10, 4), torch.randint(10, (8,)), torch.tensor([0, 2, 6])
    before = len(dynaxla.read_metrics().captures_discarded)
    for loaded in (0, 1):
        with recorder.expect(captures_loaded=loaded):
            assert_close(compile_anew(bags, dynamic=True)(*args), bags(*args))
    assert len(dynaxla.read_metrics().captures_discarded) == before


@torch.no_grad()
def test_folded_weights_and_a_backward_need_no_graph(graphs_read: list[bytes], recorder: Recorder) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()
    image = torch.randn(2, 3, 9, 9)
    x = torch.randn(5, 8, requires_grad=True)
    for number in range(2):
        with recorder.expect(captures_loaded=3 * number):
            assert_close(compile_anew(model)(image), model(image))
            model[0].weight.mul_(2)
            with torch.enable_grad():
                assert_all_close(gradients(compile_anew(mlp()), x), gradients(mlp(), x))
    assert not graphs_read


@torch.no_grad()
def test_a_capture_is_called_without_the_wrapper(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """As a graph is that was captured: the wrapper takes as long as a small call."""
    direct: list[bool] = []
    find = aot_calls._find_graph

    def noting(whole: Callable[..., Any]) -> Callable[[list[Any]], Any] | None:
        graph = find(whole)
        direct.append(graph is not None)
        return graph

    monkeypatch.setattr(aot_calls, "_find_graph", noting)
    for loaded in (0, 1):
        with recorder.expect(captures_loaded=loaded):
            compiled, x = compile_anew(mlp()), torch.randn(5, 8)
            for _ in range(3):
                assert_close(compiled(x), mlp()(x))
    assert direct == [True, True]


def kept_graph(function: Callable[..., Any], x: Tensor, monkeypatch: pytest.MonkeyPatch) -> CachedGraph:
    kept: list[CachedGraph] = []
    built = CachedGraph.built

    def noting(*args: Any) -> CachedGraph:
        kept.append(built(*args))
        return kept[-1]

    with monkeypatch.context() as during:
        during.setattr(CachedGraph, "built", noting)
        compile_anew(function)(x)
    return kept[0]


@torch.no_grad()
def test_what_is_known_of_a_graph_holds_where_passes_would_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Dynamo keeps captures, no tag says what has changed since."""
    data = pickle.dumps(kept_graph(lambda x: x.sin(), torch.ones(3), monkeypatch))
    assert pickle.loads(data).stored is not None
    torch.set_default_dtype(torch.float64)
    try:
        assert pickle.loads(data).stored is None
    finally:
        torch.set_default_dtype(torch.float32)
    own = cached_graph.shared_here()
    another = dataclasses.replace(own, registered=OpRegistry(own.registered.current.with_records([])))
    monkeypatch.setattr(cached_graph, "shared_here", lambda: another)
    found = pickle.loads(data)
    assert found.stored is None
    found.post_compile((), None, {})
    (result,) = found([torch.ones(3)])
    assert_close(result, torch.ones(3).sin())


@torch.no_grad()
def test_the_graph_of_another_sketch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never run in the place of the other one."""
    one, other = (kept_graph(f, torch.ones(3), monkeypatch) for f in (lambda x: x.sin(), lambda x: x.cos()))
    contents = [unpack_content(each.content or b"") for each in (one, other)]
    mixed = CachedGraph(pack_content(contents[1][0], None, contents[0][2]), None)
    loaded = pickle.loads(pickle.dumps(mixed))
    own = dataclasses.replace(cached_graph.shared_here(), executables=ExecutableCache(None))
    monkeypatch.setattr(cached_graph, "shared_here", lambda: own)
    loaded.post_compile((), None, {})
    with pytest.raises(PackageError, match="another one than what was saved"):
        loaded([torch.ones(3)])


@torch.no_grad()
def test_control_flow_is_captured_in_every_process(recorder: Recorder) -> None:
    """torch's key of it would not say all."""
    x = torch.arange(6.0).reshape(2, 3)
    for _ in range(2):
        with recorder.expect(captures_loaded=0):
            assert_close(compile_anew(branches)(x), branches(x))
        assert "Unsupported call_function target cond" in dynaxla.read_metrics().captures_not_kept[-1]


@torch.no_grad()
def test_weights_are_the_callers_and_read_anew(recorder: Recorder) -> None:
    for number in range(2):
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).eval()
        compiled = compile_anew(model)
        x = torch.randn(2, 3, 9, 9)
        with recorder.expect(captures_loaded=number):
            assert_close(compiled(x), model(x))
        model[0].weight.mul_(2)
        assert_close(compiled(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("train", [False, True])
def test_a_function_keeps_neither_a_model_nor_the_first_inputs(train: bool, recorder: Recorder) -> None:
    def run() -> list[weakref.ref[Tensor]]:
        torch.manual_seed(0)
        model, x = mlp(), torch.randn(5, 8)
        with torch.set_grad_enabled(train):
            compiled.append(compile_anew(model))
            y = compiled[-1](x).sum()
        if train:
            y.backward()
        return [weakref.ref(x), *map(weakref.ref, model.parameters())]

    compiled: list[Callable[[Tensor], Tensor]] = []
    for loaded in (0, 1):
        with recorder.expect(captures_loaded=loaded * (1 + train)):
            first, *weights = run()
        assert first() is None
        compiled.clear()
        gc.collect()
        assert [each() for each in weights] == [None] * len(weights)


def test_random_numbers_are_drawn_anew(recorder: Recorder) -> None:
    drawn = []
    for number in range(2):
        compiled = compile_anew(lambda x: torch.rand_like(x))
        with recorder.expect(captures_loaded=number):
            torch.manual_seed(3)
            drawn.append(compiled(torch.ones(4)))
        assert not torch.equal(compiled(torch.ones(4)), drawn[-1])
    assert torch.equal(*drawn)


@torch.no_grad()
def test_another_option_setting_or_mark_is_another_capture(recorder: Recorder) -> None:
    x = torch.randn(4, 8)

    def again(loaded: int, **options: Any) -> Tensor:
        compiled = compile_anew(lambda x: x.softmax(1) + torch.ones(8), **options)
        with recorder.expect(captures_loaded=loaded):
            return compiled(x)

    again(0)
    again(1)
    again(0, fold_parameters=False)
    torch.set_default_dtype(torch.float64)
    try:
        assert again(0).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    dynaxla.mark_bucketed(x, 0, min=2, max=16)
    again(0)
    again(1)


@torch.no_grad()
def test_a_users_operator_is_captured_in_every_process(recorder: Recorder) -> None:
    library = torch.library.Library("captures_test", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("captures_test::twice", torch.empty_like, lib=library)
    before = len(dynaxla.read_metrics().captures_not_kept)
    for number in range(2):
        with recorder.expect(captures_loaded=0):
            assert_close(
                compile_anew(lambda x: torch.ops.captures_test.twice(x) + 1)(torch.ones(3)), torch.full((3,), 3.0)
            )
        (told,) = dynaxla.read_metrics().captures_not_kept[before + number :]
        assert "captures_test.twice is the user's" in told


@pytest.mark.parametrize("options", [{"cache": False}, {"executor": "eager"}])
@torch.no_grad()
def test_nothing_is_kept_where_the_user_says_so(options: dict[str, Any], captures: Path) -> None:
    compile_anew(mlp(), **options)(torch.randn(2, 8))
    assert not captures.exists()


def test_a_package_that_is_bytes_is_whole_and_of_these_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    archive, key = Archive(), Key.of(number=1)
    archive.put("graph", key, b"content")
    data = archive.pack({"about": "a graph"})
    document, found = Archive.unpack(data)
    assert (document["about"], found.get("graph", key), found.get("executable", key)) == ("a graph", b"content", None)
    for place in range(len(data)):
        with pytest.raises(PackageError):
            Archive.unpack(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(PackageError):
            Archive.unpack(data[:place])
    monkeypatch.setattr("dynaxla.cache.package.versions", lambda: {"torch": "1", "jaxlib": "2", "dynaxla": "3"})
    with pytest.raises(PackageError, match=r"torch .*, here 1"):
        Archive.unpack(data)


def test_an_error_of_building_is_the_calls() -> None:
    """Not torch's: it has no way to capture again where Dynamo's captures are kept."""
    kept = CachedGraph(b"", None)
    kept.bundle = None
    kept.recipe = dataclasses.replace(_recipe(), options={"unknown": 1})
    kept.post_compile((), None, {})
    with pytest.raises(dynaxla.backend.DynaxlaError, match="unknown option"):
        kept([])


def _recipe() -> Any:
    from dynaxla.aot_cache.serialized_graph import SerializedGraph
    from dynaxla.types import Saved

    return SerializedGraph("inference", None, None, frozenset(), Saved(), (), None, {}, "")  # type: ignore[arg-type]


@torch.no_grad()
def test_a_folder_that_others_can_write_to_is_not_believed(captures: Path) -> None:
    folder = captures.parent
    folder.mkdir()
    folder.chmod(0o777)
    x = torch.randn(5, 8)
    assert_close(compile_anew(mlp())(x), mlp()(x))
    assert not captures.exists()
    told = dynaxla.read_metrics().captures_not_kept[-1]
    assert "other users can write to it" in told
    assert "TORCHINDUCTOR_CACHE_DIR" in told
    folder.chmod(0o700)
    assert_close(compile_anew(mlp())(x), mlp()(x))
    assert captures.exists()


@torch.no_grad()
def test_a_folder_that_cannot_be_written_to_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, recorder: Recorder
) -> None:
    """The graph is compiled, and nobody is warned."""
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    x = torch.randn(5, 8)
    with recorder.expect(compiles=1, captures_loaded=0):
        assert_close(compile_anew(mlp())(x), mlp()(x))
    assert "is not used" in dynaxla.read_metrics().captures_not_kept[-1]
    assert not [each for each in caplog.records if each.name.startswith("torch._functorch")]


@torch.no_grad()
def test_an_option_switches_it_off(captures: Path, recorder: Recorder) -> None:
    """In a process that finds captures too; without it they are stored."""
    x = torch.randn(5, 8)
    compile_anew(mlp(), captures=False)(x)
    assert not captures.exists()
    for kept, loaded in ((True, 0), (False, 0), (True, 1)):
        options = {} if kept else {"captures": False}
        with recorder.expect(captures_loaded=loaded):
            assert_close(compile_anew(mlp(), **options)(x), mlp()(x))


@torch.no_grad()
def test_a_graph_with_an_effect_is_captured_in_every_process(
    captures: Path, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    def tells(x: Tensor) -> Tensor:
        torch.ops.aten._print("told")
        return x.sin()

    x = torch.eye(3) + 0.1
    with recorder.expect(captures_loaded=0):
        for _ in range(2):
            assert_close(compile_anew(tells)(x), tells(x))
    assert not captures.exists()
    assert "has an effect" in dynaxla.read_metrics().captures_not_kept[-1]
    assert not [each for each in caplog.records if each.name.startswith("torch._functorch")]
