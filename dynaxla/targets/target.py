"""Descriptions of targets and of families of targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynaxla.bucket_policy import DEFAULT, BucketPolicy
from dynaxla.bucketing.joint_policy import JOINT, JOINT_UNKNOWN, JointPolicies
from dynaxla.bucketing.size_buckets import SymbolPolicies
from dynaxla.errors import TargetError
from dynaxla.runtime.client import Client, CompileOnlyClient
from dynaxla.targets.chips import Chip


@dataclass(frozen=True, slots=True)
class Target:
    """A device that programs are compiled for: a live device or an absent one.

    Attributes:
        name: its name in options.
        client: connects to the device for tensors of the host, once per process; the client's class decides whether data is
            shared or copied. Raises TargetError if the device is absent. None for compile-only targets.
        torch_client: the same for tensors that torch itself has on this device; None: it has none there.
        compiler: returns the compile-only client of an absent device or of the CPU. Raises TargetError if the compiler is
            not installed.
        chip: published figures of one device; None if unknown.
        policy: the default bucket policy of a size that varies alone.
        joint: the default policies of several sizes that vary together.
        joint_unknown: the same if the user did not say which sizes vary (`dynamic=True`).
        channels_last: whether convolutions are faster in channels-last layout.
        copies_transposed: whether the compiler copies a transposed operand of a matrix product at every call, so that reading
            a weight in its memory order is faster.
        fuses_short_of_reshapes: whether the compiler fuses what reads a matrix product only where no reshape is between them.
        has_attention_kernels: whether kernels compute attention, which take no mask of queries by keys.
    """

    name: str
    client: Callable[[], Client] | None = None
    torch_client: Callable[[], Client] | None = None
    compiler: Callable[[], CompileOnlyClient] | None = None
    chip: Chip | None = None
    policy: BucketPolicy = DEFAULT
    joint: JointPolicies = JOINT
    joint_unknown: JointPolicies = JOINT_UNKNOWN
    channels_last: bool = False
    copies_transposed: bool = False
    fuses_short_of_reshapes: bool = False
    has_attention_kernels: bool = False

    def policies(self, all_sizes_vary: bool) -> SymbolPolicies:
        """The default bucket policies."""
        return SymbolPolicies(self.policy, self.joint_unknown if all_sizes_vary else self.joint)


@dataclass(frozen=True, slots=True)
class TargetFamily:
    """Targets of one kind. A module of this package defines a family by its `FAMILY`.

    Attributes:
        name: the prefix of its targets' names, up to a colon.
        examples: names of its targets, for messages.
        find: returns the target of the text after the colon ("" if none). Raises TargetError if there is no such target.
        torch_device: the torch device type that defaults to this family if options name no target; None if torch has no
            such device.
    """

    name: str
    examples: tuple[str, ...]
    find: Callable[[str], Target]
    torch_device: str | None = None


def device_index(name: str, index: str) -> int:
    """Parses a device's number, the text after the colon of a target's name; 0 if it is empty.

    Raises:
        TargetError: the text is no number.
    """
    if index and not index.isdecimal():
        raise TargetError(
            f"there is no target {name!r}", f"write the number of a device after the colon, not {index!r}"
        )
    return int(index or 0)
