"""How long modules and functions may be, and how many modules the top of the package has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "dynaxla"
MOST_MODULES_AT_THE_TOP = 12  # beside __init__ and __main__
MOST_LINES_OF_A_MODULE = 400
MOST_LINES_OF_A_TEST_MODULE = 500
MOST_LINES_OF_A_FUNCTION = 60


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{path.relative_to(ROOT)}: {node.name}", (node.end_lineno or 0) - node.lineno + 1


def test_the_top_of_the_package_is_short() -> None:
    loose = [path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]
    assert len(loose) <= MOST_MODULES_AT_THE_TOP, sorted(loose)


def test_modules_are_short() -> None:
    assert [str(path) for path in PACKAGE.rglob("*.py") if _lines(path) > MOST_LINES_OF_A_MODULE] == []
    others = [
        path for folder in ("tests", "benchmarks", "conformance", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    assert [str(path) for path in others if _lines(path) > MOST_LINES_OF_A_TEST_MODULE] == []


def test_functions_are_short() -> None:
    paths = [
        path
        for folder in ("dynaxla", "tests", "benchmarks", "conformance", "examples")
        for path in (ROOT / folder).rglob("*.py")
    ]
    found = [name for path in paths for name, lines in _functions(path) if lines > MOST_LINES_OF_A_FUNCTION]
    assert found == []


def test_pad_rules_are_imported_by_their_modules_names() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    imported = re.findall(r"from dynaxla\.bucketing\.pad_rules import (\w+) as (\w+)", text)
    assert imported
    assert [alias for module, alias in imported if alias != f"{module}_rules"] == []
