"""Every architecture of the zoo: eager's numbers, one executable for each graph, nothing in eager.

The quick list has a few, --full some more, `-m slow` all others; what deviates is in tests/zoo/expected.py.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dynaxla.observe.recorder import Metrics, Recorder
from tests.tolerances import RELATIVE
from tests.zoo.architecture import Architecture, Built
from tests.zoo.compare import flatten_outputs, max_relative_error, worst_leaf
from tests.zoo.expected import AS_THE_RULE, EXPECTED, Expected
from tests.zoo.registry import ARCHITECTURES

QUICK = {
    torch.float32: (
        "mlp", "graph-network", "recommender", "lstm", "llama", "resnet", "audio-spectrogram-transformer", "dit",
    ),
    torch.bfloat16: ("mlp", "llama"),
}  # fmt: skip
LONG = {
    torch.float32: (
        "ranker", "image-generator", "volume-network", "multihead-attention", "transformer-encoder", "electra",
    ),
    torch.bfloat16: ("lstm-cell", "resnet"),
}  # fmt: skip
NOISE = 1.5  # a bfloat16 result may be this much farther from float32 than eager's


def _cases() -> Iterator[Any]:
    for architecture in ARCHITECTURES:
        for dtype in architecture.dtypes:
            name = f"{architecture.name}-{str(dtype).removeprefix('torch.')}"
            yield pytest.param(architecture, dtype, marks=_marks(architecture.name, dtype), id=name)


def _marks(name: str, dtype: torch.dtype) -> tuple[pytest.MarkDecorator, ...]:
    if name in QUICK[dtype]:
        return ()
    return (pytest.mark.long,) if name in LONG[dtype] else (pytest.mark.slow,)


@pytest.mark.parametrize(("architecture", "dtype"), _cases())
def test_as_eager_in_one_executable_for_each_graph(
    architecture: Architecture, dtype: torch.dtype, recorder: Recorder
) -> None:
    expected = EXPECTED.get((architecture.name, dtype), AS_THE_RULE)
    built = architecture.build(dtype)
    with torch.no_grad():
        run(built)  # some models install hooks at their first call
        eager = run(built)
        before = recorder.snapshot()
        actual = run(built, torch.compile(built[0], backend="dynaxla"))
        after = recorder.snapshot()
    assert_counts(before, after, architecture.graphs, expected)
    assert has_numbers(eager), "eager gives no finite number: nothing is compared"
    path, error = worst_leaf(actual, eager)
    if expected.noisy and error > RELATIVE[dtype]:
        assert_as_near_to_float32(built, actual, eager)
    else:
        assert error <= RELATIVE[dtype], f"{path} is off by {error:.2e}"


def run(built: Built, module: nn.Module | None = None) -> Any:
    """One forward call on copies of the inputs, which some modules write into."""
    args, kwargs = copy.deepcopy(built[1:])
    return (built[0] if module is None else module)(*args, **kwargs)


def assert_counts(before: Metrics, after: Metrics, graphs: int, expected: Expected) -> None:
    eager_ops = {line.split(" ", 1)[0] for line in after.fallbacks[len(before.fallbacks) :]}
    assert eager_ops == expected.eager_ops, after.fallbacks[len(before.fallbacks) :]
    assert after.graphs - before.graphs == graphs
    executables = graphs if expected.executables is None else expected.executables
    assert after.compiles - before.compiles == executables
    assert (after.eager_ops > before.eager_ops) == bool(eager_ops)


def has_numbers(out: Any) -> bool:
    """Whether each floating tensor holds a finite number: NaN agrees with NaN, and shows nothing."""
    tensors = [leaf for _, leaf in flatten_outputs(out) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    return all(bool(tensor.isfinite().any()) for tensor in tensors if tensor.numel())


def assert_as_near_to_float32(built: Built, actual: Any, eager: Any) -> None:
    wide = widened_inputs(built)
    with torch.no_grad():
        exact = widened(run(wide))
    ours, eagers = (max_relative_error(widened(out), exact) for out in (actual, eager))
    assert ours <= NOISE * eagers, f"off float32 by {ours:.2e}, eager by {eagers:.2e}"


def widened_inputs(built: Built) -> Built:
    net, args, kwargs = copy.deepcopy(built)
    return net.float(), tuple(map(widened_leaf, args)), {name: widened_leaf(value) for name, value in kwargs.items()}


def widened(out: Any) -> list[Any]:
    """The tensors of an output; a cache also names its dtype, which is another by intent."""
    return [widened_leaf(leaf) for _, leaf in flatten_outputs(out) if isinstance(leaf, torch.Tensor)]


def widened_leaf(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf


def test_side_table_names_what_is_in_the_zoo() -> None:
    cases = {(architecture.name, dtype) for architecture in ARCHITECTURES for dtype in architecture.dtypes}
    assert set(EXPECTED) <= cases
    assert {(name, dtype) for names_of in (QUICK, LONG) for dtype, names in names_of.items() for name in names} <= cases
