"""The programs of a compiled package: executables with what has to be alike where they run."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynaxla.cache.environment_key import versions
from dynaxla.errors import PackageError
from dynaxla.runtime.client import Client
from dynaxla.runtime.xla import settings
from dynaxla.versions import installed_versions

logger = logging.getLogger("dynaxla")

LOWERS = "torch-mlir"
_MAY_DIFFER = frozenset({"flags", "threads"})
"""Of a client's identity, what decides how fast a program is and not whether it runs."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """With what and for what programs are compiled: a part of their keys.

    Attributes:
        client: its identity.
        jax: JAX's settings.
        versions: of Python, of the libraries and of this package.
    """

    client: Mapping[str, str]
    jax: Mapping[str, str]
    versions: Mapping[str, str]

    @classmethod
    def here(cls, client: Client) -> Surroundings:
        """Those of this process."""
        return cls(dict(client.identity()), dict(settings()), dict(versions()))

    def differing(self, client: Client) -> list[str]:
        """What keeps a client from running these programs: names of what is different."""
        here = client.identity()
        names = self.client.keys() | here.keys()
        return sorted(name for name in names - _MAY_DIFFER if self.client.get(name) != here.get(name))


@dataclass(slots=True)
class Bundle:
    """What was compiled, by the digests of keys.

    Attributes:
        programs: serialized executables.
        outlines: what is known of programs beside these.
        surroundings: those of the process that compiled them; None until it compiles the first.
        refused: why the programs are of no use here; empty if they are.
    """

    surroundings: Surroundings | None = None
    programs: dict[str, bytes] = field(default_factory=dict)
    outlines: dict[str, bytes] = field(default_factory=dict)
    refused: str = ""

    def settled(self, client: Client) -> Surroundings:
        """The surroundings, which are this process's if there are none yet, or if the programs are for another machine."""
        if self.surroundings is None:
            self.surroundings = Surroundings.here(client)
        elif not self.refused and (other := self.surroundings.differing(client)):
            self.refused = (
                f"its programs are for another {self.surroundings.client.get('platform')}: {', '.join(other)}"
            )
            logger.warning("a package is compiled anew: %s", self.refused)
            self.surroundings, self.programs, self.outlines = Surroundings.here(client), {}, {}
        return self.surroundings

    def check_compilable(self) -> None:
        """Raises PackageError if nothing can be compiled in this process."""
        if LOWERS not in installed_versions():
            found = self.refused or "the package has no program for these sizes"
            hint = f"make the package with these sizes declared, or install {LOWERS}, which compiles it here"
            raise PackageError(f"{found}, and {LOWERS} is not installed", hint)
