"""Functions of torch.linalg are one part: what eager checks between two ops is checked at its end, and raises eager's error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dynaxla.observe.recorder import Recorder
from tests.bucketing.poison import poison
from tests.tolerances import assert_close

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "inv": lambda x: torch.linalg.inv(x) @ x.sin(),
    "solve": lambda x: torch.linalg.solve(x, x.sin()) * 2,
    "solve of vectors": lambda x: torch.linalg.solve(x, x[..., 0].sin()),
    "linalg.cholesky": lambda x: torch.linalg.cholesky(x @ x.mH).sin(),
    "cholesky": lambda x: torch.cholesky(x @ x.mH),
    "lu_factor": lambda x: torch.linalg.lu_factor(x)[0] * 2,
    "matrix_power": lambda x: torch.linalg.matrix_power(x, -2),
    "vmap": lambda x: torch.vmap(torch.linalg.inv)(x) * 2,
    "several": lambda x: torch.linalg.inv(x) + torch.linalg.solve(x * 1.0, x[..., :1]).cos(),
}


def regular(count: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 4, 4, dtype=dtype) + 5 * torch.eye(4, dtype=dtype)


def singular(count: int, place: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Matrices of which the one at the place has no factorization."""
    found = regular(count, dtype)
    found[place, :, 2] = 0
    found[place, 2] = 0
    return found


def raised(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[type, str]:
    with pytest.raises(RuntimeError) as told:
        function(x)
    return type(told.value), str(told.value)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
@torch.no_grad()
def test_one_program_raises_eagers_error(name: str, dtype: torch.dtype, recorder: Recorder) -> None:
    function = FUNCTIONS[name]
    compiled = torch.compile(function, backend="dynaxla", dynamic=False)
    with recorder.expect(compiles=1, eager_ops=0, graphs=1):
        for wrong in (2, 0):
            x = regular(3, dtype)
            assert_close(compiled(x), function(x))
            assert raised(compiled, singular(3, wrong, dtype)) == raised(function, singular(3, wrong, dtype))


@torch.no_grad()
def test_padding_has_no_part_in_it(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)
    function = FUNCTIONS["several"]
    compiled = torch.compile(lambda x: function(x), backend="dynaxla")
    x = regular(3)
    torch._dynamo.maybe_mark_dynamic(x, 0)
    assert_close(compiled(x), function(x))
    with recorder.expect(compiles=1, eager_ops=0):
        for count in (9, 11, 16, 12):
            assert_close(compiled(regular_ := regular(count)), function(regular_))
            for place in (0, count - 1):
                assert raised(compiled, singular(count, place)) == raised(function, singular(count, place))


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {"lu_factor"}))
@pytest.mark.parametrize("again", [False, True], ids=["saved", "checkpoint"])
def test_training(name: str, again: bool, recorder: Recorder) -> None:
    def function(x: Tensor) -> Tensor:
        run = FUNCTIONS[name]
        return checkpoint(run, x, use_reentrant=False) if again else run(x)  # type: ignore[no-any-return]

    compiled = torch.compile(function, backend="dynaxla")
    given = regular(3)
    x, y = (given.clone().requires_grad_() for _ in range(2))
    with recorder.expect(eager_ops=0):
        results = compiled(x), function(y)
        assert_close(*results)
        for result in results:
            result.square().sum().backward()
    assert_close(x.grad, y.grad)
    wrong = singular(3, 1).requires_grad_()
    assert raised(compiled, wrong) == raised(function, wrong)


@torch.no_grad()
def test_the_first_of_several_is_raised() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        first = torch.linalg.inv(x)
        torch._assert_async(y.mean() < 10, "large")
        return first + torch.linalg.cholesky(y)

    compiled = torch.compile(function, backend="dynaxla")
    good, bad = regular(2), singular(2, 1)
    spd = good @ good.mT * 1e-2
    assert_close(compiled(good, spd), function(good, spd))
    for x, y in ((bad, -spd), (bad, spd + 100), (good, spd + 100), (good, -spd), (bad, spd)):
        with pytest.raises(RuntimeError) as eager:
            function(x, y)
        with pytest.raises(type(eager.value)) as ours:
            compiled(x, y)
        assert str(ours.value) == str(eager.value)


@torch.no_grad()
def test_a_call_that_raises_writes_nothing() -> None:
    def function(x: Tensor, sums: Tensor) -> Tensor:
        found = torch.linalg.inv(x)
        sums.add_(found)
        return found * 2

    compiled = torch.compile(function, backend="dynaxla")
    ours, eagers = (torch.zeros(2, 4, 4, dtype=torch.float64) for _ in range(2))
    x = regular(2)
    assert_close(compiled(x, ours), function(x, eagers))
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(singular(2, 0), ours)
    assert_close(ours, eagers)


@torch.no_grad()
def test_between_parts_the_check_runs_in_eager(recorder: Recorder) -> None:
    """The graph has an op that no part computes."""

    def function(x: Tensor) -> Tensor:
        return torch.linalg.eigvals(torch.linalg.inv(x)).abs().sum() + torch.linalg.solve(x, x * 1.5).sum()

    compiled = torch.compile(function, backend="dynaxla")
    with recorder.expect(eager_ops=1):
        assert_close(compiled(x := regular(3)), function(x))
    assert raised(compiled, singular(3, 1)) == raised(function, singular(3, 1))


@torch.no_grad()
def test_a_saved_package_raises_it(tmp_path: Path) -> None:
    function = FUNCTIONS["inv"]
    path = tmp_path / "inv.dynaxla"
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True).aot_compile(((regular(3),), {}))
    compiled.save_compiled_function(str(path))
    with path.open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    assert_close(loaded(x := regular(3)), function(x))
    assert raised(loaded, singular(3, 1)) == raised(function, singular(3, 1))
