"""What is known of a target, and of a family of targets: the values that the modules beside this one are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dynaxla.bucket_policy import DEFAULT, BucketPolicy
from dynaxla.bucketing.joint_policy import JOINT, JOINT_UNKNOWN, JointPolicies
from dynaxla.bucketing.size_buckets import Policies
from dynaxla.errors import TargetError
from dynaxla.runtime.client import Client, CompileOnlyClient
from dynaxla.targets.chips import Chip


@dataclass(frozen=True, slots=True)
class Target:
    """What programs are compiled for: a live device, or one that is elsewhere.

    Attributes:
        name: as options name it.
        client: connects to the device, once per process, and so says how data crosses: in shared memory, or by copies through
            the host. It raises TargetError where the device is not here. None if there is only a compiler.
        compiler: gives what compiles for it without running anything, of a target that is elsewhere or of the CPU. It raises
            TargetError where that is not installed.
        chip: published figures of one device, where they are known.
        policy: the buckets of a size that varies alone, where nobody says else.
        joint: likewise of several sizes.
        joint_unknown: likewise where nobody said which sizes vary (`dynamic=True`).
        channels_last: whether convolutions gain from channels that lie last in memory.
        copies_transposed: whether the compiler copies a transposed operand of a product at every call, so that products gain
            from reading a weight as it lies.
    """

    name: str
    client: Callable[[], Client] | None = None
    compiler: Callable[[], CompileOnlyClient] | None = None
    chip: Chip | None = None
    policy: BucketPolicy = DEFAULT
    joint: JointPolicies = JOINT
    joint_unknown: JointPolicies = JOINT_UNKNOWN
    channels_last: bool = False
    copies_transposed: bool = False

    def policies(self, all_sizes_vary: bool) -> Policies:
        """The buckets where nobody says else."""
        return Policies(self.policy, self.joint_unknown if all_sizes_vary else self.joint)


@dataclass(frozen=True, slots=True)
class Family:
    """Targets of one kind. A module of this package with a `FAMILY` is all that it takes to have one.

    Attributes:
        name: what the names of its targets begin with, up to a colon.
        examples: names of its targets, for messages.
        find: from what stands behind the colon, "" for nothing, to the target. Raises TargetError if it is none.
        torch_device: the type of torch's devices whose tensors its targets compute on where no target is named; None if
            torch has no such device.
    """

    name: str
    examples: tuple[str, ...]
    find: Callable[[str], Target]
    torch_device: str | None = None


def device_index(name: str, index: str) -> int:
    """The number of a device, of the text behind the colon of a target's name; 0 if there is none.

    Raises:
        TargetError: it is no number.
    """
    if index and not index.isdecimal():
        raise TargetError(
            f"there is no target {name!r}", f"write the number of a device behind the colon, not {index!r}"
        )
    return int(index or 0)
