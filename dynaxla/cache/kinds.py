"""The kinds of entries, and the one builder of their keys: every option counts that a kind does not leave out by name."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from dynaxla.cache.environment_key import Environment
from dynaxla.cache.key import Key
from dynaxla.options import Options

_BY_GRAPH = "the graph that is compiled shows it"
_BY_SIZES = "the sizes that are compiled for show it"
_A_LIMIT = "a limit: what is compiled within it is the same"
_WATCHES = "it watches calls, and changes no program"
_OF_STORAGE = "it says what is stored, not what is compiled"


@dataclass(frozen=True, slots=True)
class EntryKind:
    """A kind of entries on whose values results depend.

    Attributes:
        name: ends the names of its files.
        environment: the fields of an `Environment` that its values depend on.
        left_out: by the name of an option, why it is no part of the keys.
    """

    name: str
    environment: tuple[str, ...]
    left_out: Mapping[str, str]

    def key(self, options: Options, environment: Environment, **content: object) -> Key:
        """The key of a value.

        Args:
            content: what the value is made of.

        Raises:
            TypeError: what a part of the content is made of is not known.
            Exception: of a bucket policy of the user's, which cannot be pickled.
        """
        counted = {each.name: _option(options, each.name) for each in fields(options) if each.name not in self.left_out}
        around = {name: getattr(environment, name) for name in self.environment}
        return Key.of(kind=self.name, options=counted, **around, **content)


@dataclass(frozen=True, slots=True)
class HintKind:
    """A kind of entries that say what is worth doing and never what is computed. Who reads a value checks it against the part
    at hand, so that neither options nor the environment are in the keys.

    Attributes:
        name: ends the names of its files.
    """

    name: str

    def key(self, **content: object) -> Key:
        """The key of a value; raises as `EntryKind.key` does."""
        return Key.of(kind=self.name, **content)


def _option(options: Options, name: str) -> object:
    """The value of an option as a part of a key; what torch's own setting decides is that setting."""
    value = options.precision if name == "matmul_precision" else getattr(options, name)
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else pickle.dumps(value, protocol=5)  # classes of the user's say all of their state so


_OF_PROGRAMS = MappingProxyType(
    {
        "fallback": _BY_GRAPH,
        "executor": '"eager" compiles nothing',
        "target": "the client's identity says what is compiled for",
        "fold_parameters": _BY_GRAPH,
        "nested_regions": _BY_GRAPH,
        "rng": _BY_GRAPH,
        "value_checks": _BY_GRAPH,
        "bucketing": _BY_SIZES,
        "buckets": _BY_SIZES,
        "lowering_timeout_s": _A_LIMIT,
        "compile_timeout_s": _A_LIMIT,
        "compiler_memory_bytes": _A_LIMIT,
        "compile": "it says when programs are compiled",
        "cache": _OF_STORAGE,
        "captures": _OF_STORAGE,
        "package": _OF_STORAGE,
        "max_executables": "it says how many programs are in memory",
        "verify": _WATCHES,
        "verify_action": _WATCHES,
        "call_metrics": _WATCHES,
        "debug": "while stages are dumped nothing is loaded",
    }
)
_OF_CAPTURES = MappingProxyType({"debug": "while stages are dumped no capture is stored"})

EXECUTABLE = EntryKind("executable", ("client", "jax", "versions"), _OF_PROGRAMS)
METADATA = EntryKind("metadata", ("client", "jax", "versions"), _OF_PROGRAMS)
FUNCTION = EntryKind("function", ("jax", "versions"), _OF_PROGRAMS)
CAPTURE = EntryKind("capture", ("versions", "torch"), _OF_CAPTURES)
ENGINE_PROGRAM = EntryKind("engine_program", ("versions", "torch"), _OF_CAPTURES)
ENGINE_CHECK = EntryKind("engine_check", ("versions", "torch"), _OF_CAPTURES)
PLAN = HintKind("plan")
SIZES = HintKind("sizes")
KINDS = (EXECUTABLE, METADATA, FUNCTION, CAPTURE, ENGINE_PROGRAM, ENGINE_CHECK, PLAN, SIZES)
