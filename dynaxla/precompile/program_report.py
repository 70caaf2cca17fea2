"""What is said about programs for a device that is not here: values, JSON, and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dynaxla.cache.environment_key import versions
from dynaxla.cache.package import PackagedFile
from dynaxla.observe.collectives import Collective, count_group, count_sent_bytes
from dynaxla.precompile.declared_dims import DeclaredDims
from dynaxla.precompile.mesh_plan import MeshPlan
from dynaxla.runtime.executable_info import MemoryUse
from dynaxla.targets.chips import Chip, Roofline

Kind = Literal["program", "weights", "backward"]


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """One program, compiled for a target that is not here.

    Attributes:
        name: "program 0" and so on; the weight-only program of a part is "program 0 (weights)".
        ops: nodes of the ATen graph.
        lowering_s, compile_s: seconds in torch-mlir and JAX, and in the target's compiler; 0 for a program that is another's.
        flops, accessed_bytes: XLA's cost analysis; 0 where it has none.
        memory: what the program needs on the chip.
        chip: published figures of the chip; None where none are known.
        kind: "program" is a forward or inference one, "backward" a backward's, "weights" works on weights alone.
        sizes: the buckets of the call that it was compiled for, by the names of the dims that were declared.
        padded: whether it takes every size of its bucket; else the exact sizes only.
        key: what it is found by.
        file: of the package, if there is one.
        devices: over how many devices it is partitioned; all figures are those of one device.
        collectives: what it sends between devices.
        hlo_text: gives the compiled program as text; the compiler may compile it again for that.
    """

    name: str
    ops: int
    lowering_s: float
    compile_s: float
    flops: float
    accessed_bytes: float
    memory: MemoryUse
    chip: Chip | None = None
    kind: Kind = "program"
    sizes: Mapping[str, int] = field(default_factory=dict)
    padded: bool = False
    key: str | None = None
    file: PackagedFile | None = None
    devices: int = 1
    collectives: tuple[Collective, ...] = ()
    hlo_text: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        return self.chip is None or self.memory.total_bytes <= self.chip.hbm_bytes

    @property
    def sent_bytes(self) -> float:
        """What a device sends to others at least, of all collectives together."""
        return sum(count_sent_bytes(each, self.devices) for each in self.collectives)

    @property
    def communication_s(self) -> float | None:
        """The least time of that over the chip's links; None where nothing is published of them."""
        speed = None if self.chip is None else self.chip.links_bytes_per_s
        return None if speed is None else self.sent_bytes / speed

    @property
    def hbm_bytes(self) -> int:
        """The memory of the chip; 0 where it is not known."""
        return 0 if self.chip is None else self.chip.hbm_bytes

    @property
    def intensity(self) -> float:
        """Operations per byte; 0 where no byte is accessed."""
        return self.flops / self.accessed_bytes if self.accessed_bytes else 0.0

    @property
    def roofline(self) -> Roofline | None:
        """The least time on the chip; None where nothing is published of it."""
        return None if self.chip is None else Roofline.of(self.chip, self.flops, self.accessed_bytes)

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        roofline, memory = self.roofline, self.memory
        return {
            "name": self.name,
            "kind": self.kind,
            "sizes": dict(self.sizes),
            "padded": self.padded,
            "key": self.key,
            **({"file": None} if self.file is None else asdict(self.file)),
            "ops": self.ops,
            "lowering_s": self.lowering_s,
            "compile_s": self.compile_s,
            "flops": self.flops,
            "accessed_bytes": self.accessed_bytes,
            "intensity": self.intensity,
            "roofline_s": None if roofline is None else roofline.seconds,
            "bound": None if roofline is None else roofline.bound,
            **({} if self.devices == 1 else self._document_devices()),
            "memory": {**asdict(memory), "total_bytes": memory.total_bytes, "hbm_bytes": self.hbm_bytes or None},
            "fits": self.fits,
        }

    def _document_devices(self) -> dict[str, Any]:
        several = Counter(self.collectives)
        return {
            "devices": self.devices,
            "sent_bytes": self.sent_bytes,
            "communication_s": self.communication_s,
            "collectives": [
                {
                    "kind": each.kind,
                    "shape": each.shape,
                    "bytes": each.nbytes,
                    "devices": count_group(each, self.devices),
                    "count": count,
                    "runs": each.runs,
                }
                for each, count in several.items()
            ],
        }


@dataclass(frozen=True, slots=True)
class Refusal:
    """A program that the target's compiler refused, died of, or took too much for.

    Attributes:
        error: what was said.
    """

    name: str
    sizes: Mapping[str, int]
    error: Exception

    def document(self) -> dict[str, Any]:
        return {"name": self.name, "sizes": dict(self.sizes), "error": str(self.error)}


@dataclass(frozen=True, slots=True)
class Compilation:
    """Everything that was compiled for one target.

    Attributes:
        target: its name.
        device: what a client of such a device says of itself.
        chip: published figures of it.
        options: the user's.
        train: whether backward graphs are among it.
        declared: the dims that vary.
        programs: in the order in which they were met.
        refused: those that did not compile.
        eager: a line for each op that is not compiled.
        exact_shapes: a line for each part that is compiled for exact sizes only.
        plan: the mesh, and how arguments and weights are sharded over it; None: programs are for one device.
    """

    target: str
    device: Mapping[str, str]
    chip: Chip | None
    options: Mapping[str, object]
    train: bool
    declared: Sequence[DeclaredDims]
    programs: Sequence[ProgramReport]
    refused: Sequence[Refusal]
    eager: Sequence[str]
    exact_shapes: Sequence[str]
    plan: MeshPlan | None = None

    @property
    def complete(self) -> bool:
        """Whether there are programs, all of them compiled, and each fits."""
        return bool(self.programs) and not self.refused and all(program.fits for program in self.programs)

    def document(self) -> dict[str, Any]:
        """As JSON has it; a package's manifest is this."""
        return {
            "target": self.target,
            "device": dict(self.device),
            "chip": None if self.chip is None else asdict(self.chip),
            "versions": dict(versions()),
            "options": {name: value if _is_plain(value) else repr(value) for name, value in self.options.items()},
            "train": self.train,
            "buckets": [
                {"dims": [f"{argument}:{dim}" for argument, dim in each.dims], "sizes": list(each.sizes)}
                for each in self.declared
            ],
            **({} if self.plan is None else self.plan.document()),
            "complete": self.complete,
            "programs": [program.document() for program in self.programs],
            "refused": [refusal.document() for refusal in self.refused],
            "eager": list(self.eager),
            "exact_shapes": list(self.exact_shapes),
        }


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))
