"""Which versions of the libraries underneath are accepted."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from dynaxla.errors import VersionError
from dynaxla.versions import SUPPORTED, check_versions, installed_versions

GOOD = {"python": "3.12.1", "torch": "2.13.0", "jax": "0.10.0", "jaxlib": "0.11.3", "torch-mlir": "20261001"}


def test_what_is_installed_here_is_supported() -> None:
    assert set(installed_versions()) == set(SUPPORTED)
    check_versions()


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torch", "2.13.0+cpu"),
        ("torch", "2.13.1.post2"),
        ("torch", "2.13.1a0+git123"),
        ("jaxlib", "0.11.0.dev20260101"),
    ],
)
def test_local_parts_and_builds_from_a_checkout_do_not_matter(name: str, version: str) -> None:
    check_versions(GOOD | {name: version})


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("python", "3.10.9"),
        ("python", "3.14.0"),
        ("torch", "2.12.1"),
        ("torch", "2.14.0"),
        ("torch", "2.14.0rc1"),
        ("jax", "0.9.9"),
        ("jaxlib", "0.12.0"),
        ("torch-mlir", "20250101"),
        ("torch", "unknown"),
    ],
)
def test_out_of_range_names_package_version_and_range(name: str, version: str) -> None:
    with pytest.raises(VersionError) as caught:
        check_versions(GOOD | {name: version})
    error = caught.value
    assert isinstance(error, ImportError)
    assert error.explanation == f"{name} {version} is installed; dynaxla supports {name}{SUPPORTED[name]}"
    assert error.hint == ("use a supported Python" if name == "python" else f"pip install '{name}{SUPPORTED[name]}'")


def test_every_wrong_library_is_named_at_once() -> None:
    installed = {name: version for name, version in GOOD.items() if name != "jax"} | {"torch": "1.13.0"}
    with pytest.raises(VersionError) as caught:
        check_versions(installed)
    assert "torch 1.13.0 is installed" in str(caught.value)
    assert "jax is not installed" in str(caught.value)
    assert caught.value.hint == f"pip install 'torch{SUPPORTED['torch']}' 'jax{SUPPORTED['jax']}'"


def test_the_package_asks_pip_for_the_same_ranges() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = {(r := Requirement(text)).name: r.specifier for text in project["dependencies"]}
    wanted["python"] = SpecifierSet(project["requires-python"])
    assert {name: wanted[name] for name in SUPPORTED} == dict(SUPPORTED)
