"""docs/serving_llm_http.md names every field and every code that there is."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from dynaxla.serving.http.request_schema import IGNORED, REFUSED, ChatRequest, CompletionRequest
from dynaxla.serving.llm.serve_command import add_arguments

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "serving_llm_http.md").read_text(encoding="utf-8")


def _section(name: str) -> str:
    return PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def test_every_field_is_named() -> None:
    fields = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *IGNORED, *REFUSED}
    assert [name for name in sorted(fields) if f"`{name}`" not in _section("Fields")] == []


def _codes(path: Path) -> Iterator[str]:
    """Those that are written in calls of `invalid` and `ApiError`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("invalid", "ApiError"):
            place = 2 if node.func.id == "invalid" else 4
            given = [*node.args[place : place + 1], *(each.value for each in node.keywords if each.arg == "code")]
            yield from (each.value for each in given if isinstance(each, ast.Constant) and each.value)


def test_every_code_is_named() -> None:
    codes = {code for path in (ROOT / "dynaxla" / "serving" / "http").glob("*.py") for code in _codes(path)}
    assert {"queue_full", "invalid_value", "no_chat_template", "body_timeout"} <= codes
    page = _section("Errors") + _section("Endpoints")
    assert [code for code in sorted(codes) if f"`{code}`" not in page] == []


def test_every_argument_is_named() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    options = [action.option_strings[0] if action.option_strings else "MODEL" for action in parser._actions]
    assert [option for option in options if f"`{option}`" not in PAGE] == []
