"""Arguments and attributes that docstrings describe exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "dynaxla"
SECTION = re.compile(r"^(Args|Attributes):\n((?:    .*\n?|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):", re.MULTILINE)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def parameters(definition: Definition) -> set[str]:
    """The parameters of a function, or of a class's `__init__`."""
    functions = [definition] if not isinstance(definition, ast.ClassDef) else definition.body
    found = (each.args for each in functions if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
    return {
        arg.arg
        for args in found
        for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg)
        if arg is not None
    }


def words_of(definition: Definition) -> set[str]:
    return set(re.findall(r"\w+", "\n".join(map(ast.unparse, definition.body[1:]))))


def unknown(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, Definition):
            continue
        for kind, entries in SECTION.findall(ast.get_docstring(node) or ""):
            known = words_of(node) if kind == "Attributes" else parameters(node)
            for name in (each.strip(" *") for names in ENTRY.findall(entries) for each in names.split(",")):
                if name not in known:
                    yield f"{path.relative_to(PACKAGE)}: {node.name}: {name}"


def test_arguments_and_attributes_exist() -> None:
    assert [found for path in sorted(PACKAGE.rglob("*.py")) for found in unknown(path)] == []
