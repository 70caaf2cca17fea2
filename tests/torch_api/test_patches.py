"""The list of what is replaced in torch is complete, and nothing is replaced at import."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import dynaxla
from dynaxla.torch_api import dynamo, patches
from dynaxla.torch_api.patches import PATCHES, apply_patches
from tests.torch_api.boundary import boundary

PACKAGE = Path(dynaxla.__file__).parent
DOCS = Path(__file__).parents[2] / "docs" / "torch_patches.md"

SCRIPT = """
import importlib, json, sys, types
import torch
from dynaxla.torch_api.patches import PATCHES
import dynaxla.device.registration, dynaxla.backend

def functions():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "torch" or name.startswith("torch._C.") or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                names = [k for k, v in vars(value).items() if callable(v)]
                found.update({(f"{name}.{key}", k): vars(value)[k] for k in names})
                found[f"{name}.{key}", "__new__"] = value.__new__
    return found

def changed(before):
    after = functions()
    return sorted(".".join(key) for key, value in before.items() if key in after and after[key] is not value)

steps = {}
for name, act in {
    "import": lambda: importlib.import_module("dynaxla.serving.batch.server"),
    "compile": lambda: dynaxla.backend.dynaxla,
    "again": lambda: dynaxla.backend.dynaxla,
    "device": lambda: dynaxla.use("cpu"),
}.items():
    before = functions()
    act()
    steps[name] = changed(before)
print(json.dumps(steps))
"""


@pytest.fixture(scope="module")
def steps() -> dict[str, list[str]]:
    """The functions and classes of torch that were others after each step of a fresh process."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


def _listed(when: str) -> set[str]:
    return {name for patch in PATCHES if patch.when == when for name in patch.replaces if "(" not in name}


def test_imports_replace_nothing(steps: dict[str, list[str]]) -> None:
    assert steps["import"] == []


def test_every_replacement_is_listed(steps: dict[str, list[str]]) -> None:
    """Other modules may have imported a replaced function by its name; they have torch's own."""
    assert set(steps["compile"]) == _listed("compile")
    assert steps["again"] == []
    assert set(steps["device"]) == _listed("device")


def test_only_torch_api_assigns_attributes_of_torch() -> None:
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name == "torch_api":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        modules = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
            if alias.name.partition(".")[0] == "torch"
        }
        found += [f"{path}:{node.lineno}" for node in ast.walk(tree) if _assigns_to(node, modules)]
    assert found == []


def _assigns_to(node: ast.AST, modules: set[str]) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
        return _root(node.args[0]) in modules
    targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [getattr(node, "target", None)]
    return any(isinstance(target, ast.Attribute) and _root(target) in modules for target in targets)


def _root(node: Any) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@boundary("patches.Patch", "patches.PATCHES")
def test_every_patch_names_its_function_and_attributes_of_torch() -> None:
    for patch in PATCHES:
        module, _, name = patch.function.partition(".")
        assert inspect.getdoc(getattr(import_module(f"dynaxla.torch_api.{module}"), name))
        assert all((patch.why, patch.since, patch.until))
    applied = {f"{each.__module__.rpartition('.')[2]}.{each.__name__}" for each in patches._AT_COMPILE}  # type: ignore[attr-defined]
    applied.add("profiler.record_devices")  # by the backend, as it takes what begins a session
    assert applied == {patch.function for patch in PATCHES if patch.when == "compile"}


@boundary("patches.apply_patches")
def test_patches_are_applied_once_by_any_number_of_threads() -> None:
    apply_patches()
    before = dynamo.higher_order_ops._set_compilation_env
    threads = [threading.Thread(target=apply_patches) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dynamo.higher_order_ops._set_compilation_env is before


def test_the_documentation_lists_the_patches() -> None:
    written = import_module("docs.write_torch_patches").write_torch_patches()
    assert DOCS.read_text(encoding="utf-8") == written, "python -m docs.write_torch_patches > docs/torch_patches.md"
