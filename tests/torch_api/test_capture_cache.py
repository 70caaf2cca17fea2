"""What the package relies on of AOTAutograd's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, symbolic_trace
from torch.testing._internal.two_tensor import TwoTensor

from dynaxla.torch_api import capture_cache, symbols
from tests.torch_api.boundary import boundary

LOADED: list[Any] = []


class Code(capture_cache.CachedCode):
    """A graph as its Python code."""

    def post_compile(self, example_inputs: object, constants: object, graph_kwargs: object) -> None:
        LOADED.append(capture_cache.get_shared())
        assert self.content is not None
        space: dict[str, Any] = {"torch": torch, "device": torch.device}
        exec(self.content, space)
        self.function = lambda args: space["forward"](None, *args)


def compiled(module: GraphModule, inputs: Any) -> Code:
    code = Code(module.code.encode(), None)
    code.post_compile(inputs, None, None)
    return code


def backend(module: GraphModule, inputs: Any) -> Any:
    compilers = {
        f"{kind}_compiler": capture_cache.make_cacheable_compiler(Code, compiled) for kind in ("fw", "bw", "inference")
    }
    with capture_cache.use_cache_tag("a tag of the test's"), capture_cache.share_in_capture("handed"):
        return aot_autograd(**compilers)(module, inputs)


@boundary(
    "capture_cache.CachedCode",
    "capture_cache.make_cacheable_compiler",
    "capture_cache.use_cache_tag",
    "capture_cache.share_in_capture",
    "capture_cache.get_shared",
)
def test_forward_and_backward_are_kept_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = []
    for at_the_backward in (None, "handed"):
        torch._dynamo.reset()
        LOADED.clear()
        x = torch.ones(3, requires_grad=True)
        torch.compile(lambda x: x.sin() * 2, backend=backend)(x).sum().backward()
        assert x.grad is not None
        found.append(x.grad)
        assert tuple(LOADED) == ("handed", at_the_backward)
    torch.testing.assert_close(found, [2 * torch.ones(3).cos()] * 2)
    assert capture_cache.get_shared() is None
    assert list(tmp_path.glob("aotautograd/*/*"))


@boundary("capture_cache.use_cache_tag")
@torch.no_grad()
def test_keys_have_the_graph_and_its_inputs_and_nothing_of_inductors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def count_keys(function: Any, x: Tensor) -> int:
        torch._dynamo.reset()
        torch.compile(function, backend=backend, dynamic=False)(x)
        return len(list(tmp_path.glob("aotautograd/*")))

    assert count_keys(lambda x: x.sin() * 2, torch.ones(3)) == 1
    with torch._inductor.config.patch(max_autotune=True, epilogue_fusion=False):
        assert count_keys(lambda x: x.sin() * 2, torch.ones(3)) == 1
    assert count_keys(lambda x: x.sin() * 3, torch.ones(3)) == 2
    assert count_keys(lambda x: x.sin() * 3, torch.ones(4)) == 3
    assert count_keys(lambda x: x.sin() * 3, torch.ones(4, dtype=torch.float64)) == 4
    assert count_keys(lambda x: x.sin() * 3, torch.ones(4, 1).t()[0]) == 4
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert count_keys(lambda x: x.sin() * 3, torch.ones(4)) == 5


@boundary("capture_cache.NotCacheable")
def test_what_refuses_to_be_kept_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(
        Code, "prepare_for_serialization", lambda self: (_ for _ in ()).throw(capture_cache.NotCacheable)
    )
    with torch.no_grad():
        result = torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    torch.testing.assert_close(result, torch.full((2,), 2.0))
    assert not list(tmp_path.glob("aotautograd/*/*"))


@boundary("capture_cache.use_cache_tag")
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: TwoTensor(x, x)])
def test_a_backward_that_is_stored_runs_again(wrap: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for loaded in (False, True):
        torch._dynamo.reset()
        LOADED.clear()
        x = wrap(torch.arange(3.0)).requires_grad_()
        loss = torch.compile(lambda x: (x.sin() * x.cos()).sum(), backend=backend)(x)
        if not loaded:  # torch's own decision is of the first run, which keeps nothing
            loss.backward()
            assert list(tmp_path.glob("aotautograd/*/*"))
            continue
        assert len(LOADED) == 2
        loss.backward(retain_graph=True)
        once = x.grad
        assert once is not None
        once = once.clone()
        loss.backward()
        assert (x.grad == 2 * once).all()


def test_a_backward_is_compiled_and_stored_at_its_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first call takes is no more than without the cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    LOADED.clear()
    loss = torch.compile(lambda x: x.sin().sum(), backend=backend)(torch.ones(3, requires_grad=True))
    assert len(LOADED) == 1
    assert not list(tmp_path.glob("aotautograd/*/*"))
    loss.backward()
    assert len(LOADED) == 2
    assert list(tmp_path.glob("aotautograd/*/*"))


@boundary(
    "capture_cache.use_cache_tag",
    "capture_cache.Lookup",
    "capture_cache.find_key_folders",
    "capture_cache.captures_folder",
)
@torch.no_grad()
def test_what_torch_would_leave_and_warn_of_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for damages in (True, True, False):
        torch._dynamo.reset()
        LOADED.clear()
        torch.compile(lambda x: x.sin() * 2, backend=backend)(torch.ones(3))
        (folder,) = capture_cache.find_key_folders()
        (entry,) = folder.iterdir()
        assert folder.parent == capture_cache.captures_folder()
        assert len(LOADED) == 1
        if damages:
            entry.write_bytes(b"no pickle")
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


@boundary("capture_cache.NotUsable")
@torch.no_grad()
def test_what_cannot_be_used_is_captured_and_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def call() -> None:
        torch._dynamo.reset()
        torch.testing.assert_close(
            torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2)), torch.full((2,), 2.0)
        )

    def refuse(self: Code, *args: object) -> None:
        (entry,) = tmp_path.glob("aotautograd/*/*")
        entry.unlink()
        raise capture_cache.NotUsable

    call()
    with monkeypatch.context() as during:
        during.setattr(Code, "post_compile", refuse)
        during.setitem(compiled.__globals__, "compiled", lambda module, inputs: Code(b"", lambda args: module(*args)))
        call()
    assert list(tmp_path.glob("aotautograd/*/*"))


@boundary("capture_cache.is_on")
def test_the_users_settings_switch_it_off() -> None:
    assert capture_cache.is_on()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert not capture_cache.is_on()
    with torch.compiler.config.patch(force_disable_caches=True):  # type: ignore[attr-defined]
        assert not capture_cache.is_on()


def _keep(told: list[bool]) -> Any:
    def keeping(module: GraphModule, inputs: Any) -> Any:
        told.append(capture_cache.is_packaging())
        return backend(module, inputs)

    return keeping


def plus(x: Tensor) -> Tensor:
    return x + 1


@boundary("capture_cache.is_packaging")
def test_it_is_known_that_a_package_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    told: list[bool] = []
    torch.compile(plus, backend=_keep(told))(torch.ones(2))
    torch._dynamo.reset()
    torch.compile(plus, backend=_keep(told), fullgraph=True).aot_compile(((torch.ones(2),), {}))
    assert told == [False, True]


@boundary("capture_cache.find_bypass_reason", "capture_cache.find_tensor_attribute")
def test_graphs_that_the_key_does_not_describe() -> None:
    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x @ x

    seen: list[str | None] = []

    def look(module: GraphModule, inputs: Any) -> Any:
        seen.append(capture_cache.find_bypass_reason(module))
        return module.forward

    torch.compile(cast, backend=look)(torch.ones(2, 2))
    torch.compile(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), backend=look)(torch.ones(2))
    known, refused = seen
    assert known is None
    assert refused is not None
    assert "cond" in refused
    assert capture_cache.find_tensor_attribute(symbolic_trace(lambda x: x + 1)) is None
    holding = symbolic_trace(lambda x: x + 1)
    holding.held = torch.ones(2)
    with holding.graph.inserting_before(holding.graph.output_node()):
        holding.graph.get_attr("held")
    assert capture_cache.find_tensor_attribute(holding) == "held"


@boundary("symbols.example_of")
def test_the_example_of_a_symbol() -> None:
    found: list[int] = []

    def look(module: GraphModule, inputs: Any) -> Any:
        sizes = [n.meta["example_value"] for n in module.graph.find_nodes(op="placeholder")]
        number = next(size for size in sizes if isinstance(size, torch.SymInt))
        found.append(symbols.example_of(symbols.expression(number), number))
        return module.forward

    torch.compile(plus, backend=look, dynamic=True)(torch.ones(7))
    assert found == [7]


@boundary("capture_cache.folder", "capture_cache.FOLDER_VARIABLE")
def test_the_folder_is_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capture_cache.FOLDER_VARIABLE, str(tmp_path / "made"))
    assert capture_cache.folder() == tmp_path / "made"
    assert capture_cache.folder().is_dir()


@boundary("capture_cache.is_precompile_cached")
def test_dynamo_keeps_its_captures_where_it_is_told_to() -> None:
    assert not capture_cache.is_precompile_cached()
    with torch._dynamo.config.patch(caching_precompile=True):
        assert capture_cache.is_precompile_cached()
