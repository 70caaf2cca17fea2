"""What the tables of expressions are made of: plain text, so that one is found, run alone and shown as it stands."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

NAMESPACE: Mapping[str, Any] = {
    "torch": torch,
    "F": torch.nn.functional,
    **{name: getattr(torch, name) for name in ("randn", "rand", "randint", "arange")},
}
SIZES = ((10, 7), (13, 12), (6, 9), (16, 5), (1, 3), (21, 20), (24, 17))
"""Pairs of s and t: the first differ from each other and from all that the tables make of them."""


@dataclass(frozen=True)
class Family:
    """Expressions over the same inputs.

    Attributes:
        inputs: for each argument an expression of s and t that makes it.
        sizes_of: how the function reads s and t off its arguments: statements.
        texts: statements, apart by ";", of which the last is an expression: the result.
        gradients: whether the inputs want them.
    """

    name: str
    inputs: Mapping[str, str]
    sizes_of: str
    texts: tuple[str, ...]
    gradients: bool = True

    def make(self, s: int, t: int) -> list[torch.Tensor]:
        """The arguments at a pair of sizes, the same at every call."""
        torch.manual_seed(s)
        made = [eval(text, dict(NAMESPACE), {"s": s, "t": t}) for text in self.inputs.values()]
        return [x.requires_grad_(self.gradients and x.is_floating_point()) for x in made]

    def source(self, texts: tuple[str, ...]) -> str:
        """A function `f` of the inputs that gives the results of these expressions."""
        names = ", ".join(self.inputs)
        parts = [_function(f"e{i}", names, self.sizes_of, text) for i, text in enumerate(texts)]
        calls = ", ".join(f"e{i}({names})" for i in range(len(texts)))
        return "\n".join([*parts, f"def f({names}):", f"    return [{calls}]", ""])

    def function(self, *texts: str) -> Callable[..., Any]:
        scope: dict[str, Any] = dict(NAMESPACE)
        source = self.source(texts)
        file = f"<{self.name} {hash(source):x}>"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)  # for Dynamo's traces
        exec(compile(source, file, "exec"), scope)
        made: Callable[..., Any] = scope["f"]
        return made


def _function(name: str, names: str, sizes_of: str, text: str) -> str:
    *statements, result = text.split("; ")
    lines = [*sizes_of.split("; "), *statements, f"return {result}"]
    return "\n".join([f"def {name}({names}):", *(f"    {line}" for line in lines)])


def family(name: str, inputs: Mapping[str, str], sizes_of: str, *texts: str, gradients: bool = True) -> Family:
    return Family(name, inputs, sizes_of, texts, gradients)
