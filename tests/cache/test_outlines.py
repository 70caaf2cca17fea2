"""What is known of a program beside its executable outlives the process too: a later one pads nothing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import dynaxla
from dynaxla import backend
from dynaxla import runtime_state as shared
from dynaxla.bucketing.size_buckets import PartBucket
from dynaxla.cache.kinds import METADATA
from dynaxla.cache.store import Store
from dynaxla.observe.recorder import Recorder
from dynaxla.ops.table import core_table
from dynaxla.options import Options
from dynaxla.programs.metadata import MetadataCache
from dynaxla.programs.part_graphs import PartGraphs
from dynaxla.programs.specialization import BucketSpec, ExactSpec, ProgramSpec
from dynaxla.runtime.executable_cache import KIND, ExecutableCache
from dynaxla.runtime.pjrt_clients import cpu_client
from dynaxla.types import Saved
from tests.async_compile.ended import until
from tests.bucketing.poison import poison
from tests.tolerances import assert_close

ROWS = (5, 7, 12, 20, 40)
OPTIONS = Options(matmul_precision="default")
BUCKETS = dynaxla.Explicit((8, 16, 32, 64))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Of the process that the tests' functions are compiled in."""
    made = Store(tmp_path / "cache")
    own = dataclasses.replace(shared.process(), executables=ExecutableCache(made))
    monkeypatch.setattr(backend, "process", lambda: own)
    poison(monkeypatch)
    return made


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The buckets that a part was padded to."""
    found: list[Any] = []
    pad = PartGraphs.pad

    def noted(self: PartGraphs, buckets: PartBucket, order: Any) -> Any:
        found.append(buckets)
        return pad(self, buckets, order)

    monkeypatch.setattr(PartGraphs, "pad", noted)
    return found


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Softmax(0), torch.nn.LayerNorm(16)).eval()


def compiled_anew(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """As in a process that finds nothing but what is on disk."""
    torch._dynamo.reset()
    return torch.compile(function, backend="dynaxla", dynamic=True, options={"buckets": BUCKETS, **options})


def agree(compiled: Callable[..., Any], eager: Callable[..., Any], rows: tuple[int, ...] = ROWS) -> None:
    for count in rows:
        x = torch.randn(count, 8)
        assert_close(compiled(x), eager(x))


@torch.no_grad()
@pytest.mark.parametrize("compile", ["now", "behind"])
def test_a_later_process_pads_nothing(store: Store, padded: list[Any], recorder: Recorder, compile: str) -> None:
    net = model()
    with recorder.expect(compiles=4):
        agree(compiled_anew(net), net)
    assert len(padded) == 4
    later = compiled_anew(net, compile=compile)
    with recorder.expect(compiles=0, loads=4):
        for _ in range(2):
            agree(later, net)
            until(lambda: backend.process().compile_service.idle)
    assert len(padded) == 4


@torch.no_grad()
def test_programs_come_before_calls_want_them(store: Store, recorder: Recorder) -> None:
    net = model()
    agree(compiled_anew(net), net)
    later = compiled_anew(net)
    with recorder.expect(loads=4):
        agree(later, net, (20,))
        until(lambda: backend.process().compile_service.idle)
    with recorder.expect(compiles=0, loads=0):
        agree(later, net)


@torch.no_grad()
def test_the_sizes_that_were_used_last_are_remembered(store: Store, recorder: Recorder) -> None:
    """As many as programs are kept, so that what is loaded drops nothing."""
    net = model()
    agree(compiled_anew(net, max_executables=2), net)
    later = compiled_anew(net, max_executables=2)
    with recorder.expect(loads=2, evictions=0):
        agree(later, net, (20,))
        until(lambda: backend.process().compile_service.idle)
    with recorder.expect(compiles=0, loads=0):
        agree(later, net, (40,))


@torch.no_grad()
def test_outputs_of_all_kinds(store: Store, padded: list[Any], recorder: Recorder) -> None:
    """Views, sizes, arguments handed on, and what is computed of weights alone."""
    weight = torch.nn.Parameter(torch.randn(8, 8))

    def several(x: Tensor) -> Any:
        return x @ (weight.sin() @ weight), x.t() + 1, x.shape[0] * 2, x[1:-1].sum(0), x, weight.cos()

    for compiles in (4, 0):
        compiled = compiled_anew(several)
        with recorder.expect(compiles=compiles):
            for count in ROWS:
                x = torch.randn(count, 8)
                for made, wanted in zip(compiled(x), several(x), strict=True):
                    if isinstance(wanted, int):
                        assert made == wanted
                    else:
                        assert_close(made, wanted)
                        assert made.stride() == wanted.stride()
        until(lambda: backend.process().compile_service.idle)
    assert len(padded) == 4


def test_training(store: Store, padded: list[Any], recorder: Recorder) -> None:
    net = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
    ).double()
    for compiles in (True, False):
        compiled = compiled_anew(net)
        with recorder.expect(compiles=8 if compiles else 0):
            for count in ROWS:
                x = torch.randn(count, 8, dtype=torch.float64)
                found = torch.autograd.grad(compiled(x).square().sum(), list(net.parameters()))
                wanted = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
                for mine, eagers in zip(found, wanted, strict=True):
                    assert_close(mine, eagers)
        until(lambda: backend.process().compile_service.idle)
    assert len(padded) == 8


@torch.no_grad()
@pytest.mark.parametrize("kind", [KIND, METADATA.name, "sizes"])
@pytest.mark.parametrize("damage", ["gone", "other bytes", "short"])
def test_what_is_damaged_is_made_anew(store: Store, recorder: Recorder, kind: str, damage: str) -> None:
    net = model()
    agree(compiled_anew(net), net)
    entries = list((store._own.entries).rglob(f"*{kind}*"))
    assert entries
    for path in entries:
        content = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(content[:-7] if damage == "short" else content[:-1] + bytes([content[-1] ^ 1]))
    with recorder.expect(compiles=4 if kind == KIND else 0):
        agree(compiled_anew(net), net)
        until(lambda: backend.process().compile_service.idle)


@torch.no_grad()
def test_what_a_lowering_of_the_users_is_in_is_not_kept(store: Store, padded: list[Any]) -> None:
    table = core_table()
    mine = table.with_records(
        [dataclasses.replace(table.records[torch.ops.aten.sin.default], body=lambda x: x)], replace=True
    )
    graphs, place = _part(lambda x: x.sin()), ExactSpec((torch.ones(3, 2),))
    kept = MetadataCache(ExecutableCache(store), cpu_client(), table, OPTIONS)
    assert kept.key(graphs, place) is not None
    assert dataclasses.replace(kept, table=mine).key(graphs, place) is None
    assert dataclasses.replace(kept, executables=ExecutableCache(None)).key(graphs, place) is None


FUNCTIONS: list[Callable[[Tensor, Tensor], Any]] = [
    lambda x, y: x + y,
    lambda x, y: y + x,
    lambda x, y: x + x,
    lambda x, y: x + 1,
    lambda x, y: x + 1.0,
    lambda x, y: x + True,
    lambda x, y: x * 1,
    lambda x, y: x * 0.0,
    lambda x, y: x * -0.0,
    lambda x, y: x * float("inf"),
    lambda x, y: x * x.shape[0],
    lambda x, y: x * x.shape[1],
    lambda x, y: x * (x.shape[0] + 1),
    lambda x, y: x.sum(0),
    lambda x, y: x.sum(-1),
    lambda x, y: x.sum(0, keepdim=True),
    lambda x, y: x.sum(0, dtype=torch.float64),
    lambda x, y: x[1:],
    lambda x, y: x[:-1],
    lambda x, y: x[2:],
    lambda x, y: x[: y.shape[0]],
    lambda x, y: x.t(),
    lambda x, y: (x, y),
    lambda x, y: (y, x),
    lambda x, y: (x + y, x.shape[0]),
    lambda x, y: (x + y, x.shape[1]),
    lambda x, y: x.to(torch.float64),
    lambda x, y: x.to(torch.int64),
    lambda x, y: x.split(2, 1)[0],
    lambda x, y: x.split(2, 1)[1],
    lambda x, y: torch.empty_like(x).fill_(2),
    lambda x, y: torch.arange(x.shape[0]),
    lambda x, y: torch.arange(x.shape[0], dtype=torch.float32),
]
EXAMPLES = (
    (torch.ones(5, 6), torch.ones(5, 6)),
    (torch.ones(5, 6, dtype=torch.float64), torch.ones(5, 6)),
    (torch.ones(6, 5).t(), torch.ones(5, 6)),
)


def _part(function: Callable[..., Any], *given: Tensor, mode: str = "symbolic", **about: Any) -> PartGraphs:
    module = make_fx(function, tracing_mode=mode)(*(given or (torch.ones(3, 2),)))
    about = {"weights": (), "constants": (), "fold": True, **about}
    return PartGraphs(module, pads=core_table().pads, **about)


def test_a_name_is_of_one_part() -> None:
    """Whatever is another graph has another name; the same one has the same, whatever sizes it was captured at."""
    names = [_part(f, *given).name for f, given in itertools.product(FUNCTIONS, EXAMPLES)]
    assert None not in names
    assert len(set(names)) == len(names)
    assert [_part(f, *given).name for f, given in itertools.product(FUNCTIONS, EXAMPLES)] == names
    larger = [_part(f, torch.ones(7, 6), torch.ones(7, 6)).name for f in FUNCTIONS]
    assert larger == names[:: len(EXAMPLES)]
    assert not {_part(f, *EXAMPLES[0], mode="fake").name for f in FUNCTIONS} & set(names)


def test_all_that_a_part_is_made_of_is_in_its_name() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return x @ w.sin()

    given = (torch.ones(3, 4), torch.ones(4, 5))
    changed: list[dict[str, Any]] = [
        {},
        {"weights": (1,)},
        {"weights": (0,)},
        {"constants": (torch.ones(4, 5),)},
        {"fold": False},
        {"saved": Saved(inputs=True)},
        {"saved": Saved(outputs=frozenset({0}))},
    ]
    assert len({_part(function, *given, **about).name for about in changed}) == len(changed)


def test_all_that_a_program_depends_on_is_in_its_key(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = _part(lambda x: x.softmax(0))
    (symbol, other) = graphs.graph.find_nodes(op="placeholder")[0].meta["val"].shape
    s, t = symbol.node.expr, other.node.expr
    places: list[ProgramSpec] = [
        BucketSpec(PartBucket({s: 8}, {t: 4}), (s, t)),
        BucketSpec(PartBucket({s: 16}, {t: 4}), (s, t)),
        BucketSpec(PartBucket({s: 8}, {t: 5}), (s, t)),
        BucketSpec(PartBucket({s: 8, t: 4}, {}), (s, t)),
        BucketSpec(PartBucket({t: 4, s: 8}, {}), (s, t)),
        BucketSpec(PartBucket({s: 8}, {}, {t: s}), (s, t)),
        BucketSpec(PartBucket({s: 8}, {}, {}, (t,)), (s, t)),
        BucketSpec(PartBucket({s: 8}, {t: 4}), (t, s)),
        ExactSpec((torch.ones(3, 2),)),
        ExactSpec((torch.ones(2, 3).t(),)),
        ExactSpec((torch.ones(3, 2, dtype=torch.float64),)),
        ExactSpec((torch.ones(3, 3),)),
    ]
    kept = MetadataCache(ExecutableCache(store), cpu_client(), core_table(), OPTIONS)
    keys = [kept.key(graphs, place) for place in places]
    keys.append(dataclasses.replace(kept, options=Options(matmul_precision="highest")).key(graphs, places[0]))
    keys.append(kept.key(_part(lambda x: x.softmax(1)), places[0]))
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    keys.append(kept.key(graphs, places[0]))
    monkeypatch.undo()
    monkeypatch.setattr("dynaxla.runtime.packaged_programs.versions", lambda: {"dynaxla": "another source"})
    keys.append(kept.key(graphs, places[0]))
    assert len({key.digest for key in keys if key is not None}) == len(keys)
