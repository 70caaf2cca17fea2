"""What the names' test still allows. The tables may only shrink: python -m conformance.house --to-do"""

FUNCTIONS: dict[str, list[str]] = {
    "aot_cache.serialized_graph": ["captured"],
    "async_compile.worker": ["serialized"],
    "bucketing.bucket_planner": ["padded"],
    "bucketing.size_buckets": ["at", "planned", "refined", "settled"],
    "cache.directory": ["found"],
    "device.compiled_graphs": ["written"],
    "device.storage": ["failed", "written"],
    "lowering.exact_division": ["reached"],
    "lowering.function_table": ["kept"],
    "programs.miss_policy": ["of_call", "of_capture"],
    "programs.part_graphs": ["donated", "known"],
    "runtime.client": ["serialized"],
    "runtime.loaded_executables": ["serialized"],
    "runtime.packaged_programs": ["settled"],
    "runtime.topologies": ["serialized"],
    "runtime.weight_residency": ["taken"],
    "serving.llm.engine_cache": ["compiled"],
    "serving.llm.grammars": ["allowed"],
    "serving.llm.model_runner": ["chosen"],
    "serving.llm.sequence": ["left"],
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
