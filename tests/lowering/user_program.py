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
