"""Digests of what captures read: the same for what is alike, in every process; another one for each thing that may be read."""

from __future__ import annotations

import copy
import datetime
import functools
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from enum import Enum
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from dynaxla.aot_cache.module_fingerprint import fingerprint_modules
from dynaxla.aot_cache.object_fingerprint import NoFingerprint, fingerprint


class Kind(Enum):
    ONE = 1
    TWO = 2


class Listing(list[int]):
    """Has attributes beside its elements."""


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    made.settings = {"scale": 2.0, "names": {"a", "b", "c"}, "kind": Kind.ONE, "log": logging.getLogger("of a test")}  # type: ignore[assignment]
    made.held = datetime.date(2000, 1, 1)  # type: ignore[assignment]
    made.kinds = Listing([1])  # type: ignore[assignment]
    made.slotted = Slotted((1, None))  # type: ignore[assignment]
    return made


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def hook(scale: float) -> Callable[..., Any]:
    def run(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * scale

    return run


def tie(made: Any) -> None:
    made[2].weight = made[0].weight


def view(made: Any) -> None:
    made[2].weight.data = made[0].weight.data


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda made: made.settings.update(scale=2.5),
    "a flag in the place of a number": lambda made: made.settings.update(scale=True),
    "an element of a set": lambda made: made.settings["names"].add("d"),
    "an enum": lambda made: made.settings.update(kind=Kind.TWO),
    "an attribute more": lambda made: setattr(made[1], "approximate", "tanh"),
    "a slot": lambda made: setattr(made.slotted, "value", (1, 0)),
    "the mode": lambda made: made.eval(),
    "a dtype": lambda made: made[0].to(torch.float64),
    "sizes": lambda made: setattr(made[0], "weight", nn.Parameter(torch.ones(4, 8)[:, :4])),
    "strides": lambda made: setattr(made[0], "weight", nn.Parameter(torch.ones(4, 4).t())),
    "a weight that two share": tie,
    "memory that two share": view,
    "what wants gradients": lambda made: made[0].requires_grad_(False),
    "a buffer": lambda made: made.register_buffer("more", torch.ones(2)),
    "a module": lambda made: made.append(nn.ReLU()),
    "another class": lambda made: made.__setitem__(1, nn.ReLU()),
    "a hook": lambda made: made.register_forward_hook(hook(2.0)),
    "a function of its own": lambda made: setattr(made[1], "forward", doubled),
    "a part of a function": lambda made: setattr(made[1], "forward", functools.partial(torch.mul, other=2)),
    "a state of another language": lambda made: setattr(made, "held", datetime.date(2000, 1, 2)),
    "an element of a list's kind": lambda made: made.kinds.append(2),
    "the object of a method in C": lambda made: setattr(made[1], "forward", torch.ones(3).mul),
    "an order": lambda made: setattr(made, "settings", dict(reversed(made.settings.items()))),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_what_a_capture_may_read_is_told_apart(change: Callable[[Any], object]) -> None:
    before, made = fingerprint(model()), model()
    assert fingerprint(made) == before
    change(made)
    assert fingerprint(made) != before


def test_the_object_of_a_method_in_c_is_told_apart() -> None:
    assert fingerprint([1].append) == fingerprint([1].append)
    assert fingerprint([1].append) != fingerprint([2].append)


def test_what_functions_close_over_is_told_apart() -> None:
    assert fingerprint(hook(2.0)) == fingerprint(hook(2.0))
    assert fingerprint(hook(2.0)) != fingerprint(hook(3.0))
    assert fingerprint(model().forward) == fingerprint(model().forward)
    assert fingerprint(lambda x: x + 1) != fingerprint(lambda x: x + 2)


def test_elements_of_tensors_are_not_read() -> None:
    made = model()
    before = fingerprint(made)
    with torch.no_grad():
        made[0].weight.fill_(7)  # type: ignore[index, union-attr, operator]
    assert fingerprint(made) == before


def test_attributes_that_are_not_read() -> None:
    made = model()
    before = fingerprint(made, unread=["slotted"])
    made.slotted.value = 3  # type: ignore[union-attr]
    assert fingerprint(made, unread=["slotted"]) == before


def test_an_object_in_itself() -> None:
    made: Any = model()
    made.settings["itself"] = made
    assert fingerprint(made) != fingerprint(model())


@pytest.mark.parametrize("state", [threading.Lock(), weakref.ref(Slotted), (each for each in ())])
def test_what_python_does_not_show(state: object) -> None:
    made: Any = model()
    made[1].state = state
    with pytest.raises(NoFingerprint, match=r"it\._modules\['1'\]\.state is of "):
        fingerprint(made)


def test_every_process_gives_the_same() -> None:
    code = f"from {__name__} import model; from dynaxla.aot_cache.object_fingerprint import fingerprint as i; print(i(model()))"
    code += "; from dynaxla.aot_cache.module_fingerprint import fingerprint_modules as d"
    code += "; print(d(['torch.nn.functional', 'torch.nn.modules.rnn']))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


SOURCE = """
import functools
import torch
from dataclasses import dataclass
import settings_of_a_test as settings
SCALE = 2.0
SCALES = {"first": [2.0, (3, torch.float32)]}
HALVES = (1, [2])
@dataclass
class Settings:
    power: int = 2
SETTINGS = Settings()
REGISTRY = {"double": lambda x: x * 2}
def scaled(x, by=3): return x * by * SCALE
@functools.cache
def cached(x): return x
class Layer:
    size = 4
    sizes = {"wide": 4, "mine": lambda x: x}
    def forward(self, x): return scaled(x)
    @property
    def twice(self): return 2 * self.size
    @staticmethod
    def plain(x): return x
"""

EDITS = {
    "a value": ("SCALE = 2.0", "SCALE = 3.0"),
    "a value in containers": ("(3, torch", "(4, torch"),
    "a dtype in containers": ("torch.float32", "torch.float64"),
    "an element": ("[2])", "[3])"),
    "a value beside functions": ('"wide": 4', '"wide": 5'),
    "an object's attribute": ("power: int = 2", "power: int = 3"),
    "a function": ("x * by * SCALE", "x + by * SCALE"),
    "a default": ("by=3", "by=4"),
    "a registered function": ("x * 2}", "x * 3}"),
    "a cached one": ("cached(x): return x", "cached(x): return -x"),
    "a method": ("return scaled(x)", "return -scaled(x)"),
    "a property": ("2 * self.size", "3 * self.size"),
    "a static method": ("plain(x): return x", "plain(x): return -x"),
    "a class's value": ("size = 4", "size = 5"),
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("a_module_of_a_test")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    vars(made)["__name__"] = made.__name__
    monkeypatch.setitem(sys.modules, "settings_of_a_test", ModuleType("settings_of_a_test"))
    exec(SOURCE, vars(made))
    return made


@pytest.mark.parametrize("edit", EDITS.values(), ids=list(EDITS))
def test_edits_of_a_module_are_seen(module: ModuleType, edit: tuple[str, str]) -> None:
    before = fingerprint_modules([module.__name__])
    exec("\n\n" + SOURCE, vars(module))
    assert fingerprint_modules([module.__name__]) == before  # other lines, the same code
    exec(SOURCE.replace(*edit), vars(module))
    assert fingerprint_modules([module.__name__]) != before


def test_values_of_a_module_in_a_module_are_seen(module: ModuleType) -> None:
    found = []
    for scales in ({"a": 2.0}, {"a": 3.0}, [1]):
        module.settings.scales = scales
        found.append(fingerprint_modules([module.__name__])[module.__name__])
    assert len(set(found)) == 3


def test_what_is_put_in_the_place_of_a_function_is_seen(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_modules([module.__name__])
    with monkeypatch.context() as patch:
        patch.setattr(module.Layer, "forward", lambda self, x: x)
        assert fingerprint_modules([module.__name__]) != before
    assert fingerprint_modules([module.__name__]) == before
    module.__compiled = 1  # type: ignore[attr-defined]
    vars(module)["__compiled_fn_1"] = doubled  # as Dynamo does
    copy.copy(module.Layer())  # leaves a note in the class
    assert fingerprint_modules([module.__name__]) == before


def test_a_module_that_is_not_there() -> None:
    assert fingerprint_modules(["no.such.module"]) == {"no.such.module": ""}
