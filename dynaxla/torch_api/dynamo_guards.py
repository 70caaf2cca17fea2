"""The guards of Dynamo's captures on disk (`caching_precompile`): saved completely, and none weaker after loading.

Relies on `torch._dynamo.guards`: `GuardsStatePickler`, its `guard_tree_values` and `_unpickle_nested_function`,
`_Missing`; on `code_list` of a guard, its check as text; and on the root of a tree of guards having `add_lambda_guard`.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from types import CellType, CodeType, ModuleType
from typing import Any

from torch._dynamo import config, guards, package
from torch._dynamo.exc import PackageError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))
_FUNCTION_GUARDS = ("CLOSURE_MATCH", "FUNCTION_MATCH", "ID_MATCH")
"""Guards on identity, which torch drops when it saves guards."""
_TYPE_ID = re.compile(r"(___check_type_id\(.*, )\d+\)")


class Pickler(guards.GuardsStatePickler):
    """Pickles functions that guards read and that no qualified name leads to, with the values that guards read of them.

    Uses torch's format of nested functions, with keyword defaults and attributes, so that any torch can load it. A
    function whose globals belong to no module becomes a blank, on which guards fail.
    """

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        read = config.caching_precompile and inspect.isfunction(obj) and id(obj) in self.guard_tree_values
        if not read or reduced is NotImplemented:
            return reduced
        blank = reduced[0] is guards._Missing and id(obj) not in self.missing_values
        if not blank and reduced[0] != self._unpickle_nested_function:
            return reduced
        module = module_of(obj)
        if module is None:
            return guards._Missing, ("globals of no module",)
        state = {
            "__module__": obj.__module__,
            "__kwdefaults__": obj.__kwdefaults__ and {name: self._read(v) for name, v in obj.__kwdefaults__.items()},
        }
        attributes = {name: self._read(value) for name, value in vars(obj).items()}
        defaults = obj.__defaults__ and tuple(map(self._read, obj.__defaults__))
        closure = obj.__closure__ and tuple(map(self._read_cell, obj.__closure__))
        made = (obj.__code__, module.__name__, obj.__qualname__, defaults, closure)
        return self._unpickle_nested_function, made, (attributes, state)

    def _read(self, value: Any) -> Any:
        """Returns the value if guards may read it, else a blank: an arbitrary object may not be picklable."""
        read_value = id(value) in self.guard_tree_values or isinstance(value, _PLAIN)
        return value if read_value else guards._Missing("no guard reads it")

    def _read_cell(self, cell: CellType) -> CellType:
        try:
            contents = cell.cell_contents
        except ValueError:  # it is empty
            return CellType(guards._Missing("empty"))
        read_value = self._read(contents)
        return cell if read_value is contents else CellType(read_value)


def skip_unpicklable_guards(original: Callable[..., bytes]) -> Callable[..., bytes]:
    """Wraps `serialize_guards`: a function whose guards cannot be saved is not saved, and the call goes on."""

    def serialize_guards(self: Any, builder: Any, sorted_guards: Any, output_graph: Any) -> bytes:
        _guard_functions(self.guard_manager, _functions_read(builder, output_graph), output_graph.global_scope)
        try:
            return original(self, builder, sorted_guards, output_graph)
        except Exception as error:  # pickling calls arbitrary __reduce__ methods
            if config.strict_precompile or output_graph.package is None:  # it belongs to a package of `aot_compile`
                raise
            output_graph.bypass_package(f"its guards cannot be saved: {type(error).__name__}: {error}")
            return b""

    return serialize_guards


def save_function_code(original: Callable[..., bytes]) -> Callable[..., bytes]:
    """Wraps `pickle_guards_state`: adds the code of the functions whose guards are dropped."""

    def pickle_guards_state(state: Any, builder: Any) -> bytes:
        read = _functions_read(builder, builder.check_fn_manager.output_graph)
        state.functions = {name: package.SerializedCode.from_code_object(code) for name, code in read.items()}
        return original(state, builder)

    return pickle_guards_state


def _functions_read(builder: Any, captured: Any) -> dict[str, CodeType]:
    """Returns the code of the functions whose guards are dropped, by the Python expression that reads each."""
    dropped = [guard for guard in captured.guards if guard.create_fn_name() in _FUNCTION_GUARDS]
    functions = {guard.name: builder.get(guard) for guard in dropped}
    return {name: function.__code__ for name, function in functions.items() if inspect.isfunction(function)}


def _guard_functions(manager: Any, functions: dict[str, CodeType], scope: dict[str, Any]) -> None:
    """Adds a guard that fails if one of the functions has other code, to a frame whose globals are `scope`."""
    expected = [(compile(name, "<guard>", "eval"), code) for name, code in functions.items()]
    known = {**guards._get_closure_vars(), "G": scope}

    def have_their_code(frame: dict[str, Any]) -> bool:
        known_here = {**known, "L": frame}
        try:
            return all(_is_code(eval(name, known_here).__code__, code) for name, code in expected)
        except (AttributeError, LookupError):
            return False  # the function does not exist

    if functions:
        manager.root.add_lambda_guard(have_their_code, [f"the code of {', '.join(functions)}"], None)


def _is_code(found: CodeType, expected: CodeType) -> bool:
    return found is expected or found == expected


def check_guards_unchanged(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `load_guard_manager`: raises PackageError if a guard's text is not the same as when it was saved."""

    def load_guard_manager(guards_state: Any, target_code: CodeType, runtime_global_scope: Any) -> Any:
        saved = [(guard, list(guard.code_list or ())) for guard in guards_state.output_graph.guards]
        with config.patch(
            caching_precompile=False
        ):  # else torch builds all guards twice, to drop those already dropped
            manager = original(guards_state, target_code, runtime_global_scope)
        for guard, before in saved:
            now = (guard.code_list or [])[len(before) :]
            if _texts(now) != _texts(before):
                raise PackageError(f"{guard.name} is another one than when it was saved: {now[:2]}")
        functions = {name: package.SerializedCode.to_code_object(code) for name, code in guards_state.functions.items()}
        _guard_functions(manager, functions, runtime_global_scope)
        return manager

    return load_guard_manager


def _texts(code: list[str]) -> set[str]:
    """Returns the texts of guards, without the addresses of types; the names of the types stay."""
    return {_TYPE_ID.sub(r"\1...)", text) for text in code}


def module_of(function: Any) -> ModuleType | None:
    """Returns the module whose globals a function uses, if it can be imported by name; else None."""
    used = getattr(function, "__globals__", {})
    module = sys.modules.get(used.get("__name__", ""))
    return module if module is not None and vars(module) is used else None
