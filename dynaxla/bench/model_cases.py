"""A model as it is asked for on the command line, as a case of `measure.py` and as what a child process is told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from dynaxla.bench.backends import BenchBackend
from dynaxla.bench.cases import Case
from dynaxla.bench.workloads import Workload, load_workload, vary_sizes


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Attributes:
    workload: its name, see `workloads.py`.
    vary: dims that vary, and their sizes.
    requests: calls with sizes that vary.
    train: takes gradients, too.
    tolerance: largest relative error; None: that of the dtype.
    """

    workload: str
    vary: Sequence[str] = ()
    requests: int = 50
    train: bool = False
    tolerance: float | None = None

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def load(self) -> Workload:
        """
        Raises:
            OptionError: see `load_workload` and `vary_sizes`.
        """
        workload = load_workload(self.workload, train=self.train)
        return vary_sizes(workload, self.vary, self.requests) if self.vary else workload

    def make_case(self, backends: Sequence[BenchBackend], baseline: str) -> Case:
        """The case of these backends; the first is named `baseline`."""
        workload = self.load()
        ways = {each.text: partial(each.prepare, workload, train=self.train) for each in backends}
        exact = partial(BenchBackend.prepare_in_float64, workload, train=self.train)
        about = f"{workload.about}, {'training' if self.train else 'inference'}"
        return Case(self.workload, ways, baseline, workload.sizes, exact=exact, tolerance=self.tolerance, about=about)
