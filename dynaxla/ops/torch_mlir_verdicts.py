"""What a sweep found of torch-mlir's lowering of each op, against eager PyTorch: torch_mlir_verdicts.tsv."""

from __future__ import annotations

import csv
import enum
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch.fx import Node

_VERDICTS = Path(__file__).with_suffix(".tsv")


class Verdict(enum.Enum):
    """The result of testing torch-mlir's lowering of an op against eager PyTorch.

    In the dtypes of a finding
    `RIGHT`: every call of the sweep gave eager's result;
    `WRONG`: a call of the sweep gave another result;
    `ROUNDS`: 16-bit results may be farther from eager's than the body's, which rounds at the same steps as eager;
    `SLOWER`: every call was right, but slower than the body;
    `CRASHES`: torch-mlir's process died, or did not end;
    `NO_LOWERING`: torch-mlir refuses calls, both as the op and as torch's decomposition.
    """

    RIGHT = "right"
    WRONG = "wrong"
    ROUNDS = "loses roundings"
    SLOWER = "slower"
    CRASHES = "crashes"
    NO_LOWERING = "no lowering"


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on torch-mlir's lowering of an op in some dtypes.

    Attributes:
        verdict: the test's result.
        dtypes: dtypes of the tensor operands or, without any, of the results.
        reason: the call or the number that shows it.
        platforms: the platforms (JAX's names) that it holds for; None: all.
        calls: whether it holds for a call; None: for all calls.
    """

    verdict: Verdict
    dtypes: frozenset[torch.dtype]
    reason: str = ""
    platforms: frozenset[str] | None = None
    calls: Callable[[Node], bool] | None = None

    @property
    def excludes_all(self) -> bool:
        """Whether it excludes every call in its dtypes from torch-mlir, on every platform."""
        return self.verdict is not Verdict.RIGHT and self.platforms is None and self.calls is None

    def excludes_call(self, call: Node, platform: str) -> bool:
        """Whether it excludes a call in its dtypes from torch-mlir."""
        if self.verdict is Verdict.RIGHT or not (self.platforms is None or platform in self.platforms):
            return False
        return self.calls is None or self.calls(call)


@cache
def read_findings() -> Mapping[str, tuple[Finding, ...]]:
    """The findings about all calls of an overload, by its name; `conformance/mlir_sweep.py` gives the lines of the file."""
    found: dict[str, list[Finding]] = defaultdict(list)
    with _VERDICTS.open(encoding="utf-8") as lines:
        for line in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
            dtypes = frozenset(getattr(torch, name) for name in line["dtypes"].split())
            platforms = frozenset(line["platforms"].split()) or None
            found[line["overload"]].append(Finding(Verdict(line["verdict"]), dtypes, line["reason"], platforms))
    return {overload: tuple(findings) for overload, findings in found.items()}
