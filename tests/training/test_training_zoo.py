"""Architectures of the zoo train as in eager; conformance/training_sweep.py trains all of them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.training_record import NOT_TRAINED, read_trainings
from dynaxla.observe.recorder import Recorder
from tests.lists import quick
from tests.zoo.registry import ARCHITECTURES, find
from tests.zoo.training import train, trainee
from tests.zoo.training_check import LIMIT, compare

DOCS = Path(__file__).parents[2] / "docs"
NAMES = ("mlp", "graph-network", "recommender", "lstm-cell", "image-generator", "volume-network", "llama")


def _compile(function: Any) -> Any:
    return torch.compile(function, backend="dynaxla")


@pytest.mark.parametrize("name", quick(NAMES, "mlp", "recommender", "llama"))
def test_as_eager(name: str, recorder: Recorder) -> None:
    """Network, loss and the optimizer's step are compiled: three executables, and no part in eager."""
    architecture = find(name)
    eager = train(trainee(architecture))
    with (
        recorder.expect(graphs=3, compiles=3, eager_ops=0),
    ):
        mine = train(trainee(architecture), _compile, _compile)
    found = compare(mine, eager)
    assert found.worst <= LIMIT, found


def test_the_sweep_trained_what_the_zoo_has() -> None:
    wanted = [architecture.name for architecture in ARCHITECTURES if architecture.name not in NOT_TRAINED]
    assert list(read_trainings()) == wanted, "python -m conformance.training_sweep --missing"


def test_the_sweep_found_what_is_claimed() -> None:
    trainings = read_trainings().values()
    assert sum(training.is_correct for training in trainings) >= 35
    assert sum(training.is_whole for training in trainings) >= 30


def test_training_page_is_what_the_sweep_found() -> None:
    written = runpy.run_path(str(DOCS / "write_training.py"))["write_training"]()
    page = (DOCS / "training.md").read_text(encoding="utf-8")
    assert written == page, "python -m docs.write_training > docs/training.md"
