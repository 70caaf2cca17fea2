"""What a value of the store depends on beside its content and the options: versions, device, settings of JAX and torch."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from dynaxla.versions import installed_versions

_PACKAGE = Path(__file__).parents[1]

_PROCESSORS = Path("/proc/cpuinfo")
_TELLING = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "flags",
    "CPU implementer",
    "CPU part",
    "Features",
)
"""Lines of a processor's paragraph, of x86 and Arm, on which it depends what code runs and how it is scheduled."""


@dataclass(frozen=True, slots=True)
class Environment:
    """With what and for what something is captured, lowered and compiled. Kinds of entries name the fields that they depend on.

    Attributes:
        client: the identity of the device's client.
        jax: JAX's settings.
        versions: of Python, of the libraries and of this package.
    """

    client: Mapping[str, str]
    jax: Mapping[str, str]
    versions: Mapping[str, str]

    @property
    def torch(self) -> Mapping[str, str]:
        """torch's settings of now, in this thread, that decide which ops a function is made of, or of what dtype; and which
        process of several this is, as the graph of a DTensor has what this one does of it, and who is in the groups whose names
        a graph has."""
        return torch_settings()


def torch_settings() -> Mapping[str, str]:
    """See `Environment.torch`."""
    import torch

    from dynaxla.torch_api.autocast_lists import autocast_state
    from dynaxla.torch_api.c10d import list_groups

    cuda, einsum = torch.backends.cuda, torch.backends.opt_einsum
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    attentions = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled, cuda.cudnn_sdp_enabled)
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "grad": str(torch.is_grad_enabled()),
        "inference mode": str(torch.is_inference_mode_enabled()),
        "autocast": str(autocast_state()),
        "deterministic": str(deterministic),
        "float32 products": torch.get_float32_matmul_precision(),
        "libraries": str((torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled)),
        "einsum": str((einsum.enabled, einsum.strategy)),
        "fast path of attention": str(torch.backends.mha.get_fastpath_enabled()),
        "attentions": str([enabled() for enabled in attentions]),
        "process": str((torch.distributed.get_rank(), list_groups()) if several else None),
    }


@cache
def versions() -> Mapping[str, str]:
    """Python, the libraries that lower and compile, and of this package the digest of its source: "0.1.0" is many checkouts."""
    return MappingProxyType({**installed_versions(), "dynaxla": source_digest(_PACKAGE)})


def source_digest(package: Path) -> str:
    """A digest of the names and contents of all Python files below a folder, and of the tables beside them."""
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.tsv")]):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@cache
def host() -> Mapping[str, str]:
    """What code for this machine's processor depends on: its architecture, its model and the features that it has.

    Where the system does not say what features it has, only machines of one name are taken for alike.
    """
    found = {"system": platform.system(), "machine": platform.machine()}
    try:
        paragraph = _PROCESSORS.read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        return {**found, "processor": platform.processor(), "node": platform.node()}
    lines = (line.partition(":") for line in paragraph.splitlines())
    told = {name.strip(): " ".join(sorted(value.split())) for name, _, value in lines}
    return found | {name: told[name] for name in _TELLING if name in told}


def threads() -> int:
    """How many processors this process may use: programs are cut into so many tasks."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
