"""Gradients of random programs: which results need them, and what they are, as in eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.random_graphs.random_programs import Program, make_inputs
from tests.random_graphs.test_random_graphs import EAGER_ERRORS, draw_program
from tests.same_layout import assert_same_sharing

RELATIVE = {torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of the largest gradient; 1e-3 of other dtypes: sums of products of rounded numbers."""


def run(program: Program, function: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor | None]]:
    """What a program gives, its inputs, and the gradients of a sum of some results, with weights, of its inputs."""
    leaves = [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in make_inputs(program.inputs)]
    inputs = [leaf * 1 if leaf.requires_grad else leaf for leaf in leaves]
    results = function(*inputs)
    chosen, used = Random(program.source()), [x for x in results if x.requires_grad]
    loss = sum(map(_weigh, chosen.sample(used, chosen.randint(min(1, len(used)), len(used)))))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients: Sequence[Tensor | None] = (
        torch.autograd.grad(loss, wanted, allow_unused=True)
        if isinstance(loss, Tensor) and loss.requires_grad
        else [None] * len(wanted)
    )
    return list(results), inputs, list(gradients)


def _weigh(x: Tensor) -> Tensor:
    parts = torch.view_as_real(x.resolve_conj().resolve_neg()) if x.is_complex() else x
    return (parts.double() * torch.linspace(0.5, 1.5, parts.numel(), dtype=torch.float64).view(parts.shape)).sum()


def check(program: Program) -> None:
    function = program.function()
    expected, eager_inputs, wanted = run(program, function)
    if not all(gradient is None or gradient.isfinite().all() for gradient in wanted):
        return  # of infinities formulas may differ
    torch._dynamo.reset()
    actual, inputs, found = run(program, torch.compile(function, backend="dynaxla", fullgraph=True))
    assert [x.requires_grad for x in actual] == [x.requires_grad for x in expected]
    for mine, eager in zip(found, wanted, strict=True):
        _assert_near(mine, eager)
    with torch.no_grad():
        assert_same_sharing(actual, expected, inputs, eager_inputs)


def _assert_near(mine: Tensor | None, eager: Tensor | None) -> None:
    """Of results that nothing is differentiated of, formulas of zeros such as `copysign`'s give them where eager has None."""
    if eager is None:
        assert mine is None or not mine.any()
        return
    assert mine is not None
    assert mine.dtype is eager.dtype
    scale = max(eager.abs().max().item(), 1e-3) if eager.numel() else 1.0
    torch.testing.assert_close(mine, eager, rtol=0, atol=RELATIVE.get(eager.dtype, 1e-3) * scale)


@pytest.mark.timeout(7200)
@pytest.mark.filterwarnings("ignore")
@settings(phases=(Phase.reuse, Phase.generate))
@given(random=st.randoms(use_true_random=True))
def test_gradients_of_a_random_program(random: Random) -> None:
    with torch.no_grad():
        program, _ = draw_program(random)
    if "topk" in program.source() or any(given.values == "special" for given in program.inputs):
        return  # of equal elements eager's kernels take others
    try:
        run(program, program.function())
    except EAGER_ERRORS:
        return
    try:
        check(program)
    except Exception as error:
        raise AssertionError(f"{error}\n{program.inputs}\n{program.source()}") from error
