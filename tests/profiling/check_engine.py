"""A profile of a language model's engine knows the user's modules and lines: prompts, steps and their loop.
`test_profiles.py` runs this."""

from __future__ import annotations

from pathlib import Path

import dynaxla
from dynaxla.profiling.device_ops import DeviceOp
from dynaxla.profiling.device_time import group_time, module_of, write_device_time
from dynaxla.serving.llm.requests import SamplingParams
from tests.serving.llm.small import served


def share(ops: list[DeviceOp], *, lined: bool) -> float:
    known = [op for op in ops if op.source is not None and (op.source.place or not lined)]
    return sum(op.self_ns for op in known) / sum(op.self_ns for op in ops)


def test_the_engine_is_attributed() -> None:
    dynaxla.use("cpu")
    asked = SamplingParams(6, temperature=0.8)
    with served("llama", sizes={"hidden_size": 1024, "intermediate_size": 2048}) as found:
        found.engine.submit([5, 9, 7], asked).result()
        with dynaxla.profile() as profile:
            answers = [found.engine.submit([5, 9, last], asked) for last in (3, 4)]
            assert all(answer.result().chosen for answer in answers)
    told = write_device_time(profile.ops, 1.0, 0.0)
    assert share(profile.ops, lined=False) >= 0.95, told
    assert share(profile.ops, lined=True) >= 0.95, told
    modules = {module.removeprefix("_model.") for module in group_time(profile.ops, module_of)}
    assert {f"model.layers.{n}" for n in (0, 1)} | {"model.embed_tokens", "lm_head"} <= modules, modules
    (loop,) = {op.source.outer for op in profile.ops if op.source is not None and op.source.outer is not None}
    assert loop.op == "while_loop"  # steps are one loop on the device, which has the line that calls it
    assert "model_steps.py" in loop.place
    steps = [op for op in profile.ops if op.source is not None and loop in (op.source, op.source.outer)]
    within = [op for op in steps if op.source is not None and op.source.module.startswith("_model.")]
    assert sum(op.self_ns for op in within) / sum(op.self_ns for op in steps) >= 0.9, told
    files = {Path(op.source.file).name for op in steps if op.source is not None}
    assert {"slot_attention.py", "kv_cache.py", "model_steps.py"} <= files, files
