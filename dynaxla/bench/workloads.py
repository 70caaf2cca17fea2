"""What is measured, by its name on the command line: a user's factory, a model of transformers, or a built-in one.

package.module:factory, path/to/file.py:factory    see dynaxla/precompile/model_factory.py
hf:bert,num_hidden_layers=2,batch=4                a model type, folder or name of transformers; see huggingface_models.py
tiny-mlp                                           a name of built_in_models.py
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dynaxla.bench.built_in_models import BUILT_IN
from dynaxla.bench.huggingface_models import PREFIX, build_model, read_config
from dynaxla.bucketing.marked_dims import MarkedDims
from dynaxla.errors import OptionError
from dynaxla.options import require_member
from dynaxla.precompile.declared_dims import DeclaredDims, mark_dims, named_arguments
from dynaxla.precompile.model_factory import call_factory, find_factory
from dynaxla.precompile.warmup import resize_example
from dynaxla.torch_api.pytree import tree_map_only

LOG_DEVIATION = 0.9
"""Of log-normal sizes, which lengths of texts are like."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the calls of it.

    Attributes:
        name: of the command line.
        calls: of each its arguments and keywords.
        sizes: of each call its sizes that vary, by name; one empty mapping where none do.
    """

    name: str
    function: Callable[..., Any]
    calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]
    sizes: Sequence[Mapping[str, int]] = ({},)

    @property
    def about(self) -> str:
        """Says which class the model has, and how many parameters."""
        if not isinstance(self.function, nn.Module):
            return "a function"
        parameters = list(self.function.parameters())
        dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in parameters})
        count = sum(each.numel() for each in parameters)
        return f"{type(self.function).__name__}, {count:,} parameters {' '.join(dtypes)}".strip()


def check_workload(name: str) -> None:
    """Looks a name up without building its model.

    Raises:
        OptionError: there is no such factory, model or setting; the message has the nearest.
    """
    if name.startswith(PREFIX):
        read_config(name)
    elif ":" in name:
        find_factory(name)
    else:
        require_member(name, BUILT_IN, "workload")


def load_workload(name: str, *, train: bool = False) -> Workload:
    """Builds what a name stands for, with seed 0; built-in models and those of transformers are in the mode for it.

    Raises:
        OptionError: there is no such factory, model or setting; the message has the nearest.
    """
    torch.manual_seed(0)
    if name.startswith(PREFIX):
        function, args, kwargs = build_model(name, train=train)
    elif ":" in name:
        called = call_factory(name)
        function, args, kwargs = called.function, called.args, dict(called.kwargs)
    else:
        require_member(name, BUILT_IN, "workload")
        function, args, kwargs = BUILT_IN[name]()
        function.train(train)
    return Workload(name, function, [(args, kwargs)])


@dataclass(frozen=True, slots=True)
class VaryingDims:
    """Dims that vary together, and how their sizes are drawn.

    Attributes:
        dims: with the range.
        choices: the sizes of a list; empty for a range.
        median: of the log-normal sizes of a range; None: log-uniform ones.
    """

    dims: DeclaredDims
    choices: Sequence[int] = ()
    median: float | None = None

    @classmethod
    def parse(cls, text: str) -> VaryingDims:
        """Reads "tokens:1,mask:1=8..512", "tokens:1=8..512~60" (log-normal, the median 60), "pixels:0=1,2,4".

        Raises:
            OptionError: it is of another form.
        """
        declared, tilde, median = text.partition("~")
        if tilde and (not median.strip().isdecimal() or ".." not in declared):
            raise OptionError(
                f"{median!r} is no median of the sizes in {text!r}", "write a range, as tokens:1=8..512~60"
            )
        dims = DeclaredDims.parse(declared)
        return cls(dims, () if ".." in declared else dims.sizes, float(median) if tilde else None)

    def draw(self, chance: random.Random) -> int:
        if self.choices:
            return chance.choice(self.choices)
        low, high = self.dims.policy.min or 1, self.dims.policy.max or 1
        if self.median is None:
            return min(high, int(low * ((high + 1) / low) ** chance.random()))
        return min(high, max(low, round(math.exp(chance.gauss(math.log(self.median), LOG_DEVIATION)))))


def vary_sizes(workload: Workload, varying: Sequence[str], requests: int) -> Workload:
    """The workload at sizes that are drawn, the same in every process. Tensors of a larger size repeat the example's elements.

    Args:
        varying: dims and sizes, see `VaryingDims.parse`.
        requests: how many calls.

    Raises:
        OptionError: see `VaryingDims.parse` and `mark_dims`; or there are no requests.
    """
    if requests < 1:
        raise OptionError(f"{requests} requests are none", "give --requests 1 or more")
    (args, kwargs), marks, chance = workload.calls[0], MarkedDims(), random.Random(0)
    parsed = [VaryingDims.parse(text) for text in varying]
    names = mark_dims([each.dims for each in parsed], named_arguments(workload.function, args, kwargs), marks)
    sizes = [{each.dims.name: each.draw(chance) for each in parsed} for _ in range(requests)]

    def resize(tensor: torch.Tensor, drawn: Mapping[str, int]) -> torch.Tensor:
        changed = {dim: drawn[names[tensor.shape[dim]]] for dim in marks.of(tensor)}
        return resize_example(tensor, changed) if changed else tensor

    calls = [tree_map_only(torch.Tensor, partial(resize, drawn=drawn), (args, kwargs)) for drawn in sizes]
    return replace(workload, calls=calls, sizes=sizes)
