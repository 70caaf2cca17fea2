"""An engine's programs outlive it: who serves the model again captures nothing. Whatever is kept, answers are eager's."""

from __future__ import annotations

import dataclasses
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

import dynaxla
from dynaxla import backend
from dynaxla import runtime_state as shared
from dynaxla.aot_cache import cached_graph
from dynaxla.cache.store import Store
from dynaxla.lowering.function_table import FunctionTable
from dynaxla.runtime.executable_cache import ExecutableCache
from dynaxla.serving.llm import engine_cache
from dynaxla.serving.llm.requests import SamplingParams
from tests.lists import quick
from tests.serving.llm import small
from tests.serving.llm.small import KINDS, prompts, served

PROGRAMS = 5
OF_THE_MODEL = 2


@dataclass(frozen=True)
class Counted:
    """What an engine did: how many programs it found, and why it kept none."""

    found: int
    not_kept: str


def _with_store(folder: Path, patch: pytest.MonkeyPatch) -> None:
    own = dataclasses.replace(shared.process(), executables=ExecutableCache(Store(folder)), functions=FunctionTable())
    for module, name in ((backend, "process"), (engine_cache, "process"), (cached_graph, "shared_here")):
        patch.setattr(module, name, lambda: own)


@pytest.fixture(scope="module")
def of_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs of "llama"."""
    folder = tmp_path_factory.mktemp("llama") / "own"
    with pytest.MonkeyPatch.context() as patch:
        _with_store(folder, patch)
        assert serve("llama") == Counted(0, "")
    return folder


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where programs are kept, of which there are none."""
    _with_store(tmp_path / "own", monkeypatch)
    return tmp_path / "own"


@pytest.fixture
def entries(own: Path, of_llama: Path) -> Path:
    """Where programs are kept: those of "llama"."""
    shutil.copytree(of_llama, own)
    return own / "entries"


def serve(kind: str, change: Callable[[Any], object] | None = None) -> Counted:
    """Answers are those of eager, for the same model."""
    torch._dynamo.reset()
    build = small.build

    def changed(kind: str) -> PreTrainedModel:
        made = build(kind)
        if change is not None:
            change(made)
        return made

    before = dynaxla.read_metrics()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small, "build", changed)
        with served(kind) as here:
            asked = prompts(3, 17, 9)
            going = [here.engine.submit(prompt, SamplingParams(6, temperature=0)) for prompt in asked]
            for prompt, generation in zip(asked, going, strict=True):
                assert [chosen.token for chosen in generation.result(60).chosen] == here.greedy(prompt, 6)
    after = dynaxla.read_metrics()
    told = after.captures_not_kept[len(before.captures_not_kept) :]
    return Counted(after.captures_loaded - before.captures_loaded, "".join(told))


@pytest.mark.parametrize("kind", quick(KINDS, "gemma3"))
def test_the_next_engine_captures_nothing(kind: str, own: Path) -> None:
    assert serve(kind) == Counted(0, "")
    assert len(list((own / "entries").glob("*.engine_program"))) == PROGRAMS
    before = dynaxla.read_metrics()
    assert serve(kind) == Counted(PROGRAMS, "")
    after = dynaxla.read_metrics()
    assert (after.lowering_s, after.compiles) == (before.lowering_s, before.compiles), (
        "programs were not known by their keys"
    )


@pytest.mark.usefixtures("own")
def test_models_that_are_served_after_one_seed() -> None:
    """As a script begins that seeds Python's generator, too: torch draws keys from that."""
    for kind in ("llama", "gpt2"):
        random.seed(3)
        assert serve(kind) == Counted(0, "")


def test_a_model_with_an_op_of_the_users(own: Path) -> None:
    """No key says what its formula is, and a kept program may have an older one in it."""
    library = torch.library.Library("of_a_user", "DEF")
    library.define("half(Tensor x) -> Tensor")
    library.impl("half", lambda x: x * 0.5, "CompositeImplicitAutograd")

    def with_it(made: Any) -> None:
        made.model.layers[1].mlp.forward = lambda x: torch.ops.of_a_user.half(x)

    try:
        assert "of_a_user.half is the user's" in serve("llama", with_it).not_kept
    finally:
        library._destroy()
    assert len(list(own.glob("entries/*.engine_program"))) == PROGRAMS - OF_THE_MODEL


@pytest.mark.usefixtures("entries")
def test_weights_may_be_others() -> None:
    def other_weights(made: Any) -> None:
        with torch.no_grad():
            for weight in made.parameters():
                weight.copy_(torch.randn_like(weight) * 0.2)

    assert serve("llama", other_weights) == Counted(PROGRAMS, "")


def hooked(made: Any) -> None:
    made.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 3)


def another_epsilon(made: Any) -> None:
    made.model.norm.variance_epsilon = 10.0


def another_activation(made: Any) -> None:
    made.model.layers[1].mlp.act_fn = nn.ReLU()


def another_forward(made: Any) -> None:
    made.model.layers[1].mlp.forward = lambda x: x * 0.5


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize("change", quick((hooked, another_epsilon, another_activation, another_forward), hooked))
def test_a_model_that_computes_something_else_is_captured(change: Callable[[Any], object]) -> None:
    assert serve("llama", change) == Counted(0, "")


def rotating_double(rotate: Callable[..., Any]) -> Callable[..., Any]:
    def rotated(*args: Any, **kwargs: Any) -> Any:
        query, key = rotate(*args, **kwargs)
        return query * 2, key

    return rotated


@pytest.mark.usefixtures("entries")
@pytest.mark.parametrize("how", ["function", "method"])
def test_code_in_the_place_of_a_models_is_captured(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As packages of faster kernels put theirs there."""
    if how == "function":
        rotate = rotating_double(modeling_llama.apply_rotary_pos_emb)
        monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)
    else:
        forward = lambda self, x: self.down_proj(self.up_proj(x))  # noqa: E731 - a method
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    assert serve("llama") == Counted(PROGRAMS - OF_THE_MODEL, "")


def cut(data: bytes) -> bytes:
    return data[:-9]


def scratched(data: bytes) -> bytes:
    return data[:3000] + bytes([data[3000] ^ 1]) + data[3001:]


def emptied(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("spoil", quick((cut, scratched, emptied), scratched))
def test_damaged_entries_are_made_anew(spoil: Callable[[bytes], bytes], entries: Path) -> None:
    for path in entries.glob("*.engine_program"):
        path.write_bytes(spoil(path.read_bytes()))
    assert serve("llama") == Counted(0, "")
    assert serve("llama") == Counted(PROGRAMS, "")


@pytest.mark.usefixtures("own")
def test_an_entry_that_torch_cannot_read_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine_cache, "_content", lambda made: (2).to_bytes(4, "big") + b"{}no pickle")
        serve("llama")
    assert serve("llama") == Counted(0, "")
    assert serve("llama") == Counted(PROGRAMS, "")


class Uncopied:
    """Something with a state that Python does not show; a deep copy is the same."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock

    def __deepcopy__(self, memo: Any) -> Uncopied:
        return self


def test_a_model_of_which_nothing_says_what_it_does(own: Path) -> None:
    def with_state(made: Any) -> None:
        made.layers_seen = Uncopied(threading.Lock())

    counted = serve("llama", with_state)
    assert "layers_seen.lock is of _thread.lock" in counted.not_kept
    assert not list(own.glob("entries/*.engine_program"))


def test_what_torch_cannot_save_is_served(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(made: Any) -> bytes:
        raise TypeError("no pickle of that")

    monkeypatch.setattr(engine_cache, "_content", refuse)
    assert "no pickle of that" in serve("llama").not_kept
    assert not list(own.glob("entries/*.engine_program"))
