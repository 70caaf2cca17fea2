"""Strided views of what lies in memory: inside one executable where the input's memory is known, in eager elsewhere."""

from __future__ import annotations

import pytest
import torch

from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close

INPUTS = {
    "row-major": lambda x: x * 2,
    "transposed": lambda x: (x * 2).transpose(0, 1),
    "permuted": lambda x: (x * 2).permute(2, 0, 1),
}


@torch.no_grad()
@pytest.mark.parametrize("name", INPUTS)
def test_overlapping_windows_of_a_dense_tensor(name: str, recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return INPUTS[name](x).as_strided((3, 4, 2), (5, 2, 1), 3) + 1

    x = torch.randn(2, 3, 6)
    with recorder.expect(graphs=1, compiles=1):
        actual = torch.compile(model, backend="dynaxla", options={"fallback": "error"})(x)
    assert_close(actual, model(x))


@torch.no_grad()
@pytest.mark.parametrize("name", INPUTS)
def test_symbolic_sizes_add_no_guard(name: str, recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return INPUTS[name](x).as_strided((x.shape[0], 3), (4, 2)) + 1

    compiled = torch.compile(model, backend="dynaxla", dynamic=True)
    with recorder.expect(graphs=1):
        for size in (4, 5, 7):
            x = torch.randn(size, 3, 6)
            assert_close(compiled(x), model(x))


VIEWS = {
    "gaps": lambda x: x[:, ::2],
    "the first rows": lambda x: x[:1],
    "an offset": lambda x: x[1:],
    "a row, repeated": lambda x: x[2].unsqueeze(0).expand(3, -1),
    "one of several": lambda x: x.split(2)[1],
    "a strided view": lambda x: x.as_strided((3, 2), (5, 3), 2),
    "an unsafe view": lambda x: torch.ops.aten._unsafe_view(x[1:], [6, 3]),
    "a reshape that is a view": lambda x: x[1:].reshape(3, 3, 2),
    "a reshape that is a copy": lambda x: x.t()[:, 1:].reshape(-1),
    "one of several, unsafely": lambda x: torch.ops.aten.unsafe_split(x, 2)[1],
    "of another dtype": lambda x: x[1:].view(torch.int32),
    "of complex numbers": lambda x: torch.view_as_complex(x.reshape(4, 3, 2)[:, 1:]),
    "of conjugates": lambda x: torch.view_as_complex(x.reshape(4, 3, 2)).conj()[:3],
    "of negated parts": lambda x: torch.view_as_complex(x.reshape(4, 3, 2)).conj()[1:].imag,
}


@torch.no_grad()
@pytest.mark.parametrize("given", [None, 5], ids=["own offset", "offset 5"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_read_from_the_memory_of_its_owner(name: str, given: int | None, recorder: Recorder) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return VIEWS[name](x * 2).as_strided((2, 3), (4, 1), given) + 1

    x = torch.randn(4, 6)
    with recorder.expect(graphs=1, compiles=1):
        actual = torch.compile(model, backend="dynaxla", options={"fallback": "error"})(x)
    assert_close(actual, model(x))


ARGUMENTS = {
    "a column": lambda x: x[:, 1:3],
    "the first rows": lambda x: x[:2],
    "an offset": lambda x: x[1:],
    "transposed": lambda x: x.t(),
}


@torch.no_grad()
@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_is_read_from_its_own_storage(name: str, viewed: bool) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return (x[:1] if viewed else x).as_strided((3, 4), (6, 1)) + 1

    x = ARGUMENTS[name](torch.randn(4, 6))
    assert_close(torch.compile(model, backend="dynaxla")(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_copies_of_strided_views_read_and_write_the_owner(dynamic: bool) -> None:
    def read(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_copy((x * 2)[1:], (2, 2), (8, 1), 0)

    def write(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_scatter((x * 2)[1:], torch.ones(2, 2), (2, 2), (4, 1), 0)

    x = torch.randn(5, 4)
    for function in (read, write):
        assert_close(torch.compile(function, backend="dynaxla", dynamic=dynamic)(x), function(x))
