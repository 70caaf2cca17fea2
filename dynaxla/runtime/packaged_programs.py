"""The programs of a compiled package: entries in memory, and the environment that they were compiled in."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dynaxla.cache.environment_key import Environment, versions
from dynaxla.cache.package import Archive
from dynaxla.errors import PackageError
from dynaxla.runtime.client import Client
from dynaxla.runtime.xla import settings
from dynaxla.versions import installed_versions

logger = logging.getLogger("dynaxla")

LOWERS = "torch-mlir"
_MAY_DIFFER = frozenset({"flags", "threads"})
"""Of a client's identity, what decides how fast a program is and not whether it runs."""


def environment_of(client: Client) -> Environment:
    """That of this process, for programs of a client."""
    return Environment(dict(client.identity()), dict(settings()), dict(versions()))


@dataclass(slots=True)
class PackagedPrograms:
    """The programs of a package.

    Attributes:
        environment: that of the process that compiled them; None until it compiles the first.
        entries: executables and their metadata.
        refused: why the programs are of no use here; empty if they are.
    """

    environment: Environment | None = None
    entries: Archive = field(default_factory=Archive)
    refused: str = ""

    @classmethod
    def from_document(cls, document: Mapping[str, Any], entries: Archive) -> PackagedPrograms:
        """What `document` wrote, with the entries beside it.

        Raises:
            TypeError: it is of another form.
        """
        environment = document["environment"]
        return cls(None if environment is None else Environment(**environment), entries)

    def document(self) -> dict[str, Any]:
        """What a package says of its programs, as JSON has it."""
        return {"environment": None if self.environment is None else asdict(self.environment)}

    def settle(self, client: Client) -> Environment:
        """The environment, which is this process's if there is none yet, or if the programs are for another machine."""
        if self.environment is None:
            self.environment = environment_of(client)
        elif not self.refused and (other := _differing(self.environment.client, client.identity())):
            self.refused = f"its programs are for another {self.environment.client.get('platform')}: {', '.join(other)}"
            logger.warning("a package is compiled anew: %s", self.refused)
            self.environment, self.entries = environment_of(client), Archive()
        return self.environment

    def check_compilable(self) -> None:
        """Raises PackageError if nothing can be compiled in this process."""
        if LOWERS not in installed_versions():
            found = self.refused or "the package has no program for these sizes"
            hint = f"make the package with these sizes declared, or install {LOWERS}, which compiles it here"
            raise PackageError(f"{found}, and {LOWERS} is not installed", hint)


def _differing(compiled_for: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Names of what keeps a client from running programs that were compiled for another."""
    names = (compiled_for.keys() | here.keys()) - _MAY_DIFFER
    return sorted(name for name in names if compiled_for.get(name) != here.get(name))
