"""torch.func: compiled around transforms, and compiled functions inside of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vmap
from torch.utils._pytree import tree_leaves

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

torch.manual_seed(0)
NET, *OTHERS = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)) for _ in range(3))
PARAMETERS = {name: parameter.detach() for name, parameter in NET.named_parameters()}
STACKED, _ = stack_module_state([NET, *OTHERS])
X, LABELS = torch.randn(4, 5), torch.randint(0, 3, (4,))


def call(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(NET, parameters, (x,))


def loss(parameters: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
    return nn.functional.cross_entropy(call(parameters, x), label)


def loss_of_one(parameters: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
    return loss(parameters, x[None], label[None])


def _assert_same(ours: Any, wanted: Any) -> None:
    for one, other in zip(tree_leaves(ours), tree_leaves(wanted), strict=True):
        assert_close(one, other)


AROUND: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "functional_call": (call, (PARAMETERS, X)),
    "grad": (grad(loss), (PARAMETERS, X, LABELS)),
    "vmap of grad": (vmap(grad(loss_of_one), in_dims=(None, 0, 0)), (PARAMETERS, X, LABELS)),
    "jacrev": (jacrev(call), (PARAMETERS, X)),
    "jacfwd": (jacfwd(lambda x: NET(x).sum(0)), (X,)),
    "hessian": (hessian(lambda x: NET(x).pow(3).sum()), (X[0],)),
    "jvp": (lambda x: jvp(NET, (x,), (torch.ones_like(x),)), (X,)),
    "ensemble": (vmap(call, in_dims=(0, None)), (STACKED, X)),
}


@pytest.mark.parametrize("name", AROUND)
def test_transforms_are_compiled(name: str, recorder: Recorder) -> None:
    function, given = AROUND[name]
    with recorder.expect(compiles=1, eager_ops=0):
        ours = torch.compile(function, backend="dynaxla")(*given)
    _assert_same(ours, function(*given))


def test_a_transform_of_a_compiled_function_runs_in_eager(recorder: Recorder) -> None:
    """Dynamo leaves functions alone that torch.func calls: compile around it instead."""
    compiled_loss, compiled = torch.compile(loss, backend="dynaxla"), torch.compile(NET, backend="dynaxla")
    with recorder.expect(compiles=0):
        _assert_same(grad(compiled_loss)(PARAMETERS, X, LABELS), grad(loss)(PARAMETERS, X, LABELS))
        _assert_same(vmap(compiled)(X), vmap(NET)(X))
        _assert_same(jacrev(compiled)(X[0]), jacrev(NET)(X[0]))


def test_functional_call_of_a_compiled_module(recorder: Recorder) -> None:
    compiled = torch.compile(NET, backend="dynaxla")
    for factor in (1, 2, 3):
        given = {name: factor * value for name, value in PARAMETERS.items()}
        with recorder.expect(compiles=1 if factor == 1 else 0):
            ours = functional_call(compiled, {f"_orig_mod.{name}": value for name, value in given.items()}, (X,))
        _assert_same(ours, call(given, X))
