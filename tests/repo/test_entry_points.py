"""How the package is found and what importing it costs."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import dynaxla
from dynaxla import bucket_policy

HEAVY = ("torch", "jax", "jaxlib", "torch_mlir", "numpy", "rich", "transformers")


def _run(script: str) -> Any:
    """What a fresh interpreter prints, as JSON."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def fresh_process() -> dict[str, Any]:
    """What a process sees that names the backend and imports nothing of it."""
    return _run(
        "import json, sys, torch\n"
        "listed = 'dynaxla' in torch._dynamo.list_backends()\n"
        "imported = [m for m in sys.modules if m.split('.')[0] in ('dynaxla', 'jax', 'torch_mlir')]\n"
        "y = torch.compile(lambda x: torch.tanh(x) * 2 + 1, backend='dynaxla')(torch.zeros(3))\n"
        "import dynaxla, jax\n"
        "from jax._src import xla_bridge\n"
        "found = dict(listed=listed, imported=imported, result=y.tolist(), compiles=dynaxla.read_metrics().compiles,\n"
        "    jax_backends=list(xla_bridge._backends), x64=jax.config.jax_enable_x64)\n"
        "print(json.dumps(found))"
    )


def test_the_backend_is_found_by_name_alone(fresh_process: dict[str, Any]) -> None:
    assert fresh_process["listed"]
    assert fresh_process["imported"] == []
    assert fresh_process["result"] == [1.0, 1.0, 1.0]
    assert fresh_process["compiles"] == 1


def test_the_users_jax_is_left_alone(fresh_process: dict[str, Any]) -> None:
    """Compiling starts none of JAX's own devices: one on a GPU would take most of its memory."""
    assert fresh_process["jax_backends"] == []
    assert fresh_process["x64"] is False


def test_the_entry_point_names_the_backend() -> None:
    points = metadata.entry_points(group="torch_dynamo_backends", name="dynaxla")
    assert {point.value for point in points} == {"dynaxla:dynaxla"}
    assert next(iter(points)).load() is dynaxla.dynaxla


@pytest.mark.parametrize("module", ["dynaxla", "dynaxla.errors", "dynaxla.options", "dynaxla.__main__"])
def test_importing_is_cheap(module: str) -> None:
    script = f"import {module}, json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    assert _run(script) == []


def test_the_lowering_worker_needs_no_torch_and_no_jax() -> None:
    script = (
        "import json, sys\nimport dynaxla.lowering.lowering_worker\nfrom dynaxla.lowering import torch_mlir_passes\n"
        "torch_mlir_passes.lower(b'func.func @main() {return}', '1.9.0')\n"
        "print(json.dumps([m for m in ('torch', 'jax') if m in sys.modules]))"
    )
    assert _run(script) == []


def test_every_public_name_is_there() -> None:
    for name in dynaxla.__all__:
        assert getattr(dynaxla, name) is not None
    assert set(dynaxla.__all__) <= set(dir(dynaxla))
    assert set(dynaxla._HOMES) | {"__version__", *bucket_policy.sizes.__all__} == set(dynaxla.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dynaxla.nothing


def test_one_version() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert dynaxla.__version__ == project["version"] == metadata.version("dynaxla")


def test_types_are_shipped() -> None:
    root = Path(dynaxla.__file__).parent
    assert (root / "py.typed").is_file()
    tool = tomllib.loads((root.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "py.typed" in tool["package-data"]["dynaxla"]
    packages = {p.parent.relative_to(root.parent).parts for p in root.rglob("*.py")}
    assert all((root.parent.joinpath(*parts) / "__init__.py").is_file() for parts in packages), "a package without init"
