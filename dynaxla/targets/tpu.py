"""TPUs: live ones, and topologies to compile for without a chip."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType

from dynaxla.bucketing.joint import JointPolicies
from dynaxla.errors import TargetError
from dynaxla.policy import Default
from dynaxla.runtime import xla
from dynaxla.runtime.devices import jax_device
from dynaxla.runtime.pjrt import HostTransferClient
from dynaxla.runtime.topologies import PjrtTopology
from dynaxla.targets.target import Family, Target, device_index

# Memory of one chip in bytes, from Google's published system architecture of each generation.
HBM_BYTES = MappingProxyType({"v4": 32 << 30, "v5e": 16 << 30, "v5p": 95 << 30, "v6e": 32 << 30})
LANES = 128  # elements of a vector register

LANE_FRIENDLY = Default(multiple_of=LANES)
_FILLS_LANES = Default(exact_up_to=1, multiple_of=LANES)
JOINT_LANE_FRIENDLY = JointPolicies(once=_FILLS_LANES, more_often=_FILLS_LANES)

_TPU = Target("tpu", policy=LANE_FRIENDLY, joint=JOINT_LANE_FRIENDLY, joint_unknown=JOINT_LANE_FRIENDLY)

_TO_COMPILE = {  # compiling takes no chip, so that two processes do not disturb each other
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def find(rest: str) -> Target:
    """A chip of this host ("", "0"), or a topology to compile for ("v5e:1x1")."""
    generation, _, _ = rest.partition(":")
    if generation in HBM_BYTES:
        compiler = partial(_compiler, rest)
        return replace(_TPU, name=f"tpu:{rest}", compiler=compiler, memory_bytes=HBM_BYTES[generation])
    if ":" in rest:
        known = ", ".join(HBM_BYTES)
        raise TargetError(f"there is no target {f'tpu:{rest}'!r}", f"such as tpu:v5e:1x1; generations: {known}")
    index = device_index(f"tpu:{rest}", rest)
    return replace(_TPU, name=f"tpu:{index}", client=partial(tpu_client, index))


@cache
def tpu_client(index: int) -> HostTransferClient:
    """The live TPU `index` of this host.

    Raises:
        TargetError: libtpu is not installed or finds no chip.
    """
    device = jax_device("tpu", index, "install the tpu extra of dynaxla")
    return HostTransferClient(device.client, device, "tpu")


def _compiler(topology: str) -> PjrtTopology:
    """libtpu's compiler. It reads its environment when it loads, so that is set before."""
    if importlib.util.find_spec("libtpu") is None:
        raise TargetError("compiling for a TPU needs libtpu", "install the tpu extra: dynaxla[tpu]")
    for key, value in _TO_COMPILE.items():
        os.environ.setdefault(key, value)
    try:
        return PjrtTopology("tpu", xla.topology("tpu", topology))
    except xla.load().Error as error:
        raise TargetError(
            f"libtpu knows no topology {topology!r}: {error}",
            "examples: v4:2x2x1, v5e:1x1, v5e:2x2, v5p:2x2x1, v6e:2x2",
        ) from error


FAMILY = Family("tpu", ("tpu", "tpu:v5e:1x1"), find)
