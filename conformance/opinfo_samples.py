"""Takes samples from torch's OpInfo database, and runs them in eager."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# What eager raises on samples that it refuses: some samples are made for that, or for another device.
EAGER_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError, AttributeError)
SAMPLES_LISTED = 256
WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


@dataclass(frozen=True)
class Sample:
    """One call of an op, and what eager makes of it.

    Attributes:
        leaves: results, or gradients of the inputs in the order of the inputs.
        cotangents: of the results that have gradients; none forward.
        is_random: whether an op that draws random numbers came by.
    """

    call: Any
    leaves: list[Any]
    cotangents: list[torch.Tensor]
    is_random: bool


class SeesRandomOps(TorchDispatchMode):
    """Remembers whether an op that draws random numbers came by."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
        return target(*args, **(kwargs or {}))


def name_of(info: Any) -> str:
    """The OpInfo's name, with its variant's behind a slash."""
    return f"{info.name}/{info.variant_test_name}" if info.variant_test_name else info.name


def why_not(info: Any, dtype: torch.dtype, direction: str) -> str | None:
    """Why OpInfo has no samples of this op; None if it has."""
    if dtype not in info.dtypes:
        return "eager does not take the dtype"
    if direction == "forward":
        return None
    if not (dtype.is_floating_point or dtype.is_complex):
        return "the dtype has no gradients"
    return None if info.supports_autograd and dtype in info.backward_dtypes else "eager has no gradient"


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def take_samples(info: Any, dtype: torch.dtype, backward: bool, device: str = "cpu") -> Iterator[Sample]:
    """Samples from all over OpInfo's list that eager takes, on one of torch's own devices."""
    calls = list(islice(info.sample_inputs(device, dtype, requires_grad=backward), SAMPLES_LISTED))
    for call in _spread(calls):
        sees = SeesRandomOps()
        seed()
        try:
            with sees:
                results = info.op(call.input, *call.args, **call.kwargs)
            flat = _normalized(call, results)
            cotangents = [torch.randn_like(r) for r in flat if backward and _has_gradient(r)]
            sample = Sample(call, [], cotangents, sees.seen)
            sample = replace(sample, leaves=leaves_of_all([sample], [results])[0])
        except EAGER_ERRORS:
            continue
        if cotangents or not backward:
            yield sample


def _spread(calls: list[Any]) -> list[Any]:
    """First the last, the first and the middle, then the middles between: any beginning is spread over the list."""
    places = [len(calls) - 1, 0] if calls else []
    step = len(calls)
    while step > 1:
        step = -(-step // 2)
        places += range(step, len(calls), step)
        if step == 1:
            break
    return [calls[place] for place in dict.fromkeys(places)]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _normalized(call: Any, results: Any) -> list[Any]:
    """Flat results, normalized as OpInfo says: eigenvectors, for one, are what they are but for a factor."""
    normalize = call.output_process_fn_grad
    return tree_leaves(results if normalize is None else normalize(results))


def flat_results(call: Any, op: Callable[..., Any]) -> list[Any]:
    """Flat results of an op on a sample's call."""
    return _normalized(call, op(call.input, *call.args, **call.kwargs))


def inputs_of(call: Any) -> list[torch.Tensor]:
    """The tensors of a call that have gradients."""
    return [x for x in tree_leaves((call.input, call.args, call.kwargs)) if _has_gradient(x)]


def run(function: Callable[..., Any], sample: Sample) -> list[Any]:
    """Results of a function on a sample, or gradients of the sample's inputs."""
    return leaves_of_all([sample], [function(sample.call.input, *sample.call.args, **sample.call.kwargs)])[0]


def leaves_of_all(samples: Sequence[Sample], results: Sequence[Any]) -> list[list[Any]]:
    """For every sample its flat results, or the gradients of its inputs."""
    flat = [_normalized(sample.call, result) for sample, result in zip(samples, results, strict=True)]
    cotangents = [c for sample in samples for c in sample.cotangents]
    if not cotangents:
        return flat
    inputs = [inputs_of(sample.call) for sample in samples]
    outputs = [r for leaves in flat for r in leaves if _has_gradient(r)]
    gradients = iter(torch.autograd.grad(outputs, [x for part in inputs for x in part], cotangents, allow_unused=True))
    return [list(islice(gradients, len(part))) for part in inputs]


def run_wide(info: Any, sample: Sample) -> list[Any]:
    seed()
    call = sample.call

    def widen(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().to(WIDE.get(value.dtype, value.dtype)).requires_grad_(value.requires_grad)
        return WIDE.get(value, value) if isinstance(value, torch.dtype) else value

    first, args, kwargs = tree_map(widen, (call.input, tuple(call.args), dict(call.kwargs)))
    wide = type(call)(first, args=args, kwargs=kwargs)
    wide.output_process_fn_grad = call.output_process_fn_grad
    return run(info.op, Sample(wide, [], [widen(c) for c in sample.cotangents], False))
