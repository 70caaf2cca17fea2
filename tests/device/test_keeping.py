"""Tensors of the device are copied, pickled, saved and loaded as those of other devices."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn


def _saved(thing: object, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, **options)


def test_deepcopy_keeps_what_is_shared() -> None:
    base = torch.arange(6.0, device="dynaxla")
    views, parameter = [base, base[2:4]], nn.Parameter(torch.ones(2, device="dynaxla"))
    copies, copied = copy.deepcopy((views, parameter))
    copies[1].fill_(9)
    assert copies[0].tolist() == [0, 1, 9, 9, 4, 5]
    assert base.tolist() == [0, 1, 2, 3, 4, 5]
    assert isinstance(copied, nn.Parameter)
    assert copied.requires_grad


def test_pickles() -> None:
    x = torch.randn(3, 4, device="dynaxla").t()
    loaded = pickle.loads(pickle.dumps(x))
    assert loaded.device == x.device
    assert torch.equal(loaded.cpu(), x.cpu())


def test_saves_and_loads() -> None:
    x = torch.randn(4, 5, device="dynaxla")
    here, there = _saved([x, x[1:3], x.bfloat16()], map_location="cpu"), _saved([x, x[1:3], x.bfloat16()])
    for loaded, device in ((here, "cpu"), (there, "dynaxla")):
        assert [each.device.type for each in loaded] == [device] * 3
        loaded[1].zero_()
        assert loaded[0][1:3].abs().sum().item() == 0
        assert torch.equal(loaded[0][0].cpu(), x[0].cpu())
        assert torch.equal(loaded[2].cpu(), x.bfloat16().cpu())
    moved = _saved(torch.ones(3), map_location="dynaxla")
    assert moved.device.type == "dynaxla"
    assert (moved * 2).tolist() == [2, 2, 2]


def test_modules_and_their_states() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    there = copy.deepcopy(model).to("dynaxla")
    assert {p.device.type for p in (*there.parameters(), *there.buffers())} == {"dynaxla"}
    model.load_state_dict(there.state_dict())
    there.load_state_dict(_saved(model.state_dict()))
    loaded = _saved(there, weights_only=False)
    x = torch.randn(2, 3)
    assert torch.equal(loaded.eval()(x.to("dynaxla")).cpu(), there.eval()(x.to("dynaxla")).cpu())
    assert {p.device.type for p in there.cpu().parameters()} == {"cpu"}
    assert nn.Linear(2, 2, device="dynaxla").weight.device.type == "dynaxla"


def test_parameters_stay_what_they_are() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    weight = model[0].weight
    model.to("dynaxla")
    assert model[0].weight is model[1].weight is weight
    model(torch.ones(1, 3, device="dynaxla")).sum().backward()
    before = weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[1].weight.cpu(), before.cpu())
    assert model.cpu()[1].weight.device.type == "cpu"


def test_optimizers_states() -> None:
    model = nn.Linear(3, 2).to("dynaxla")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3, device="dynaxla")).sum().backward()
    optimizer.step()
    again = torch.optim.Adam(model.parameters())
    again.load_state_dict(_saved(optimizer.state_dict()))
    assert again.state[model.weight]["exp_avg"].device.type == "dynaxla"
    again.step()


def test_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file, load_model, save_file

    state = {name: tensor.contiguous() for name, tensor in nn.Linear(3, 2).to("dynaxla").state_dict().items()}
    save_file(state, tmp_path / "weights.safetensors")
    loaded = load_file(tmp_path / "weights.safetensors")
    for name, tensor in state.items():
        assert torch.equal(loaded[name].to("dynaxla").cpu(), tensor.cpu())
    model = nn.Linear(3, 2).to("dynaxla")
    load_model(model, tmp_path / "weights.safetensors")
    assert torch.equal(model.weight.cpu(), state["weight"].cpu())


def test_batches_of_a_loader() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10.0), torch.arange(10))
    for pin_memory in (False, True):
        loader = torch.utils.data.DataLoader(data, 4, pin_memory=pin_memory)
        found = [(x.to("dynaxla", non_blocking=True) * 2).tolist() for x, _ in loader]
        assert found == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]
