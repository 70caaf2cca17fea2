"""Compiling for several devices that are not here: how tensors are sharded, what programs send, packages of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dynaxla
from dynaxla import Mesh, compile_for_target
from dynaxla.__main__ import main
from dynaxla.errors import NotComputedError, OptionError, ShardingError
from dynaxla.observe.collectives import Collective, count_sent_bytes
from dynaxla.precompile.mesh_plan import name_tensors, parse_mesh, parse_rules
from dynaxla.precompile.program_report import ProgramReport
from tests.precompile.test_compile_for_target import needs_libtpu

MESH = Mesh((2, 2), ("data", "model"))
RULES = "up=colwise; down=rowwise; x=data"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 128)
        self.down = torch.nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) + x


def net() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    with torch.device("meta"):
        return Net(), (torch.ones(8, 64),)


def of_kind(reports: list[ProgramReport], kind: str) -> ProgramReport:
    (report,) = (report for report in reports if report.kind == kind)
    return report


def test_a_model_parallel_program_sends_its_partial_sums() -> None:
    model, args = net()
    with torch.no_grad():
        whole = of_kind(compile_for_target(model, args, target="cpu"), "program")
        report = of_kind(compile_for_target(model, args, target="cpu", mesh=MESH, shard=RULES), "program")
    (collective,) = report.collectives
    assert (collective.kind, collective.shape) == ("all-reduce", "f32[4,64]")
    assert report.devices == 4
    assert report.sent_bytes == 2 * (1 / 2) * 4 * 64 * 4
    halves = 2 * 64 * 128 + 128  # the weights and one bias are split over two devices, and so is x
    assert report.memory.arguments_bytes == 4 * (halves // 2 + 64 + 4 * 64)
    assert whole.memory.arguments_bytes == 4 * (halves + 64 + 8 * 64)
    assert whole.collectives == ()
    assert report.key != whole.key


def test_specs_and_styles_and_texts_say_the_same() -> None:
    model, args = net()
    specs = {"up.weight": ("model",), "up.bias": ("model",), "down.weight": (None, "model"), "0": ("data",)}
    text = "up.weight=model,-\nup.bias=model  # the first rule that matches\n*.weight=-,model\nx=data"
    found = {
        of_kind(compile_for_target(model, args, target="cpu", mesh=mesh, shard=rules), "program").key
        for mesh, rules in ((MESH, specs), (MESH, RULES), ("data=2,model=2", text))
    }
    assert len(found) == 1


def test_a_backward_reads_activations_as_the_forward_left_them() -> None:
    """They stay split: the only thing that is sent is the sum of the weights' gradients over the batch."""
    model, args = net()
    reports = compile_for_target(model, args, target="cpu", mesh=MESH, shard=RULES, train=True)
    assert [each.kind for each in of_kind(reports, "program").collectives] == ["all-reduce"]
    backward = of_kind(reports, "backward")
    assert {each.kind for each in backward.collectives} == {"all-reduce"}
    gradients = 4 * ((64 * 128 + 128 + 128 * 64) // 2)
    assert sum(each.nbytes for each in backward.collectives) == gradients


def test_every_bucket_is_partitioned() -> None:
    model, args = net()
    reports = compile_for_target(model, args, target="cpu", mesh=MESH, shard=RULES, buckets=["x:0=8,16"])
    assert [(report.sizes, report.collectives[0].shape) for report in reports] == [
        ({"x:0": 16}, "f32[8,64]"),
        ({"x:0": 8}, "f32[4,64]"),
    ]
    with pytest.raises(ShardingError, match="do not divide"):
        compile_for_target(model, args, target="cpu", mesh=MESH, shard=RULES, buckets=["x:0=7,8"])


def test_fully_sharded_parameters_are_gathered_for_use() -> None:
    """Each is split along its largest dim that the axis divides, besides what rules split over another axis."""
    model, args = net()
    with torch.no_grad():
        report = of_kind(
            compile_for_target(model, args, target="cpu", mesh="data=4", shard="fully_shard=data; x=data"), "program"
        )
        both = compile_for_target(model, args, target="cpu", mesh=MESH, shard=f"fully_shard=data; {RULES}")
    assert report.memory.arguments_bytes == 4 * (2 * 64 * 128 + 128 + 64 + 8 * 64) // 4
    assert {each.kind for each in report.collectives} == {"all-gather"}
    assert sum(each.nbytes for each in report.collectives) == 4 * (2 * 64 * 128 + 128 + 64)
    assert of_kind(both, "program").memory.arguments_bytes == 4 * ((2 * 64 * 128 + 128) // 4 + 64 // 2 + 4 * 64)


class Cache:
    def __init__(self, device: str = "cpu") -> None:
        self.layers = [torch.zeros(2, 4, 8, device=device)]


def test_tensors_within_an_object_have_names() -> None:
    cache = Cache()
    named = dict(name_tensors({"x": torch.ones(1), "cache": cache, "pair": (1, torch.ones(2))}))
    assert list(named) == ["x", "cache.layers.0", "pair.1"]
    assert named["cache.layers.0"] is cache.layers[0]

    def write(x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.layers[0].add_(x)
        return cache.layers[0] * 2

    report = of_kind(
        compile_for_target(write, (torch.ones(2, 4, 8), cache), target="cpu", mesh="model=4", shard="*=-,model"),
        "program",
    )
    assert report.memory.arguments_bytes == 2 * (2 * 4 * 8) * 4 // 4
    assert report.collectives == ()
    assert not cache.layers[0].any()


@pytest.mark.parametrize(
    ("mesh", "shard", "error", "told"),
    [
        (None, RULES, OptionError, "rules of a sharding, and no mesh"),
        ("data", "", OptionError, "is not of the form AXIS=SIZE"),
        ("data=2,data=2", "", ShardingError, "axes named"),
        ("data=2", "up=", OptionError, "is no rule of a sharding"),
        ("data=2", "nowhere.txt", OptionError, "no file"),
        ("data=2", "tp_plan", OptionError, "has no plan of its own"),
        (
            "data=2",
            "middle.weight=data",
            ShardingError,
            "'middle.weight' matches no parameter, no module and no argument",
        ),
        ("data=2", "up.weight=-,data,-", ShardingError, "3 dims"),
        ("data=2", "up.weight=model,-", ShardingError, "no axis 'model'"),
        ("data=2", "up=sideways", ShardingError, "'sideways' is not known"),
        ("data=3", "x=data", ShardingError, "3 devices"),
        ("data=2", "fully_shard=model", OptionError, "names no axis of the mesh"),
    ],
)
def test_what_fits_no_mesh_is_told(mesh: str | None, shard: str, error: type[Exception], told: str) -> None:
    model, args = net()
    with pytest.raises(error, match=told):
        compile_for_target(model, args, target="cpu", mesh=mesh, shard=shard)


def test_values_are_not_computed_on_a_mesh_either() -> None:
    with pytest.raises(NotComputedError):
        compile_for_target(lambda x: x.sum().item(), (torch.ones(4),), target="cpu", mesh="data=2", shard="x=data")


def test_rules_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rules"
    path.write_text("# of the net\nup=colwise\n\nx=data+model,-\n")
    model, _ = net()
    assert parse_rules(str(path), MESH, model) == {"up": "colwise", "x": (("data", "model"), None)}
    assert parse_mesh("data=2, model=2") == MESH


@pytest.mark.parametrize(
    ("kind", "group", "sent"),
    [
        ("all-reduce", 4, 1.5),
        ("all-gather", 4, 0.75),
        ("reduce-scatter", 4, 3),
        ("all-to-all", 2, 0.5),
        ("collective-permute", 2, 1),
    ],
)
def test_bytes_that_a_ring_sends(kind: str, group: int, sent: float) -> None:
    collective = Collective(kind, "f32[250]", 1000, (tuple(range(group)),))
    assert count_sent_bytes(collective, 8) == sent * 1000


@needs_libtpu
def test_a_package_for_four_chips(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "package"
    arguments = ["--target", "tpu:v5e:2x2", "--mesh", "data=2,model=2", "--shard", RULES, "--train"]
    assert main(["compile", f"{__name__}:net", *arguments, "--json", "--out", str(package)]) == 0
    told = json.loads(capsys.readouterr().out)
    manifest = json.loads((package / "manifest.json").read_text())
    assert {name: manifest[name] for name in ("mesh", "shardings")} == {
        "mesh": {"data": 2, "model": 2},
        "shardings": {
            "up.weight": ["model", None], "up.bias": ["model"], "down.weight": [None, "model"], "x": ["data", None],
        },
    }  # fmt: skip
    forward, backward = told["programs"]
    assert [(each["kind"], each["devices"]) for each in forward["collectives"]] == [("all-reduce", 2)]
    for program in (forward, backward):
        assert program["devices"] == 4
        assert program["sent_bytes"] > 0
        assert program["communication_s"] == program["sent_bytes"] / 200e9
    assert main(["compile", f"{__name__}:net", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "program 0 on 4 devices sends" in printed
    assert "1 x all-reduce f32[4,64], 1024 bytes among 2" in printed


@needs_libtpu
def test_a_topology_is_too_small() -> None:
    model, args = net()
    with pytest.raises(ShardingError, match="4 devices, and the topology 1"):
        compile_for_target(model, args, target="tpu:v5e:1x1", mesh=MESH, shard=RULES)


def net_on_devices() -> tuple[torch.nn.Module, tuple[torch.Tensor]]:
    dynaxla.use("cpu", devices=4)
    with torch.device("meta"):
        return Net(), (torch.ones(8, 64, device="dynaxla"),)


ON_DEVICES = """
import json, sys, torch, dynaxla
from dynaxla.__main__ import main
from tests.precompile.test_compile_for_mesh import MESH, RULES, Net
dynaxla.use("cpu", devices=4)
torch.manual_seed(0)
x = torch.randn(8, 64)
plan = {"up": "colwise", "down": "rowwise"}
train, fully = sys.argv[3] == "train", sys.argv[4] == "fully"
rules = "fully_shard=data; x=data" if fully else RULES
if sys.argv[1] == "compile":
    factory = "tests.precompile.test_compile_for_mesh:net_on_devices"
    given = ["--target=cpu", "--mesh=data=2,model=2", "--shard", rules, "--out", sys.argv[2]]
    assert main(["compile", factory, *given, *["--train"] * train]) == 0
else:
    net = Net()
    with torch.set_grad_enabled(train):
        expected = net(x)
        wanted = torch.autograd.grad(expected.sum(), list(net.parameters())) if train else []
        mesh = dynaxla.make_mesh(MESH.shape, MESH.axes)
        dynaxla.fully_shard(net, mesh, "data") if fully else dynaxla.shard(net, mesh, plan)
        given = dynaxla.shard(x, mesh, ("data",))
        result = torch.compile(net, backend="dynaxla")(given)
        found = torch.autograd.grad(result.sum(), list(net.parameters())) if train else []
        pairs = zip([result, *found], [expected, *wanted], strict=True)
        wrong = max((mine.cpu() - other).abs().max().item() for mine, other in pairs)
    read = dynaxla.read_metrics()
    print(json.dumps([read.compiles, read.loads, wrong]))
"""


@pytest.mark.long
@pytest.mark.parametrize("way", ["plan", "fully"])
@pytest.mark.parametrize("train", [False, True])
def test_a_live_mesh_finds_what_was_compiled_for_it(train: bool, way: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    kind = "train" if train else "infer"
    for step, cached in (("compile", str(tmp_path / "a")), ("run", f"{tmp_path / 'b'}:{package}")):
        environ = {**os.environ, "DYNAXLA_CACHE_DIR": cached}  # not the user's, where other processes keep programs
        done = subprocess.run(
            [sys.executable, "-c", ON_DEVICES, step, str(package), kind, way],
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
    compiles, loads, wrong = json.loads(done.stdout.splitlines()[-1])
    assert loads == 1 + train
    assert compiles == 0 or train  # the sum and its gradient run op by op
    assert wrong < 1e-5


def test_arguments_that_do_not_lie_row_major_are_split_where_the_rule_says() -> None:
    """A transposed one, one that is repeated by a stride of 0, and an image in channels-last, for folded weights."""

    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + y

    turned, repeated = torch.ones(4, 8).t(), torch.ones(1, 4).expand(8, 4)
    report = of_kind(
        compile_for_target(model, (turned, repeated), target="cpu", mesh="data=4", shard="*=data"), "program"
    )
    assert report.memory.arguments_bytes == 2 * 8 * 4 * 4 // 4
    assert report.collectives == ()

    net = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, padding=1), torch.nn.BatchNorm2d(8)).eval()
    image = torch.ones(8, 4, 6, 6).to(memory_format=torch.channels_last)
    with torch.no_grad():
        reports = compile_for_target(net, (image,), target="cpu", mesh="data=4", shard="input=data; 0.weight=data")
    assert [report.kind for report in reports] == ["weights", "program"]
    assert reports[0].memory.arguments_bytes < sum(each.nbytes for each in net.state_dict().values())
    assert reports[1].collectives == ()


@pytest.mark.parametrize(
    ("arguments", "told"), [(["--mesh=data"], "AXIS=SIZE"), (["--mesh=data=3", "--shard=x=data"], "3 devices")]
)
def test_bad_usage(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compile", f"{__name__}:net", "--target=cpu", *arguments])
    assert caught.value.code == 2
    assert told in " ".join(capsys.readouterr().err.split())
