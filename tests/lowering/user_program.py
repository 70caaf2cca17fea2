"""A program of a user's, in a file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).softmax(-1)  # line {line}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = torch.sinh(block(x))
        return x

class Looped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Block()
        self.second = nn.Linear(8, 8)

    def forward(self, x):
        def turn(step, x):
            x = self.second(self.first(x))
            x = torch.cond(x.sum() > 0, lambda x: self.first(x.cos()), lambda x: x.cosh(), (x,))
            return step + 1, x

        return torch.while_loop(lambda step, x: step < 3, turn, (torch.zeros((), dtype=torch.int64), x))[1]

class TwoLoops(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = Looped()
        self.right = Looped()

    def forward(self, x):
        return self.left(x) + self.right(x)

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Branch(), Branch()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.inner(x).cos(), lambda x: x.cosh(), (x,))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.block(x).sinh()

class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
"""


def load(folder: Path, name: str, blank: int) -> tuple[ModuleType, int]:
    """A module of SOURCE behind blank lines, and the number of the line of the softmax."""
    text = "\n" * blank + SOURCE
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, 1 + next(i for i, line in enumerate(text.splitlines()) if "softmax" in line)
