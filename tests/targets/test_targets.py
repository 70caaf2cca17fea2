"""Targets by name: the families, plugins that JAX finds, plugins' files, and what is said where one is not here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from dynaxla import targets
from dynaxla.bucket_policy import DEFAULT, Default
from dynaxla.bucketing.joint_policy import JOINT, JOINT_UNKNOWN
from dynaxla.errors import TargetError
from dynaxla.targets.registry import compiler_for, connect, families, find_target, target_of_device
from dynaxla.targets.target import Target
from dynaxla.targets.tpu import JOINT_LANE_FRIENDLY, LANE_FRIENDLY

TOY = """
from dynaxla.runtime import xla

def initialize():
    from jax.extend.backend import register_backend_factory

    register_backend_factory("toy", lambda: xla.load().xla_client.make_cpu_client(asynchronous=False), priority=-2000)
"""


def _run(script: str, *search: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own: what JAX and libtpu load is there to stay."""
    start = f"import sys; sys.path[:0] = {[*map(str, search)]!r}; import os; os.environ.update({environ!r})\n"
    command = [sys.executable, "-c", start + textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def test_the_families_are_the_modules_that_have_one() -> None:
    modules = {path.stem for path in Path(targets.__path__[0]).glob("*.py") if "FAMILY =" in path.read_text()}
    assert set(families()) == modules
    assert modules >= {"cpu", "cuda", "tpu"}
    for family in families().values():
        for example in family.examples:
            assert find_target(example).name.startswith(family.name)


@pytest.mark.parametrize(
    ("name", "live", "memory"),
    [
        ("cpu", True, None),
        ("cpu:0", True, None),
        ("cuda", True, None),
        ("cuda:1", True, None),
        ("tpu", True, None),
        ("tpu:1", True, None),
        ("tpu:v5e:2x2", False, 16 << 30),
        ("tpu:v5p:2x2x1", False, 95 << 30),
        ("rocm", True, None),
        ("metal:2", True, None),
        ("/opt/plugin.so", True, None),
    ],
)
def test_a_target_is_found_by_its_name_without_a_device(name: str, live: bool, memory: int | None) -> None:
    target = find_target(name)
    assert (target.client is not None) is live
    assert (target.compiler is None) is (live and target.name != "cpu")
    assert (target.chip and target.chip.hbm_bytes) == memory
    assert target == find_target(name)


def test_facts_of_the_targets() -> None:
    cpu, tpu, rocm = find_target("cpu"), find_target("tpu:v5e:1x1"), find_target("rocm")
    assert (cpu.channels_last, cpu.copies_transposed) == (True, True)
    assert (tpu.channels_last, tpu.copies_transposed) == (False, False)
    assert rocm == Target("rocm", client=rocm.client)
    for all_vary, joint in ((False, JOINT), (True, JOINT_UNKNOWN)):
        assert (cpu.policies(all_vary).single, cpu.policies(all_vary).joint) == (DEFAULT, joint)
        assert (tpu.policies(all_vary).single, tpu.policies(all_vary).joint) == (LANE_FRIENDLY, JOINT_LANE_FRIENDLY)


def test_a_module_makes_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The documentation's own example."""
    text = (Path(__file__).parents[2] / "docs" / "targets.md").read_text()
    (tmp_path / "npu.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    monkeypatch.setattr(targets, "__path__", [*targets.__path__, str(tmp_path)])
    before = set(families())
    try:
        families.cache_clear()
        find_target.cache_clear()
        assert set(families()) == {*before, "npu"}
        assert find_target("npu:1").policy == Default(multiple_of=64)
        with pytest.raises(TargetError, match="JAX has no npu devices here"):
            connect(find_target("npu"))
    finally:
        sys.modules.pop("dynaxla.targets.npu", None)
        monkeypatch.undo()
        families.cache_clear()
        find_target.cache_clear()


def test_torchs_devices_have_targets() -> None:
    assert target_of_device(torch.device("cpu")) is find_target("cpu")
    assert target_of_device(torch.device("cuda", 1)).name == "cuda:1"
    with pytest.raises(TargetError, match="tensors on xpu"):
        target_of_device(torch.device("xpu"))


@pytest.mark.parametrize("name", ["", "cpu:x", "cuda:first", "tpu:v9:1x1"])
def test_no_such_target(name: str) -> None:
    with pytest.raises(TargetError) as caught:
        find_target(name)
    assert repr(name) in caught.value.explanation
    assert caught.value.hint


def test_a_topology_is_no_device_and_a_device_no_topology() -> None:
    with pytest.raises(TargetError, match=r"'tpu:v5e:1x1' is only to compile for"):
        connect(find_target("tpu:v5e:1x1"))
    with pytest.raises(TargetError, match="'cuda' cannot be compiled for without its device"):
        compiler_for("cuda")


def test_files_that_are_no_plugins(tmp_path: Path) -> None:
    """In this process, which goes on."""
    text = tmp_path / "text.so"
    text.write_text("no library")
    library = importlib.util.find_spec("_ctypes")
    assert library is not None
    expected = {str(tmp_path / "none.so"): "No such file", str(text): "too short", str(library.origin): "GetPjrtApi"}
    for path, said in expected.items():
        with pytest.raises(TargetError) as caught:
            connect(find_target(path))
        assert path in caught.value.explanation
        assert said in caught.value.explanation
        assert "GetPjrtApi" in caught.value.hint
    with pytest.raises(TargetError, match="gives no PJRT client"):
        torch.compile(lambda x: x + 1, backend="dynaxla", options={"target": str(text)})(torch.ones(3))


@pytest.mark.tpu
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_real_plugins_file_without_its_device() -> None:
    done = _run(
        """
        import os, libtpu
        from dynaxla.errors import TargetError
        from dynaxla.targets.registry import connect, find_target
        for _ in range(2):  # the second time it is loaded already
            try:
                connect(find_target(os.path.join(os.path.dirname(libtpu.__file__), "libtpu.so")))
            except TargetError as error:
                print(error.explanation)
        """,
        TPU_SKIP_MDS_QUERY="1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gives no PJRT client") == 2, done.stdout + done.stderr


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a process says in which JAX finds a plugin: the CPU in the guise of one, for a platform that nobody knows."""
    root = tmp_path_factory.mktemp("plugins")
    (root / "jax_plugins" / "toy").mkdir(parents=True)
    (root / "jax_plugins" / "toy" / "__init__.py").write_text(TOY)
    done = _run(
        """
        import torch
        from dynaxla.errors import TargetError

        def compiled(function, name, **how):
            return torch.compile(function, backend="dynaxla", options={"target": name, "fallback": "error"}, **how)

        net = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Flatten(1), torch.nn.Linear(16, 5))
        on_toy = compiled(net, "toy", dynamic=True)
        for n in (3, 5, 6):
            x = torch.randn(n, 2, 4, 4)
            torch.testing.assert_close(on_toy(x), net(x))
        with torch.no_grad():
            net[2].weight.mul_(2)
        torch.testing.assert_close(on_toy(x), net(x))
        on_toy(x).sum().backward()
        x = torch.ones(3)
        y = compiled(lambda x: x.long() * 2**40, "toy:0")(x)
        x.fill_(7)
        assert torch.equal(y, torch.full((3,), 2**40)), y
        for name in ("toy:1", "rocn", "a_plugin_nobody_has"):
            try:
                compiled(lambda x: x + 1, name)(x)
            except TargetError as error:
                print(error.explanation, error.hint)
        """,
        root,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_plugin_that_jax_finds_is_a_target(plugins: str) -> None:
    """All data crosses by copies, 64-bit numbers as they are."""
    assert plugins.startswith("there is no toy:1 devices here: 1\n")


def test_a_plugin_that_is_not_here_is_named_with_the_nearest(plugins: str) -> None:
    _, near, far = plugins.splitlines()
    assert near.startswith("JAX has no rocn devices here")
    assert "did you mean 'rocm'?" in near
    assert "did you mean" not in far
    assert "jax_plugins" in far
