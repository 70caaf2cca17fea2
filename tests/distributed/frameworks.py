"""What frameworks do in several processes: on the host and on the device the code differs in the device's name alone."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.models import whole


def _net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 3))


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(24, 8, generator=generator), torch.randn(24, 3, generator=generator))


def load_in_parts(device: str, folder: str) -> dict[str, Tensor]:
    """transformers: a Llama whose layers are split over the processes by its own plan; logits and a gradient."""
    import transformers
    from transformers.distributed import DistributedConfig

    arguments = {} if device == "cpu" else {"distributed_config": DistributedConfig(tp_size=dist.get_world_size())}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **arguments)
    tokens = torch.arange(12, device=device).reshape(2, 6)
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()
    weight = model.model.layers[0].mlp.up_proj.weight
    assert device == "cpu" or whole(weight).shape != weight.to_local().shape
    return {"logits": whole(output.logits).cpu().detach(), "gradient": whole(weight.grad).cpu()}


def train_by_accelerate(device: str, folder: str) -> dict[str, Tensor]:
    """accelerate, which is told of the device by a variable of its own: DistributedDataParallel and the loader's pieces."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_TORCH_DEVICE", device)
        accelerator = Accelerator(cpu=True)
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(_data(), batch_size=4))
    assert accelerator.num_processes == 2
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        assert loss.device.type == device
        accelerator.backward(loss)
        optimizer.step()
    return {name: whole(value).cpu() for name, value in accelerator.unwrap_model(net).state_dict().items()}


def train_by_lightning(device: str, folder: str) -> dict[str, Tensor]:
    """Lightning, by an accelerator that names the device."""
    import lightning
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            assert loss.device.type == device
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    class DeviceAccelerator(CPUAccelerator):
        def setup_device(self, device: torch.device) -> None:
            pass

        def teardown(self) -> None:
            pass

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            return [torch.device(device)] * int(devices)

    class DeviceStrategy(DDPStrategy):
        def determine_ddp_device_ids(self) -> None:
            return None

    variables = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update(variables)  # as torchrun sets them
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module = Module()
    trainer = lightning.Trainer(
        accelerator=DeviceAccelerator(), strategy=DeviceStrategy(process_group_backend="dynaxla"), devices=2, max_epochs=1,
        enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader(_data(), batch_size=4))
    assert trainer.world_size == 2
    return {name: value.detach().cpu() for name, value in module.net.state_dict().items()}
