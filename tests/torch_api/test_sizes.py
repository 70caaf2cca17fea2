"""What the wall relies on of symbolic sizes, and of the functions that their expressions are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.fx import GraphModule

from dynaxla.torch_api import size_functions, symbols
from dynaxla.torch_api.aot import aot_autograd
from tests.torch_api.boundary import boundary

S = sympy.Symbol("s", integer=True, positive=True)


def _sizes(look: Callable[[Any, Any], Any], function: Callable[..., Any], *args: Any) -> Any:
    """What is seen of the first input's first size and of the result, at the capture of a call whose sizes vary."""
    seen: list[Any] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        values = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        result = module.graph.output_node().all_input_nodes[0].meta["example_value"]
        seen.append(look(next(v for v in values if isinstance(v, Tensor)).shape[0], result))
        return module.forward

    torch.compile(function, backend=backend, dynamic=True)(*args)
    return seen[0]


@boundary("symbols.Symbolic", "symbols.expression", "symbols.example", "symbols.varies")
def test_sizes_have_expressions_and_examples() -> None:
    def look(size: Any, result: Tensor) -> Any:
        made = result.shape[0]
        assert isinstance(size, torch.SymInt)
        assert isinstance(symbols.expression(size), sympy.Symbol)
        assert symbols.expression(made) == 2 * symbols.expression(size)
        assert symbols.expression(made > size) in (sympy.true, symbols.expression(size) * 2 > symbols.expression(size))
        return symbols.example(size), symbols.example(made), symbols.example(made / size), symbols.varies(result)

    assert _sizes(look, lambda x: torch.cat([x, x]), torch.ones(5, 3)) == (5, 10, 2.0, True)
    assert (symbols.expression(7), symbols.example(7.5), symbols.varies(torch.ones(3))) == (7, 7.5, False)


@boundary("symbols.example")
def test_a_size_that_depends_on_data_has_no_example() -> None:
    seen = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        (result,) = module.graph.output_node().all_input_nodes
        seen.append(symbols.example(result.meta["example_value"].shape[0]))
        return module.forward

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.compile(lambda x: x.nonzero() + 1, backend=backend)(torch.ones(3))
    assert seen == [None]


@boundary("symbols.is_ragged")
def test_jagged_sizes_are_known() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    seen = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        values = [n.meta["example_value"] for n in module.graph.find_nodes(op="placeholder")]
        seen.extend([symbols.is_ragged(s) for s in v.shape] for v in values if isinstance(v, Tensor) and v.is_nested)
        return module.forward

    torch.compile(lambda x: x * 2, backend=backend, dynamic=False)(nested)
    assert seen
    assert [False, True, False] in seen
    assert not symbols.is_ragged(3)


@boundary(
    "symbols.get_constant_value",
    "symbols.upper_bound",
    "symbols.guarded_values",
    "symbols.get_replacement",
    "symbols.is_at_least",
)
def test_guards_bound_sizes() -> None:
    def function(x: Tensor) -> Tensor:
        torch._check(x.shape[0] >= 8)
        torch._check(x.shape[0] <= 15)
        torch._check(x.shape[0] // (x.shape[0] // 4) == 4)
        return x[: x.shape[0] // 8]

    def look(size: Any, result: Tensor) -> Any:
        s = symbols.expression(size)
        assert symbols.get_constant_value(size // 8) == 1
        assert symbols.get_constant_value(size) is None
        assert symbols.get_constant_value(size * 2) is None
        assert symbols.is_at_least(size - 7, 1)
        assert not symbols.is_at_least(size - 8, 1)
        assert symbols.get_replacement(size)(s + 1) == s + 1
        return symbols.upper_bound(s, size), list(symbols.guarded_values(size).values())

    assert _sizes(look, function, torch.ones(12, 3)) == (15, [4])
    assert _sizes(lambda size, _: symbols.upper_bound(symbols.expression(size), size), torch.sin, torch.ones(5)) is None


@boundary("symbols.describe_known_sizes")
def test_all_that_is_known_of_sizes_is_texts() -> None:
    def function(x: Tensor) -> Tensor:
        torch._check(x.shape[0] >= 8)
        torch._check(x.shape[0] // 2 != 7)
        return x * 2

    def look(size: Any, result: Tensor) -> Any:
        ranges, replaced, guards = symbols.describe_known_sizes(size)
        symbol = str(symbols.expression(size))
        return (
            any(told.startswith(f"{symbol} in 8, ") for told in ranges),
            replaced,
            any("7" in told for told in guards),
        )

    assert _sizes(look, function, torch.ones(12, 3)) == (True, [], True)


@boundary("symbols.get_replacement")
def test_guards_make_one_symbol_of_two() -> None:
    seen: list[Any] = []

    def backend(module: GraphModule, inputs: Any) -> Any:
        values = [node.meta["example_value"] for node in module.graph.find_nodes(op="placeholder")]
        found = [value.shape[0] for value in values if isinstance(value, Tensor)]
        seen.append({symbols.get_replacement(s)(symbols.expression(s)) for s in found})
        return module.forward

    def function(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    x, y = torch.ones(5), torch.ones(5)
    for tensor in (x, y):
        torch._dynamo.mark_dynamic(tensor, 0)
    torch.compile(function, backend=backend)(x, y)
    assert len(seen[0]) == 1


F = size_functions
NUMBERS = [
    (F.CeilDiv(S, 4), 3),
    (F.FloorDiv(S, 4), 2),
    (F.Mod(S, 4), 2),
    (F.PythonMod(-S, 4), 2),
    (F.Max(S, 12), 12),
    (F.Min(S, 12), 10),
    (F.FloorToInt(F.IntTrueDiv(S, 4)), 2),
    (F.CeilToInt(F.IntTrueDiv(S, 4)), 3),
    (F.TruncToInt(F.FloatTrueDiv(F.ToFloat(S), 4.0)), 2),
    (F.RoundToInt(F.FloatPow(F.ToFloat(S), 0.5)), 3),
    (F.OpaqueUnaryFn_sqrt(S), math.sqrt(10)),
    (F.OpaqueUnaryFn_log2(S), math.log2(10)),
]


@pytest.mark.parametrize(("expression", "wanted"), NUMBERS, ids=lambda x: str(x))
@boundary(
    "size_functions.as_python",
    "size_functions.is_printable",
    *(f"size_functions.{name}" for name in F.__all__ if name[0].isupper() and name != "BITWISE"),
)
def test_expressions_are_written_in_python(expression: Any, wanted: float) -> None:
    assert F.is_printable(expression)
    code = F.as_python(expression)
    assert eval(code, {"math": math, "torch": torch, "s": 10}) == pytest.approx(wanted)


@boundary("size_functions.is_printable", "size_functions.BITWISE")
def test_what_cannot_be_written_is_known() -> None:
    assert not F.is_printable(sympy.Function("NoSuchFunction")(S))

    def look(size: Any, result: Tensor) -> Any:
        return symbols.expression(size & 3)

    masked = _sizes(look, torch.sin, torch.ones(5))
    assert type(masked).__name__ in F.BITWISE
    assert F.is_printable(masked)


@boundary("size_functions.upper_bound")
def test_bounds_of_operations_are_put_together() -> None:
    assert F.upper_bound(F.FloorDiv(S, 2) + 1, {S: (2, 9)}) == 5
    assert F.upper_bound(F.Mod(S, 8), {S: (2, 100)}) == 7
    assert F.upper_bound(128 - S, {S: (2, 100)}) == 126


@boundary("symbols.is_read_value")
def test_numbers_that_are_read_are_told_from_sizes() -> None:
    found: dict[str, bool] = {}

    def note(module: GraphModule, inputs: Any) -> Any:
        found.update(
            {node.name: symbols.is_read_value(node.meta["val"]) for node in module.graph.nodes if "val" in node.meta}
        )
        return module.forward

    def model(x: Tensor) -> tuple[Any, ...]:
        read = x.mean().item()
        return x.clamp(max=read), x.clamp(max=x.shape[0] / 3), read > 2, x.long().sum().item()

    torch.compile(model, backend=aot_autograd(fw_compiler=note), dynamic=True, fullgraph=True)(torch.ones(7))
    read = {name for name, is_read in found.items() if is_read}
    assert {"_local_scalar_dense", "gt"} >= read >= {"_local_scalar_dense"}


@boundary("symbols.add_deferred_checks")
def test_a_number_that_a_check_takes_for_a_size_is_compared_with_it() -> None:
    """AOTAutograd writes the size for the number: in its own graph the check compares the size with itself."""

    def plus(x: Tensor, n: Tensor) -> Tensor:
        number = n.item()
        torch._check(number == x.shape[0] - 4)
        return x + number

    def add(module: GraphModule, inputs: Any) -> Any:
        symbols.add_deferred_checks(module)
        return module.forward

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(plus, backend=aot_autograd(fw_compiler=add), dynamic=True)
        assert compiled(torch.ones(7), torch.tensor([3])).tolist() == [4] * 7
        with pytest.raises(RuntimeError, match="Runtime assertion failed"):
            compiled(torch.ones(7), torch.tensor([2]))
