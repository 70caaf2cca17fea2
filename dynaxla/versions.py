"""Which versions of the libraries underneath this package speaks to."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata
from types import MappingProxyType

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dynaxla.errors import VersionError

SUPPORTED: Mapping[str, SpecifierSet] = MappingProxyType(
    {
        "python": SpecifierSet(">=3.11,<3.14"),
        "torch": SpecifierSet(">=2.13,<2.14"),
        "jax": SpecifierSet(">=0.10,<0.12"),
        "jaxlib": SpecifierSet(">=0.10,<0.12"),
        "torch-mlir": SpecifierSet("==20261001"),
    }
)
"""Ranges the code is written for. Of torch it is what was run: which of its private names are used, torch_api/ says.

What was run: torch 2.13.0 with torch-mlir 20261001, on Python 3.11 with jax and jaxlib 0.10.2, on 3.12 and 3.13 with 0.11.2.
"""


def installed_versions() -> dict[str, str]:
    """Versions of the libraries in `SUPPORTED`; a library that is not installed is missing."""
    found = {"python": platform.python_version()}
    for name in SUPPORTED:
        if name != "python":
            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    return found


def check_versions(installed: Mapping[str, str] | None = None) -> None:
    """Checks that every library is there and in its range. Local parts such as "+cpu" do not count.

    Raises:
        VersionError: names what is installed, what is supported, and the command that mends it.
    """
    given = installed_versions() if installed is None else installed
    wrong = []
    for name, supported in SUPPORTED.items():
        version = given.get(name)
        if version is None:
            wrong.append((name, f"{name} is not installed; dynaxla needs {name}{supported}"))
        elif not _contains(supported, version):
            wrong.append((name, f"{name} {version} is installed; dynaxla supports {name}{supported}"))
    if wrong:
        libraries = " ".join(f"'{name}{SUPPORTED[name]}'" for name, _ in wrong if name != "python")
        hint = f"pip install {libraries}" if libraries else "use a supported Python"
        raise VersionError("; ".join(text for _, text in wrong), hint)


def _contains(supported: SpecifierSet, version: str) -> bool:
    try:
        return supported.contains(Version(version).public, prereleases=True)
    except InvalidVersion:  # a build from a checkout may name itself as it likes
        return False
