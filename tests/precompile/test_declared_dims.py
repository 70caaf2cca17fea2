"""Which dims vary, as the command line says it, and what is said where that cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynaxla.bucketing.marked_dims import MarkedDims
from dynaxla.errors import OptionError
from dynaxla.precompile.declared_dims import DeclaredDims, mark_dims, named_arguments


@pytest.mark.parametrize(
    ("text", "dims", "sizes"),
    [
        ("tokens:1=8,16,32", (("tokens", 1),), (8, 16, 32)),
        ("tokens:1,mask:1=8", (("tokens", 1), ("mask", 1)), (8,)),
        (" tokens:1 , mask:-1 = 1,2 ", (("tokens", 1), ("mask", -1)), (1, 2)),
        ("0:0=8..64", (("0", 0),), (8, 16, 32, 48, 64)),
        ("batch.tokens:1=1..5", (("batch.tokens", 1),), (1, 2, 3, 4, 5)),
        ("x:0=20..20", (("x", 0),), (20,)),
    ],
)
def test_what_is_declared(text: str, dims: tuple[tuple[str, int], ...], sizes: tuple[int, ...]) -> None:
    declared = DeclaredDims.parse(text)
    assert (declared.dims, declared.sizes) == (dims, sizes)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no sizes"),
        ("tokens:1", "has no sizes"),
        ("tokens:1=", "has no sizes"),
        ("tokens=8", "'tokens' in the bucket 'tokens=8' names no dim"),
        (":1=8", "names no dim"),
        ("tokens:first=8", "names no dim"),
        ("tokens:1,=8", "names no dim"),
        ("tokens:1=eight", "no whole numbers"),
        ("tokens:1=8,", "no whole numbers"),
        ("tokens:1=8..", "no whole numbers"),
        ("tokens:1=-8..8", "no whole numbers"),
        ("tokens:1=16,8", "not ascending"),
        ("tokens:1=8,8", "not ascending"),
        ("tokens:1=0", ">= 1"),
        ("tokens:1=16..8", "no size lies between"),
    ],
)
def test_what_cannot_be_declared(text: str, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        DeclaredDims.parse(text)


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor, batch: dict[str, Any], *more: Any, scale: float = 1.0, **named: Any) -> None: ...


def arguments() -> dict[str, Any]:
    args = (torch.zeros(3, 5), {"tokens": torch.zeros(3, 7), "parts": [torch.zeros(7)]}, torch.zeros(2))
    return named_arguments(Model(), args, {"mask": torch.zeros(3, 7)})


def test_arguments_have_the_models_names_and_their_places() -> None:
    marks, given = MarkedDims(), arguments()
    declared = [DeclaredDims.parse("x:-1=5,9"), DeclaredDims.parse("batch.tokens:1,batch.parts.0:0,mask:1=2..7")]
    assert mark_dims(declared, given, marks) == {5: "x:-1", 7: "batch.tokens:1"}
    assert set(marks.of(given["x"])) == {1}
    assert set(marks.of(given["batch"]["parts"][0])) == {0}
    assert marks.of(given["mask"])[1].max == 7
    assert mark_dims([DeclaredDims.parse("more.0:0=2")], arguments(), MarkedDims()) == {2: "more.0:0"}
    assert mark_dims([DeclaredDims.parse("2:0=2")], arguments(), MarkedDims()) == {2: "2:0"}


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (
            ["y:0=8"],
            r"(?s)no tensor 'y'.*x \(3, 5\), batch\.tokens \(3, 7\), batch\.parts\.0 \(7,\), more\.0 \(2,\), mask \(3, 7\)$",
        ),
        (["scale:0=8"], "no tensor 'scale'"),
        (["batch:0=8"], "no tensor 'batch'"),
        (["batch.parts.1:0=8"], "no tensor"),
        (["x:2=8"], "no dim 2"),
        (["x:-3=8"], "no dim -3"),
        (["x:1=2,4"], "dim 1 has size 5, outside of the sizes from 0 to 4"),
        (["x:1=6..8"], "dim 1 has size 5, outside of the sizes from 6 to 8"),
        (["x:0,x:1=8"], "the example's are {'x:0': 3, 'x:1': 5}"),
        (["x:1=8", "0:1=16"], "declared twice"),
        (["x:0=8", "batch.tokens:0=8"], "x:0 and batch.tokens:0 have the same size in the example, 3"),
    ],
)
def test_dims_that_cannot_be_marked(texts: list[str], told: str) -> None:
    with pytest.raises(OptionError, match=told) as caught:
        mark_dims([DeclaredDims.parse(text) for text in texts], arguments(), MarkedDims())
    assert caught.value.hint


def test_a_function_that_does_not_take_the_arguments() -> None:
    with pytest.raises(OptionError, match="cannot be called with the factory's arguments: missing a required argument"):
        named_arguments(Model(), (torch.zeros(1),), {})
    assert list(named_arguments(torch.tanh, (torch.zeros(1),), {})) == ["0"], "a built-in function names nothing"
