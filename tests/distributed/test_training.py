"""DDP, FSDP2, tensor and sequence parallel layers and DTensor on the device train as on the host by gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

import dynaxla
from tests.distributed.children import run_ranks
from tests.distributed.models import (
    WAYS,
    build,
    mesh_of,
    step_fused,
    train,
    train_branches,
    use_fsdp,
    use_tensors,
    whole,
)
from tests.tolerances import assert_close


def assert_same(mine: Any, theirs: Any, what: str, dtype: torch.dtype = torch.float32) -> None:
    if isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), what
        for name, value in mine.items():
            assert_same(value, theirs[name], f"{what} {name}", dtype)
    elif isinstance(mine, Tensor):
        assert_close(mine.to(dtype), theirs.to(dtype))
    else:
        assert_close(torch.tensor(mine, dtype=dtype), torch.tensor(theirs, dtype=dtype))


def check_training(rank: int) -> None:
    for way in WAYS:
        theirs = train(way, "cpu")
        before = dynaxla.read_metrics().host_ops
        mine = train(way, "dynaxla")
        assert dynaxla.read_metrics().host_ops == before, (way, dynaxla.read_metrics().host_ops)
        assert_same(mine, theirs, way, torch.bfloat16 if way.endswith("bfloat16") else torch.float32)
    assert_same(use_tensors("dynaxla"), use_tensors("cpu"), "DTensor")
    assert_same(step_fused("dynaxla"), step_fused("cpu"), "fused")
    for option in ("find_unused_parameters", "static_graph"):
        mine, theirs = (train_branches(device, **{option: True}) for device in ("dynaxla", "cpu"))
        assert_same(mine, theirs, option)


def test_training_is_gloos() -> None:
    run_ranks(check_training)


def check_checkpoint(rank: int, folder: str) -> None:
    net = use_fsdp(build("dynaxla"), mesh_of("dynaxla"))
    moved = use_fsdp(build("cpu"), mesh_of("dynaxla"))
    for one, two in zip(net.parameters(), moved.parameters(), strict=True):
        assert two.device.type == "dynaxla"
        assert torch.equal(whole(one), whole(two)), "fully_shard of a module on the host"
    state = get_model_state_dict(net)
    dcp.save(state, checkpoint_id=folder)
    other = use_fsdp(build("dynaxla"), mesh_of("dynaxla"))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    loaded = get_model_state_dict(other)
    dcp.load(loaded, checkpoint_id=folder)
    set_model_state_dict(other, loaded)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(one), whole(two))
    host = {name: torch.zeros_like(value) for name, value in build("cpu").state_dict().items()}
    dcp.load(host, checkpoint_id=folder)
    if rank == 0:
        for name, value in build("cpu").state_dict().items():
            assert torch.equal(value, host[name])
    dist.barrier()


def test_a_checkpoint_comes_back(tmp_path: Path) -> None:
    run_ranks(check_checkpoint, str(tmp_path))
