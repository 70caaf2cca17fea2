"""What the names' test still allows. The tables may only shrink: python -m conformance.house --to-do"""

FUNCTIONS: dict[str, list[str]] = {
    "device.compiled_graphs": ["written"],
    "device.storage": ["failed", "written"],
    "programs.miss_policy": ["of_call", "of_capture"],
    "programs.part_graphs": ["donated", "known"],
    "serving.llm.engine_cache": ["compiled"],
}

CLASSES: dict[str, list[str]] = {}

MODULES: dict[str, list[str]] = {}

OLD_WORDS: list[str] = []

CRUMBS: list[str] = [
    "device.dynamic_dims",
    "device.layouts",
    "device.lru_cache",
    "device.moe_ops",
    "device.op_recompile_warning",
    "device.supported_ops",
]

CIRCLES: list[list[str]] = []
