"""Tensors over a mesh, op by op: where they are, what writes keep, and that numbers are those of one device."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dynaxla
from dynaxla.device.registration import device_in_use
from dynaxla.errors import OptionError, ShardingError, TargetError
from dynaxla.mesh import Mesh
from tests.tolerances import assert_close


def spec_of(tensor: Tensor) -> Any:
    found = dynaxla.sharding(tensor)
    return None if found is None else found.spec


def test_where_a_tensor_is(mesh: Mesh) -> None:
    host = torch.randn(16, 8)
    plain = host.to("dynaxla")
    assert dynaxla.sharding(plain) is None
    assert dynaxla.sharding(host) is None
    made = dynaxla.shard(host, mesh, ("data", None))
    assert made.shape == host.shape
    assert str(dynaxla.sharding(made)) == "('data', None) on data=2xmodel=4"
    assert torch.equal(made.cpu(), host)
    assert "dynaxla" in repr(made)
    assert dynaxla.shard(plain, mesh, (None, "model")) is plain
    assert spec_of(plain) == (None, "model")
    assert spec_of(plain.t()) == ("model", None)
    assert torch.equal(plain.cpu(), host)
    assert torch.equal(plain[3:5, 1].cpu(), host[3:5, 1])
    assert plain[3, 4].item() == host[3, 4].item()


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64],
)
def test_dtypes_and_layouts(mesh: Mesh, dtype: torch.dtype) -> None:
    host = torch.randint(0, 5, (4, 8, 2, 6)).to(dtype)
    for each in (host, host.to(memory_format=torch.channels_last), host.permute(2, 1, 0, 3)):
        spec = tuple("model" if size == 8 else None for size in each.shape)
        made = dynaxla.shard(each, mesh, spec)
        assert made.stride() == each.stride()
        assert spec_of(made) == spec
        assert torch.equal(made.cpu(), each)
        again = dynaxla.shard(each.to("dynaxla"), mesh, spec)
        assert spec_of(again) == spec
        assert torch.equal(again.cpu(), each)


def test_ops_give_the_numbers_of_one_device(mesh: Mesh) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(16, 8), torch.randn(8, 12), torch.randn(12)

    def run(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        y = F.gelu(x @ w + b)
        return [
            y,
            y.softmax(-1),
            y.sum(0),
            y.cumsum(0),
            y.sort(0).values,
            y[:, ::2],
            y[y > 0].sum(),
            y.argmax(1),
            y.T @ y,
        ]

    expected = run(x, w, b)
    on_mesh = run(dynaxla.shard(x, mesh, ("data",)), dynaxla.shard(w, mesh, (None, "model")), b.to("dynaxla"))
    for got, wanted in zip(on_mesh, expected, strict=True):
        assert_close(got.cpu(), wanted)
    assert spec_of(on_mesh[0]) == ("data", "model")


def test_divisions_are_exact(mesh: Mesh) -> None:
    x = torch.arange(512.0).reshape(16, 32)
    made = dynaxla.shard(x * 41, mesh, ("data", "model"))
    assert torch.equal(torch.floor(made / 41.0).cpu(), x)
    compiled = torch.compile(lambda x: torch.floor(x / 41.0), backend="dynaxla")
    assert torch.equal(compiled(made).cpu(), x)


def test_nan_and_infinity_come_through_reductions(mesh: Mesh) -> None:
    x = torch.randn(256, 256)
    x[3, 5], x[100, 7], x[200, 9] = torch.nan, torch.inf, -torch.inf
    made = dynaxla.shard(x, mesh, ("data", "model"))
    for reduce in (Tensor.amax, Tensor.amin, Tensor.sum, Tensor.mean):
        for dim in (0, 1, (0, 1)):
            assert_close(reduce(made, dim).cpu(), reduce(x, dim))


@pytest.mark.parametrize("mode", ["eager", "fused"])
def test_writes_keep_the_sharding(mesh: Mesh, mode: str) -> None:
    with dynaxla.device_mode(mode):
        check_writes(mesh)


def check_writes(mesh: Mesh) -> None:
    host = torch.randn(16, 8)
    x = dynaxla.shard(host, mesh, ("data", "model"))
    spec = ("data", "model")
    view = x[2:4]
    x.mul_(2)
    x.add_(torch.ones(8).to("dynaxla"))
    assert spec_of(x) == spec
    assert torch.equal(view.cpu(), (host * 2 + 1)[2:4])
    view.fill_(3)
    assert spec_of(x) == spec
    assert x.cpu()[2:4].eq(3).all()
    for write in (
        lambda: x.zero_(),
        lambda: x.copy_(host),
        lambda: x.copy_(host.to("dynaxla")),
        lambda: x.copy_(dynaxla.shard(host, mesh, (None, "data"))),
        lambda: x.uniform_(),
        lambda: torch.add(x, 1, out=x),
        lambda: x.index_fill_(0, torch.tensor([1]).to("dynaxla"), 2.0),
    ):
        write()
        assert spec_of(x) == spec, write
    x.copy_(host)
    clone = x.clone()
    x.add_(1)
    assert torch.equal(clone.cpu(), host)
    assert torch.equal(x.cpu(), host + 1)


def test_a_program_moves_what_is_sharded(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices that have memories of their own: nothing is read or written by the host, and programs are kept."""
    client = device_in_use().client
    devices, compile_here, compiled = client.mesh_devices, client.compile, [0]
    x = torch.randn(16, 8, 2)
    made = dynaxla.shard(x, mesh, ("data", "model"))
    turned = dynaxla.shard(x.permute(2, 0, 1), mesh, (None, "data", "model"))
    specs: tuple[Any, ...] = (("model", "data"), (), (("model", "data"),), (None, None, "data"))
    with monkeypatch.context() as patch:
        patch.setattr(devices, "moves_by_program", True)
        for name in ("read", "put"):
            patch.setattr(devices, name, lambda *_: pytest.fail("through the host"))
        patch.setattr(client, "compile", lambda *given: (compiled.append(1), compile_here(*given))[1])
        for compiles in (4, 1, 0):  # the second time from the last spec to the first
            before = sum(compiled)
            for spec in specs:
                dynaxla.shard(made, mesh, spec)
                assert spec_of(made) == (*spec, None, None, None)[:3]
            assert sum(compiled) - before == compiles
        dynaxla.shard(turned, mesh, ("data", "model"))
    assert torch.equal(made.cpu(), x)
    assert spec_of(turned) == ("data", "model", None)
    assert torch.equal(turned.cpu(), x.permute(2, 0, 1))


def test_what_is_made_like_a_tensor_is_where_it_is(mesh: Mesh) -> None:
    x = dynaxla.shard(torch.randn(16, 8), mesh, ("data", "model"))
    for make in (torch.zeros_like, torch.ones_like, torch.empty_like, torch.randn_like, torch.rand_like):
        assert spec_of(make(x)) == ("data", "model"), make
    assert torch.full_like(x, 3).cpu().eq(3).all()
    assert torch.zeros_like(x).cpu().eq(0).all()


def test_random_numbers_are_those_of_one_device(mesh: Mesh) -> None:
    x = torch.ones(16, 8)

    def draw(x: Tensor) -> list[Tensor]:
        torch.manual_seed(5)
        return [F.dropout(x, 0.5), torch.rand_like(x), x.clone().normal_(), torch.bernoulli(x * 0.5)]

    compiled = torch.compile(draw, backend="dynaxla")
    one = draw(x.to("dynaxla"))
    alike = [dynaxla.shard(x, mesh, spec) for spec in ((), ("data",), ("data", "model"), (None, ("model", "data")))]
    for made in alike:
        for got, expected in zip(draw(made), one, strict=True):
            assert torch.equal(got.cpu(), expected.cpu())
    compiled_one = F.dropout(x.to("dynaxla"), 0.5)  # advances the generator, which the next line sets
    drop = torch.compile(lambda x: F.dropout(x, 0.5), backend="dynaxla")
    results = []
    for made in (x.to("dynaxla"), *alike):
        torch.manual_seed(5)
        results.append(drop(made).cpu())
    assert all(torch.equal(each, results[0]) for each in results)
    assert compiled_one.shape == x.shape
    assert compiled is not None


def test_what_is_not_on_the_mesh_is_replicated_once(mesh: Mesh) -> None:
    x = dynaxla.shard(torch.randn(16, 8), mesh, ("data",))
    bias = torch.randn(8).to("dynaxla")
    assert spec_of(bias) is None
    x + bias
    assert spec_of(bias) == (None,), "the tensor holds the replicated buffer from then on"
    view = bias[:4]
    assert torch.equal(view.cpu(), bias.cpu()[:4])


def test_saving_and_loading(mesh: Mesh) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    expected = copy.deepcopy(model.state_dict())
    dynaxla.shard(model, mesh, {"*.weight": ("model",)})
    kept = io.BytesIO()
    torch.save(model.state_dict(), kept)
    kept.seek(0)
    loaded = torch.load(kept, map_location="cpu")
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    nn.init.zeros_(model[0].weight)
    model.load_state_dict(loaded)
    assert spec_of(model[0].weight) == ("model", None)
    assert torch.equal(model[0].weight.detach().cpu(), expected["0.weight"])
    again = copy.deepcopy(model)
    assert spec_of(again[0].weight) == ("model", None)
    assert all(torch.equal(value.cpu(), expected[name]) for name, value in again.state_dict().items())


def test_the_host_computes_what_the_device_does_not(mesh: Mesh) -> None:
    x = torch.randn(8, 8)
    made = dynaxla.shard(x, mesh, ("data", "model"))
    assert_close(torch.linalg.eigvals(made).cpu().abs().sort().values, torch.linalg.eigvals(x).abs().sort().values)
    assert torch.histc(made, 4).cpu().equal(torch.histc(x, 4))


def test_collected_ops(mesh: Mesh) -> None:
    x = torch.randn(16, 8)
    made = dynaxla.shard(x, mesh, ("data", "model"))
    with dynaxla.device_mode("fused"):
        y = (made * 2 + 1).relu().sum(1)
        made.add_(1)
        assert_close(y.cpu(), (x * 2 + 1).relu().sum(1))
    assert_close(made.cpu(), x + 1)
    assert spec_of(made) == ("data", "model")


def test_collected_writes_of_another_sharding(mesh: Mesh) -> None:
    """XLA would have the result as the operand is."""
    x, other = torch.randn(16, 8), torch.randn(16, 8)
    made, there = dynaxla.shard(x, mesh, (None, "model")), dynaxla.shard(other, mesh, ("data",))
    with dynaxla.device_mode("fused"):
        made.copy_(there).mul_(2)
        assert spec_of(made) == (None, "model"), "as it will be"
        assert_close(made.cpu(), other * 2)
        assert spec_of(made) == (None, "model")


@pytest.mark.parametrize(
    ("shape", "spec", "match"),
    [
        ((6, 8), (None, "modl"), "did you mean 'model'"),
        ((6, 8), ("model",), "do not divide"),
        ((8,), "data", "no spec"),
    ],
)
def test_what_does_not_fit_is_refused(mesh: Mesh, shape: tuple[int, ...], spec: Any, match: str) -> None:
    with pytest.raises(ShardingError, match=match):
        dynaxla.shard(torch.zeros(shape), mesh, spec)


def test_a_module_is_sharded_whole_or_not_at_all(mesh: Mesh) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 6))
    for plan, match in (
        ({"*.weight": ("model",)}, "dim 0 of 1.weight has size 6"),
        ({"2.weight": ("model",)}, "'2.weight' matches no parameter"),
        ({"0": "colwize"}, "style 'colwize'"),
    ):
        with pytest.raises(ShardingError, match=match):
            dynaxla.shard(model, mesh, plan)
    fresh = nn.Linear(8, 16)
    optimizer = torch.optim.SGD(fresh.parameters(), 0.1)
    weight = fresh.weight
    dynaxla.shard(fresh, mesh, {r"we.*t": (("data", "model"), None)})
    assert fresh.weight is weight is optimizer.param_groups[0]["params"][0]
    assert spec_of(weight) == (("data", "model"), None)
    assert weight.requires_grad
    assert spec_of(fresh.bias) == (None,)


def test_a_part_of_a_tensor_is_not_sharded(mesh: Mesh) -> None:
    with pytest.raises(ShardingError, match="view of a part"):
        dynaxla.shard(torch.zeros(16, 8).to("dynaxla")[:8], mesh, ("data",))


def test_two_meshes_do_not_meet(mesh: Mesh) -> None:
    one = dynaxla.shard(torch.ones(8), mesh, ("data",))
    other = dynaxla.shard(torch.ones(8), dynaxla.make_mesh((8,), ("all",)), ("all",))
    with pytest.raises(ShardingError, match="two meshes meet"):
        one + other


def test_how_many_devices_there_are() -> None:
    with pytest.raises(ShardingError, match="has 16 devices, and there are 8"):
        dynaxla.make_mesh((16,), ("data",))
    with pytest.raises(OptionError, match="uses 8 devices, not 4"):
        dynaxla.use("cpu", devices=4)
    assert dynaxla.use("cpu", devices=8) == torch.device("dynaxla")
    assert TargetError is not None


def test_a_mesh_of_one_device() -> None:
    single = dynaxla.make_mesh((1,), ("data",))
    x = dynaxla.shard(torch.ones(3), single, ("data",))
    assert dynaxla.sharding(x) is None
    assert (x + 1).tolist() == [2, 2, 2]


def test_batches_are_split_over_the_mesh(mesh: Mesh) -> None:
    rows = [(torch.full((4,), float(i)), i) for i in range(16)]
    loader = dynaxla.DeviceLoader(DataLoader(rows, batch_size=8), mesh=mesh)  # type: ignore[arg-type]
    seen = []
    for x, label in loader:
        assert spec_of(x) == ("data", None)
        assert spec_of(label) == ("data",)
        seen.extend(label.tolist())
    assert seen == list(range(16))
    with pytest.raises(ShardingError, match="do not divide"):
        list(dynaxla.DeviceLoader(DataLoader(rows, batch_size=5), mesh=mesh))  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match="no axis 'date'"):
        dynaxla.DeviceLoader([], mesh=mesh, axis="date")
