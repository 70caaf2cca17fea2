from dataclasses import dataclass, field
@dataclass(frozen=True)
class DebugOptions:
    dump: object = None
    stages: frozenset = frozenset()
@dataclass(frozen=True)
class Options:
    fallback: str = "eager"
    executor: str = "pjrt"
    target: str | None = None
    matmul_precision: str = "torch"
    fold_parameters: bool = True
    max_executables: int = 64
    debug: DebugOptions = DebugOptions()
    @classmethod
    def from_mapping(cls, m): return cls(**(m or {}))
