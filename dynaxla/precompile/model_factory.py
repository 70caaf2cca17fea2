"""A user's model by the name of the function that makes it: package.module:factory, or path/to/file.py:factory."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from dynaxla.errors import OptionError


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A function or module, and the arguments of a call of it."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def call_factory(text: str) -> ModelCall:
    """Calls what a text names; what the factory itself raises reaches the user as it is.

    Args:
        text: "package.module:factory" or "path/to/file.py:factory". The factory takes no arguments and gives
            (model, args), (model, args, kwargs), or a function that is called without arguments.

    Raises:
        OptionError: the text names no function, or the function gives something else.
    """
    made = find_factory(text)()
    from torch.nn import Module  # by now the factory has imported it; the command line alone needs no torch

    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[1], tuple) and callable(made[0]):
        return ModelCall(*made)
    if callable(made) and not isinstance(made, Module):  # a module without its arguments was forgotten
        return ModelCall(made)
    raise OptionError(
        f"{text} must give (model, args) or (model, args, kwargs), args a tuple, or a function",
        f"it gives {type(made).__name__}",
    )


def find_factory(text: str) -> Callable[[], Any]:
    """Imports what a text names.

    Raises:
        OptionError: the text is of another form; there is no such module, file or name (the message has the nearest); or it
            is no function.
    """
    name, _, attribute = text.rpartition(":")
    if not name or not attribute:
        raise OptionError(
            f"{text!r} is not of the form package.module:factory", "a file will do too: path/to/file.py:factory"
        )
    module = _import_file(Path(name)) if name.endswith(".py") else _import_module(name)
    if not hasattr(module, attribute):
        names = [each for each in vars(module) if not each.startswith("_")]
        raise OptionError(f"{name} has no attribute {attribute!r}", _nearest(attribute, names))
    found = getattr(module, attribute)
    if not callable(found):
        raise OptionError(
            f"{text} is no function, but {type(found).__name__}", "name the function that makes the model"
        )
    return found  # type: ignore[no-any-return]


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # the folder in which the command is called
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that the user's own imports
        raise OptionError(str(error), "modules are looked for in this folder and where Python's packages are") from None


def _import_file(path: Path) -> ModuleType:
    """Runs a file as a module of its own name, with its folder on the path, as Python runs a script."""
    if not path.is_file():
        raise OptionError(
            f"there is no file {path}", _nearest(path.name, [each.name for each in path.parent.glob("*.py")])
        )
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _nearest(given: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.0)
    return f"did you mean {near[0]!r}?" if near else ""
