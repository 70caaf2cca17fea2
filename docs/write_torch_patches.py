"""Writes docs/torch_patches.md: python -m docs.write_torch_patches > docs/torch_patches.md"""

from __future__ import annotations

from collections.abc import Iterator

from dynaxla.torch_api.patches import PATCHES

_HEAD = """# What is replaced in torch

Importing the package replaces nothing in torch. The patches of "compile" are applied when torch.compile asks for the backend,
those of "device" when `dynaxla.use` takes the device; once per process. `dynaxla/torch_api/patches.py` is the list; the
docstring of each function says what it relies on, and `tests/torch_api/test_patches.py` fails where something else is replaced.

| function in `torch_api/` | replaces | why | since torch | can go when | applied |
|---|---|---|---|---|---|"""


def _lines() -> Iterator[str]:
    yield _HEAD
    for patch in PATCHES:
        replaced = ", ".join(f"`{name}`" for name in patch.replaces)
        yield f"| `{patch.function}` | {replaced} | {patch.why} | {patch.since} | {patch.until} | {patch.when} |"


def write_torch_patches() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n"


if __name__ == "__main__":
    print(write_torch_patches(), end="")
