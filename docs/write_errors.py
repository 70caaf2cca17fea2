"""Prints docs/errors.md from the exceptions of dynaxla/errors.py: `python -m docs.write_errors > docs/errors.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from docs.error_examples import EXAMPLES, SETUP, ErrorExample
from dynaxla import errors

_LINE = re.compile(r"^    [│├└─ ]*(?P<name>\w+)(?: \((?P<mixin>\w+)\))? +(?P<id>DX\d+)  (?P<what>\S.*)$", re.MULTILINE)
_INTRODUCTION = """\
# Errors

Written by `python -m docs.write_errors > docs/errors.md` from dynaxla/errors.py and docs/error_examples.py. Do not edit.

Every error of the package is a `DynaxlaError`, and its text begins with its id. `explanation`, `hint`, `frame` (your line) and `dump`
(a file with details) are attributes, for programs that catch it. An error of eager's own, such as that of a wrong shape, is raised
as eager raises it.

**DX300 to DX324 seldom reach you.** If an op cannot be lowered or compiled, it runs in eager PyTorch, and the log and
`dynaxla.report()` name the reason. Under `options={"fallback": "error"}` the call raises DX200 instead, whose `reasons` have the
id of the fault (`lowering_timeout`, say). The examples of these therefore ask the compilers' child processes themselves, some with
a fault that is injected.
"""
_EXAMPLES = """
## Examples

Each is run by a test (tests/guide/test_errors_page.py), scripts apart after these lines:
"""


def write_errors() -> str:
    """The whole text of docs/errors.md."""
    return "\n".join([_INTRODUCTION, *_table(), _EXAMPLES, _fenced(SETUP), *_sections()]) + "\n"


def _kinds() -> list[re.Match[str]]:
    """The lines of the drawn tree, in its order."""
    return list(_LINE.finditer(errors.__doc__ or ""))


def _table() -> Iterator[str]:
    yield "| id | error | also a | what |"
    yield "|---|---|---|---|"
    for kind in _kinds():
        identifier = f"[{kind['id']}](#{_anchor(kind)})" if kind["id"] in EXAMPLES else kind["id"]
        mixin = f"`{kind['mixin']}`" if kind["mixin"] else ""
        yield f"| {identifier} | `{kind['name']}` | {mixin} | {kind['what']} |"


def _sections() -> Iterator[str]:
    for kind in _kinds():
        if kind["id"] in EXAMPLES:
            example = EXAMPLES[kind["id"]]
            yield f"\n### {kind['id']} {kind['name']}\n"
            yield f"{kind['what'][0].upper()}{kind['what'][1:]}.{_where(example)}\n"
            yield _fenced(example.code)
            yield f"\n**What to do.** {example.advice}"


def _where(example: ErrorExample) -> str:
    if example.reason:
        return f" It comes as the reason `{example.reason}` of DX200:"
    if example.processes > 1:
        return f" A script, run by `torchrun --nproc-per-node {example.processes}`:"
    return " A script of its own:" if example.processes else ""


def _anchor(kind: re.Match[str]) -> str:
    return f"{kind['id']}-{kind['name']}".lower()


def _fenced(code: str) -> str:
    return f"```python\n{code.rstrip()}\n```"


if __name__ == "__main__":
    print(write_errors(), end="")
