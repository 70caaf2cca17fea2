"""Every name of the wall has a test of what it relies on."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType, ModuleType

import dynaxla.torch_api
import tests.torch_api


def _modules(package: ModuleType) -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(package.__path__):
        yield import_module(f"{package.__name__}.{found.name}")


def _names(module: ModuleType) -> Iterator[str]:
    """Public functions, classes and values that a module defines, and names of torch's that it hands on."""
    assert module.__file__ is not None
    with open(module.__file__) as source:
        for node in ast.parse(source.read()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (target.id for target in targets if isinstance(target, ast.Name))
    yield from getattr(module, "__all__", ())


def test_every_name_of_the_wall_is_tested() -> None:
    aliases = {"python_kernels.Kernel", "decompositions.Decomposition"}  # of annotations
    wanted = {
        f"{module.__name__.rpartition('.')[2]}.{name}"
        for module in _modules(dynaxla.torch_api)
        for name in _names(module)
        if not name.startswith("_")
    }
    tested = {
        name
        for module in _modules(tests.torch_api)
        for test in vars(module).values()
        if isinstance(test, FunctionType)
        for name in getattr(test, "boundary", ())
    }
    assert tested == wanted - aliases


def test_every_function_says_what_it_relies_on() -> None:
    silent = [
        f"{module.__name__}.{name}"
        for module in _modules(dynaxla.torch_api)
        for name in _names(module)
        if callable(found := getattr(module, name)) and not (found.__doc__ or module.__doc__)
    ]
    assert not silent
