"""Text, memory use and cost of a PJRT executable, and what a compiling child process is asked and answers.

Imports no torch, as these processes use it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from dynaxla.cache.environment_key import host


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory that an executable needs on the device, in bytes.

    Attributes:
        aliased_bytes: bytes of outputs that reuse the memory of donated arguments.
        peak_bytes: the most at any one time; 0 where PJRT does not say.
    """

    arguments_bytes: int
    outputs_bytes: int
    temporaries_bytes: int
    code_bytes: int
    aliased_bytes: int = 0
    peak_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.arguments_bytes + self.outputs_bytes - self.aliased_bytes + self.temporaries_bytes + self.code_bytes


@dataclass(frozen=True, slots=True)
class SerializedExecutable:
    """A compiled program.

    Attributes:
        executable: serialized for the embedded CPU client; None if XLA compiles the program but cannot serialize it.
    """

    executable: bytes | None


@dataclass(frozen=True, slots=True)
class CompileRejected:
    """A program that XLA refused.

    Attributes:
        message: XLA's error message.
    """

    message: str


class ModuleRequest(NamedTuple):
    """What the child process compiles.

    Attributes:
        module: StableHLO (bytecode or text).
        partitions: the number of devices over which it is partitioned.
    """

    module: bytes
    partitions: int = 1


class PjrtCompiled:
    """A PJRT executable, loaded or not: its text, memory use and cost."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @property
    def handle(self) -> Any:
        """PJRT's executable."""
        return self._handle

    def module_names(self) -> list[str]:
        """The names of its modules, by which profiles refer to it."""
        return [module.name for module in self._handle.hlo_modules()]

    def hlo_text(self) -> str:
        return "\n\n".join(module.to_string() for module in self._handle.hlo_modules())

    def memory_use(self) -> MemoryUse:
        stats = self._handle.get_compiled_memory_stats()
        return MemoryUse(
            arguments_bytes=stats.argument_size_in_bytes,
            outputs_bytes=stats.output_size_in_bytes,
            temporaries_bytes=stats.temp_size_in_bytes,
            code_bytes=stats.generated_code_size_in_bytes,
            aliased_bytes=stats.alias_size_in_bytes,
            peak_bytes=stats.peak_memory_in_bytes,
        )

    def cost(self) -> dict[str, float]:
        """XLA's cost analysis: "flops", "bytes accessed" and more. Empty if the platform has none."""
        found = self._handle.cost_analysis()
        return dict(found[0] if isinstance(found, list) else found) if found else {}


Override = tuple[str, str | bool]
"""An option of XLA, and its value."""

WITHOUT_REDUCTIONS: Override = (
    "xla_cpu_experimental_ynn_fusion_type",
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION",
)
"""XLA's option of fusions for the library, and its default value without reductions."""

PLAIN_LOOPS: Override = ("xla_cpu_use_fusion_emitters", False)
"""XLA's older emitter of elementwise loops. It compiles a small program in two thirds of the time, with the same functions; a
large one takes it longer, and its loops may run at a third of the speed."""

WIDE_VECTORS: Override = ("xla_cpu_prefer_vector_width", "512")
"""Vectors of 512 bits, for 256: functions such as `exp` and `erf` take half the time (docs/performance.md)."""

_WIDE_PROCESSOR = "avx512_bf16"  # Zen 4, Cooper Lake and later ones, which do not slow down for such vectors
_NO_TILES = b"xla_cpu_disable_tiled_emitter"
_MOVES = (b"stablehlo.transpose", b"stablehlo.convolution")


def choose_loops(options: Any, module: bytes) -> Any:
    """XLA's options for a StableHLO module (text) of the embedded CPU client: how its loops are made.

    XLA computes an elementwise op that it fuses with no other one tile by tile: a sum of 1024 x 768 floats takes 2.3 times as
    long as by a plain loop, `rsqrt` 9 times. Transposes gain by tiles. The switch is one of XLA's "extra options", which
    no binding sets: a field that is appended to a message joins it. jaxlib 0.11 ignores it.
    """
    wide = [WIDE_VECTORS] if _WIDE_PROCESSOR in host().get("flags", "").split() else []
    options.env_option_overrides = [*find_overrides(module), *wide]
    if b"func.func" not in module or any(move in module for move in _MOVES):
        return options
    entry = _field(b"\x0a", _NO_TILES) + _field(b"\x12", b"")  # a name and its value
    extra = _field(b"\xa2\x1f", entry)  # field 500 of debug_options, which is field 3 of executable_build_options
    appended = _field(b"\x1a", _field(b"\x1a", extra))
    return type(options).ParseFromString(options.SerializeAsString() + appended)


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + bytes([len(content)]) + content


_SMALL_MODULE_BYTES = 8 << 10
_FEW_ELEMENTS = 16 << 10
_SIZES = re.compile(rb"tensor<([\dx]+)x")


def find_overrides(module: bytes) -> list[Override]:
    """What the embedded CPU client compiles a StableHLO module (text) with: a small program on few elements, as the device
    runs most in a first pass, costs more to compile than it ever takes to run."""
    if len(module) > _SMALL_MODULE_BYTES or b"func.func" not in module or b"stablehlo.while" in module:
        return []
    counts = (math.prod(map(int, sizes.split(b"x"))) for sizes in _SIZES.findall(module))
    return [PLAIN_LOOPS] if max(counts, default=0) <= _FEW_ELEMENTS else []


FRONTEND_ATTRIBUTES = "mhlo.frontend_attributes"
"""StableHLO's attribute of texts that XLA keeps with an op."""

NOT_INLINED = ("inlineable", "false")
"""Frontend attribute of a call, and its value: XLA fuses nothing of the function with what is around the call."""

ANY_LAST_BIT = "dynaxla_any_last_bit"
"""Frontend attribute of a division in StableHLO: XLA may rewrite it, as what reads it does not need the last bit."""

ANY_NAN = "dynaxla_any_nan"
"""Frontend attribute of an extreme in StableHLO: NaN may be left out, as what reads it is NaN there anyway."""

_MOVE_OPCODES = frozenset("parameter constant bitcast reshape transpose broadcast".split())
_EXACT_OPCODES = frozenset("add subtract multiply divide negate abs".split())
COMPUTATION = re.compile(r"^(?:ENTRY )?(\S+) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"calls=([^\s,]+).*__ynn_fusion")
_INSTRUCTION = re.compile(r"\s*(ROOT )?(\S+) = (\w+)\[[^\]]*\]\S* ([\w-]+)\(([^)]*)\)(?=(.*))(?:.*to_apply=([^\s,]+))?")


class Instruction(NamedTuple):
    """A line of an optimized module's text, by its parts; empty where it has none."""

    root: str
    name: str
    element: str
    opcode: str
    operands: str
    attributes: str
    reducer: str


def has_exact_fusions(hlo: str) -> bool:
    """Whether the library computes XLA's numbers: it reduces nothing, or only sums values that it computes as XLA does,
    or finds the largest ones with no regard to NaN where that is allowed (`ANY_NAN`).

    In jaxlib 0.10.2 the library drops NaN in maxima and minima, omits conversions to narrower types and back, and its
    `exp` overflows before the result does.

    Args:
        hlo: the text of an optimized module, as `HloPrintOptions.short_parsable` prints it.
    """
    computations: Mapping[str, str] = dict(COMPUTATION.findall(hlo))
    return all(_keeps_fusion(computations[name], computations) for name in _CALLED.findall(hlo))


def _keeps_fusion(fusion: str, computations: Mapping[str, str]) -> bool:
    if " reduce(" not in fusion and " reduce-window(" not in fusion:
        return True
    instructions = list(find_instructions(fusion))
    parameters = {each.name for each in instructions if each.opcode == "parameter"}
    return len(instructions) == len(fusion.splitlines()) and all(
        _is_same(each, parameters, computations) for each in instructions
    )


def find_instructions(computation: str) -> Iterator[Instruction]:
    """The instructions of a computation that give one array."""
    for line in computation.splitlines():
        if found := _INSTRUCTION.match(line):
            yield Instruction(*found.groups(default=""))


def _is_same(instruction: Instruction, parameters: set[str], computations: Mapping[str, str]) -> bool:
    """Whether the library computes the instruction as XLA does."""
    if instruction.opcode == "convert":  # the library may omit a chain of conversions
        return bool(instruction.root) or instruction.operands in parameters
    if instruction.opcode == "reduce":
        return " add(" in computations[instruction.reducer] or f'{ANY_NAN}="true"' in instruction.attributes
    return instruction.opcode in _MOVE_OPCODES or (
        instruction.opcode in _EXACT_OPCODES and instruction.element in ("f32", "f64")
    )


def processes_of(module: bytes | str) -> tuple[int, ...] | None:
    """The processes that run a module together, by the comment that it begins with; None: one alone."""
    found = _JOINT.match(module if isinstance(module, bytes) else module.encode())
    return None if found is None else tuple(map(int, found[1].split(b",")))


_JOINT = re.compile(rb"// joint ([\d,]+)( [^\n]*)?\n")
