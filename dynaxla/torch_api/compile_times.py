"""What Dynamo and Inductor measure of their own compiles."""

from __future__ import annotations

from dataclasses import dataclass

from torch._dynamo.utils import compilation_time_metrics, counters


@dataclass(frozen=True, slots=True)
class DynamoTimes:
    """Sums since the process began. Relies on the same as `read_dynamo_times`.

    Attributes:
        graphs: graphs that Dynamo gave to a backend.
        capture_s: seconds of Dynamo alone.
        backend_s: seconds in backends during captures (AOTAutograd's traces, partitioners), without Inductor's compilers.
        inductor_s: seconds in Inductor's compilers, forward and backward.
    """

    graphs: int
    capture_s: float
    backend_s: float
    inductor_s: float


def read_dynamo_times() -> DynamoTimes:
    """Reads the sums. Relies on `compilation_time_metrics` of torch._dynamo.utils, seconds by the names with which Dynamo and
    Inductor measure themselves, and on its counter `unique_graphs`."""

    def sum_of(name: str) -> float:
        return sum(compilation_time_metrics.get(name, ()))

    backends_s, forward_s = sum_of("OutputGraph.call_user_compiler"), sum_of("compile_fx.<locals>.fw_compiler_base")
    return DynamoTimes(
        graphs=counters["stats"]["unique_graphs"],
        capture_s=sum_of("_compile.compile_inner") - backends_s,
        backend_s=backends_s - forward_s,
        inductor_s=forward_s + sum_of("compile_fx.<locals>.bw_compiler"),
    )
