"""What compiled graphs that check no values give for an index out of range: docs/ops.md, "Indices out of range"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dynaxla.observe.recorder import Recorder

TABLE, ROW = torch.arange(1.0, 13.0).reshape(4, 3), torch.arange(1.0, 5.0)
OUTSIDE = torch.tensor([1, 7])

ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "embedding": lambda index: F.embedding(index, TABLE),
    "embedding_bag": lambda index: F.embedding_bag(index, TABLE, torch.tensor([0, 1]), mode="sum"),
}
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "gather": lambda index: ROW.gather(0, index),
    "x[index]": lambda index: ROW[index],
    "index_select": lambda index: ROW.index_select(0, index),
    "take": lambda index: ROW.take(index),
}
WRITES: dict[str, Callable[[Tensor], Tensor]] = {
    "scatter": lambda index: ROW.scatter(0, index, 9.0),
    "index_put": lambda index: ROW.index_put((index,), torch.tensor(9.0)),
    "index_add": lambda index: ROW.index_add(0, index, torch.tensor([7.0, 7.0])),
    "put": lambda index: ROW.put(index, torch.tensor([9.0, 9.0])),
}


def run(function: Callable[[Tensor], Tensor], index: Tensor, recorder: Recorder) -> Any:
    with pytest.raises((IndexError, RuntimeError)):
        function(index)
    with recorder.expect(compiles=1, eager_ops=0):
        return torch.compile(function, backend="dynaxla", options={"value_checks": False})(index)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("outside", [7, -1])
def test_rows_are_nan(name: str, outside: int, recorder: Recorder) -> None:
    found = run(ROWS[name], torch.tensor([1, outside]), recorder)
    assert torch.equal(found[0], TABLE[1])
    assert found[1].isnan().all()


@pytest.mark.parametrize("name", READS)
def test_reads_give_an_element(name: str, recorder: Recorder) -> None:
    found = run(READS[name], OUTSIDE, recorder)
    assert found[0] == ROW[1]
    assert found[1] in ROW


@pytest.mark.parametrize("name", WRITES)
def test_writes_leave_the_element_out(name: str, recorder: Recorder) -> None:
    assert run(WRITES[name], OUTSIDE, recorder).tolist() == [1, 9, 3, 4]


@pytest.mark.parametrize("loss", [F.nll_loss, F.cross_entropy])
def test_targets_are_ignored(loss: Callable[..., Tensor], recorder: Recorder) -> None:
    scores = torch.randn(2, 4).log_softmax(1)
    found = run(lambda target: loss(scores, target), OUTSIDE, recorder)
    torch.testing.assert_close(found, loss(scores, torch.tensor([1, -100])))


def test_one_hot_raises() -> None:
    with pytest.raises(RuntimeError, match="Class values must be smaller"):
        torch.compile(lambda index: F.one_hot(index, 4), backend="dynaxla")(OUTSIDE)


def test_eager_execution_names_the_op() -> None:
    compiled = torch.compile(ROWS["embedding"], backend="dynaxla", options={"executor": "eager"})
    with pytest.raises(IndexError):
        compiled(OUTSIDE)
