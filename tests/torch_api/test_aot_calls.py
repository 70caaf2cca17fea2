"""What the wall relies on of AOTAutograd's calls of compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from dynaxla.decompositions.assertions import CHECK_FACTORIZATION, capture_factorization_checks
from dynaxla.torch_api import tracing
from dynaxla.torch_api.aot import aot_autograd
from dynaxla.torch_api.aot_calls import call_directly
from tests.tolerances import assert_close
from tests.torch_api.boundary import boundary


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Calls:
    """A backend that calls graphs directly where it can.

    Attributes:
        direct: of each graph, whether it can.
        graded: of each run of a graph, whether gradients were enabled.
        args: of the last run.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.direct: list[bool] = []
        self.graded: list[bool] = []
        self.args: list[Any] = []
        self.error = error

    def compile(self, graph: GraphModule, _: object) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.graded.append(torch.is_grad_enabled())
            self.args = list(args)
            if self.error is not None and len(self.graded) > 1:
                raise self.error
            return graph(*args)

        return make_boxed_func(run)

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Any:
        made = aot_autograd(fw_compiler=self.compile)(module, inputs)
        direct = call_directly(made)
        self.direct.append(direct is not made)
        return direct


@boundary("aot_calls.call_directly")
def test_graphs_of_inference_are_called_without_gradients() -> None:
    calls, x = Calls(), torch.randn(3)
    compiled = torch.compile(lambda x: (x + 1, x * 2, x.sum()), backend=calls)
    for is_enabled in (True, True, False, True):
        with torch.set_grad_enabled(is_enabled):
            for mine, theirs in zip(compiled(x), (x + 1, x * 2, x.sum()), strict=True):
                assert_close(mine, theirs)
            assert torch.is_grad_enabled() is is_enabled
    assert calls.direct == [True, True]  # Dynamo captures anew where gradients are not enabled
    assert calls.graded == [False] * 4


@boundary("aot_calls.call_directly")
def test_parameters_and_sizes_are_arguments() -> None:
    calls, model = Calls(), nn.Linear(3, 2)
    compiled = torch.compile(lambda x: model(x).sum(0), backend=calls, dynamic=True)
    with torch.no_grad():
        for size in (4, 5, 6, 6):
            x = torch.randn(size, 3)
            assert_close(compiled(x), model(x).sum(0))
            assert size in [each for each in calls.args if isinstance(each, int)]
    assert calls.direct == [True]


@boundary("aot_calls.call_directly")
def test_results_of_varying_sizes_are_marked_by_the_wrapper() -> None:
    calls = Calls()
    compiled = torch.compile(lambda x: x + 1, backend=calls, dynamic=True)
    for size in (4, 5, 6):
        assert compiled(torch.ones(size)).shape == (size,)
    assert calls.direct == [False]


@boundary("aot_calls.call_directly")
def test_gradients_are_enabled_again_after_an_error() -> None:
    compiled = torch.compile(lambda x: x + 1, backend=Calls(ValueError("refused")))
    compiled(torch.ones(2))
    with pytest.raises(ValueError, match="refused"):
        compiled(torch.ones(2))
    assert torch.is_grad_enabled()


@boundary("aot_calls.call_directly")
def test_profiles_show_the_wrapper() -> None:
    compiled = torch.compile(lambda x: x + 1, backend=Calls())
    for _ in range(2):
        compiled(torch.ones(2))
    with torch.profiler.profile() as profile:
        compiled(torch.ones(2))
    assert "AOTDispatcher Runtime Wrapper Prologue" in {event.name for event in profile.events()}


def _write(x: Tensor) -> Tensor:
    return x.add_(1) * 2


def _disable_gradients(x: Tensor) -> Tensor:
    torch.set_grad_enabled(False)
    return x + 1


FUNCTIONS: dict[str, tuple[Callable[..., Any], list[bool]]] = {
    "a write": (_write, [False]),
    "gradients disabled": (_disable_gradients, [False]),
    "a view of an input": (lambda x: (x + 1, x[1:]), [False]),
    "an input": (lambda x: (x + 1, x), [True]),  # Dynamo returns it
    "two views of a value": (lambda x: (lambda y: (y[1:], y[:1]))(x + 1), [True]),  # the graph makes them
}


@boundary("aot_calls.call_directly")
@pytest.mark.parametrize("what", FUNCTIONS)
def test_wrappers_that_do_more_are_called(what: str) -> None:
    function, direct = FUNCTIONS[what]
    calls, x = Calls(), torch.randn(2, 3)
    compiled = torch.compile(function, backend=calls)
    for _ in range(3):
        mine, theirs = x.clone(), x.clone()
        with torch.enable_grad():
            found = compiled(mine)
            is_enabled = torch.is_grad_enabled()
        with torch.enable_grad():
            expected = function(theirs)
            assert torch.is_grad_enabled() is is_enabled
        torch.testing.assert_close(found, expected)
        assert_close(mine, theirs)
        results, others = (pytree.tree_leaves(each) for each in (found, expected))
        shared = [each.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr() for each in results]
        assert shared == [each.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr() for each in others]
    assert calls.direct == direct


@boundary("aot_calls.call_directly")
def test_training_and_autocast_have_their_wrappers() -> None:
    calls, x = Calls(), torch.randn(3, requires_grad=True)
    torch.compile(lambda x: (x * 2).sum(), backend=calls)(x).backward()
    assert_close(x.grad, torch.full((3,), 2.0))
    compiled = torch.compile(lambda x: x @ x, backend=calls)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(torch.randn(2, 2)).dtype == torch.bfloat16
    assert calls.direct == [False, False]


@boundary("aot_calls.call_directly")
def test_other_functions_are_returned_as_they_are() -> None:
    for function in (len, _write, lambda *args: args, Calls()):
        assert call_directly(function) is function


@boundary("tracing.call_without_token", "tracing.is_functionalized")
@torch.no_grad()
def test_the_captured_graph_has_the_check_itself() -> None:
    """Without it, torch calls the op by `with_effects`, and adds a token to the graph's inputs and outputs."""
    nodes: list[str] = []

    def note(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        nodes[:] = [str(node.target) for node in module.graph.nodes]
        return module.forward

    assert not tracing.is_functionalized(torch.zeros(1))
    for wanted, context in ((False, torch.no_grad), (True, capture_factorization_checks)):
        torch._dynamo.reset()
        with context():
            torch.compile(torch.linalg.inv, backend=aot_autograd(fw_compiler=note))(torch.eye(4).repeat(2, 1, 1))
        assert (str(CHECK_FACTORIZATION) in nodes) == wanted
        assert ("with_effects" in nodes) != wanted
