"""TPUs: live chips, and topologies to compile for without a chip."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from dynaxla.bucket_policy import Default
from dynaxla.bucketing.joint_policy import JointPolicies
from dynaxla.errors import CompileCrashed, CompileError, CompileUnavailable, TargetError
from dynaxla.isolation.once import once
from dynaxla.runtime.pjrt_clients import HostTransferClient
from dynaxla.runtime.topologies import PjrtTopology
from dynaxla.runtime.topology_worker import TopologyDescription
from dynaxla.targets.chips import TPU_CHIPS
from dynaxla.targets.plugin import jax_device
from dynaxla.targets.target import Target, TargetFamily, device_index

LANES = 128  # elements of a vector register

LANE_FRIENDLY = Default(multiple_of=LANES)
_FILLS_LANES = Default(exact_up_to=1, multiple_of=LANES)
JOINT_LANE_FRIENDLY = JointPolicies(prompt=_FILLS_LANES, once=_FILLS_LANES, more_often=_FILLS_LANES)

_TPU = Target(
    "tpu",
    policy=LANE_FRIENDLY,
    joint=JOINT_LANE_FRIENDLY,
    joint_unknown=JOINT_LANE_FRIENDLY,
    fuses_short_of_reshapes=True,
    has_attention_kernels=True,
)

_TO_COMPILE = {  # compiling uses no chip, so two processes may load libtpu
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def find(rest: str) -> Target:
    """The target of a chip of this host ("", "0"), or of a topology to compile for ("v5e:1x1")."""
    generation, _, _ = rest.partition(":")
    if generation in TPU_CHIPS:
        return replace(_TPU, name=f"tpu:{rest}", compiler=partial(_compiler, rest), chip=TPU_CHIPS[generation])
    if ":" in rest:
        known = ", ".join(TPU_CHIPS)
        raise TargetError(f"there is no target {f'tpu:{rest}'!r}", f"such as tpu:v5e:1x1; generations: {known}")
    index = device_index(f"tpu:{rest}", rest)
    return replace(_TPU, name=f"tpu:{index}", client=partial(tpu_client, index))


class TpuClient(HostTransferClient):
    """A TPU of this host."""

    def identity(self) -> Mapping[str, str]:
        """The same identity as that of a compile-only topology."""
        devices = len(self._client.devices())
        return tpu_identity(TopologyDescription(self.device.device_kind, devices, self._client.platform_version))


def tpu_identity(described: TopologyDescription) -> Mapping[str, str]:
    """The part of cache keys for TPU programs: libtpu's build, the chip's kind, the number of chips, the compiler's flags."""
    return {
        "platform": "tpu",
        "version": described.version,
        "device": described.device_kind,
        "devices": str(described.devices),
        "flags": os.environ.get("XLA_FLAGS", ""),
        "libtpu_flags": os.environ.get("LIBTPU_INIT_ARGS", ""),
    }


@once
def tpu_client(index: int) -> TpuClient:
    """The client of the live TPU `index` of this host.

    Raises:
        TargetError: libtpu is not installed or finds no chip.
    """
    device = jax_device("tpu", index, "install the tpu extra of dynaxla")
    return TpuClient(device.client, device, "tpu")


@once
def _compiler(topology: str) -> PjrtTopology:
    """libtpu's compiler for a topology, in a child process; made once per process."""
    if importlib.util.find_spec("libtpu") is None:
        raise TargetError("compiling for a TPU needs libtpu", "install the tpu extra: dynaxla[tpu]")
    try:
        return PjrtTopology("tpu", topology, _TO_COMPILE, tpu_identity)
    except (CompileCrashed, CompileUnavailable):
        raise
    except CompileError as error:
        raise TargetError(error.explanation, "examples: v4:2x2x1, v5e:1x1, v5e:2x2, v5p:2x2x1, v6e:2x2") from error


FAMILY = TargetFamily("tpu", ("tpu", "tpu:v5e:1x1"), find)
