"""Every option of the backend is part of every kind's keys, or left out by name with a reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import dynaxla
from dynaxla.aot_cache.capture_key import capture_tag
from dynaxla.bucketing.size_buckets import SymbolPolicies
from dynaxla.cache.environment_key import Environment, torch_settings
from dynaxla.cache.kinds import CAPTURE, EXECUTABLE, FUNCTION, KINDS, METADATA, EntryKind, HintKind
from dynaxla.cache.store import Store
from dynaxla.lowering.call_graph import CallGraph
from dynaxla.lowering.function_cache import FunctionCache
from dynaxla.lowering.program_keys import graph_key, module_key
from dynaxla.ops.table import core_table
from dynaxla.options import DebugOptions, Options

HERE = Environment({"device": "a"}, {"setting": "1"}, {"torch": "2"})
SPECIAL: dict[str, Any] = {
    "target": "cpu",
    "buckets": dynaxla.Explicit((8, 16)),
    "value_checks": False,
    "debug": DebugOptions(Path("ir")),
}
"""A value that is not the default, of the options that are neither a choice nor a number."""

NAMES = [each.name for each in dataclasses.fields(Options)]
ENTRY_KINDS = [kind for kind in KINDS if isinstance(kind, EntryKind)]


def other_value(name: str) -> object:
    """A value of the option that is not its default."""
    default, hint = getattr(Options(), name), get_type_hints(Options)[name]
    if name in SPECIAL:
        return SPECIAL[name]
    if get_origin(hint) is Literal:
        return next(choice for choice in get_args(hint) if choice != default)
    return not default if hint is bool else default + 1


def changed(name: str) -> Options:
    return dataclasses.replace(Options(), **{name: other_value(name)})


@pytest.mark.parametrize("kind", ENTRY_KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", NAMES)
def test_an_option_is_part_of_the_key_or_left_out_by_name(kind: EntryKind, name: str) -> None:
    differs = kind.key(changed(name), HERE, part="x") != kind.key(Options(), HERE, part="x")
    assert differs == (name not in kind.left_out)


@pytest.mark.parametrize("kind", ENTRY_KINDS, ids=lambda kind: kind.name)
def test_what_is_left_out_is_an_option_and_has_a_reason(kind: EntryKind) -> None:
    assert set(kind.left_out) <= set(NAMES)
    assert all(len(reason.split()) > 2 for reason in kind.left_out.values())


@pytest.mark.parametrize("name", NAMES)
def test_keys_that_callers_build_have_the_options(name: str, tmp_path: Path) -> None:
    def keys(options: Options) -> dict[str, object]:
        table, policies, graph = core_table(), SymbolPolicies(dynaxla.PowersOfTwo(), None), CallGraph({}, {}, (), {})
        functions = FunctionCache.of(Store(tmp_path), options)
        return {
            EXECUTABLE.name: (graph_key(graph, table, options, HERE), module_key(b"module", options, HERE)),
            FUNCTION.name: functions._disk_key(torch.ops.aten.add.Tensor, None, ("cpu", None, "call")),
            CAPTURE.name: capture_tag(options, policies, table, packaged=False),
        }

    before, after = keys(Options()), keys(changed(name))
    for kind in (EXECUTABLE, FUNCTION, CAPTURE):
        assert (before[kind.name] != after[kind.name]) == (name not in kind.left_out)


@pytest.mark.parametrize("kind", ENTRY_KINDS, ids=lambda kind: kind.name)
def test_a_kind_depends_on_the_environment_that_it_names(kind: EntryKind) -> None:
    for name in ("client", "jax", "versions"):
        other = dataclasses.replace(HERE, **{name: {"another": "one"}})
        assert (kind.key(Options(), HERE) != kind.key(Options(), other)) == (name in kind.environment)
    assert "versions" in kind.environment


def test_torchs_settings_are_in_the_keys_of_captures() -> None:
    before, key = torch_settings(), CAPTURE.key(Options(), HERE)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert torch_settings() != before
            assert CAPTURE.key(Options(), HERE) != key
    with torch.inference_mode():
        assert CAPTURE.key(Options(), HERE) != key
    with torch.backends.cudnn.flags(enabled=False):
        assert CAPTURE.key(Options(), HERE) != key
    with torch.backends.mkldnn.flags(enabled=False):
        assert CAPTURE.key(Options(), HERE) != key
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert CAPTURE.key(Options(), HERE) != key
    finally:
        torch.use_deterministic_algorithms(False)
    assert CAPTURE.key(Options(), HERE) == key


def test_each_process_of_several_has_captures_of_its_own() -> None:
    """For each membership of the groups whose names a graph has."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    keys = {CAPTURE.key(Options(), HERE)}
    for rank, others in ((0, None), (1, None), (1, [1]), (1, [0, 1])):
        torch.distributed.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            if others is not None:
                torch.distributed.new_group(others)
            keys.add(CAPTURE.key(Options(), HERE))
        finally:
            torch.distributed.destroy_process_group()
    assert len(keys) == 5


def test_precision_is_torchs_setting_where_the_option_says_so() -> None:
    as_torch, highest = (METADATA.key(Options(matmul_precision=each), HERE) for each in ("torch", "highest"))
    assert torch.get_float32_matmul_precision() == "highest"
    assert as_torch == highest
    torch.set_float32_matmul_precision("medium")
    try:
        assert METADATA.key(Options(), HERE) != as_torch
    finally:
        torch.set_float32_matmul_precision("highest")


def test_no_two_kinds_share_keys_or_names() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    hints = [kind.key(part="x") for kind in KINDS if isinstance(kind, HintKind)]
    keys = {key.digest for key in (*hints, *(kind.key(Options(), HERE, part="x") for kind in ENTRY_KINDS))}
    assert len(keys) == len(KINDS)
