"""Lightning: a module compiled in place, or the network within, trained by its trainer.

Lightning is imported by the test that runs: it takes seconds, which collecting the tests would cost every process.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dynaxla.observe.recorder import Recorder
from tests.lists import quick
from tests.tolerances import assert_close


@pytest.fixture(autouse=True)
def _ignore_profiling_signal() -> None:
    """Tests before may have asked JAX for its devices, which loads libtpu, whose timers send SIGPROF. The trainer gives signals
    the handlers that Python knows of: the default one of this signal ends the process, and libtpu's is none of Python's."""
    signal.signal(signal.SIGPROF, signal.SIG_IGN)


def _classifier() -> Any:
    import lightning

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Classifier()


def compiled_in_place(module: Any) -> None:
    module.compile(backend="dynaxla")


def network_compiled(module: Any) -> None:
    module.net = torch.compile(module.net, backend="dynaxla")


def _fit(compile_it: Callable[[Any], None]) -> Any:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = _classifier()
    compile_it(module)
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(22, 8), torch.randint(0, 3, (22,)))  # the last batch is smaller
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, batch_size=8))
    return module


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compile_it", quick([compiled_in_place, network_compiled], compiled_in_place))
def test_training(compile_it: Callable[[Any], None], recorder: Recorder) -> None:
    wanted = _fit(lambda module: None)
    with recorder.expect(
        compiles=4, eager_ops=0
    ):  # the first batch's size, then the last's bucket, forward and backward
        ours = _fit(compile_it)
    for one, other in zip(ours.parameters(), wanted.parameters(), strict=True):
        assert_close(one, other)
