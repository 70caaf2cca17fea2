"""Meshes of devices, and how tensors are sharded over them: plain values, which know no device."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from dynaxla.errors import ShardingError

Spec: TypeAlias = Sequence[str | tuple[str, ...] | None]
"""For each dim of a tensor the axis or axes over which it is split; None: over none. Dims that are left out are not split."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of devices with a name for each axis. The devices are the first ones of all processes, row-major.

    Attributes:
        shape: the devices along each axis.
        axes: the names of the axes.
        is_local: whether they are the first ones of this process, which is one of several, and no other's.
        size: the number of devices.

    Raises:
        ShardingError: an axis has no size or name of its own.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    is_local: bool = False
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes) or not self.axes:
            raise ShardingError(
                f"a mesh of {self.shape} devices with the axes {self.axes}", "give each axis one size and one name"
            )
        if len(set(self.axes)) != len(self.axes) or not all(axis.isidentifier() for axis in self.axes):
            raise ShardingError(f"axes named {self.axes}", "give each axis an identifier of its own as its name")
        if any(size < 1 for size in self.shape):
            raise ShardingError(f"a mesh of {self.shape} devices", "give each axis one device or more")
        object.__setattr__(self, "size", math.prod(self.shape))

    def __str__(self) -> str:
        return "x".join(f"{axis}={size}" for axis, size in zip(self.axes, self.shape, strict=True))

    def count(self, axes: Sequence[str]) -> int:
        """The number of parts into which a dim that is split over these axes is cut.

        Raises:
            ShardingError: the mesh has no such axis.
        """
        for axis in axes:
            if axis not in self.axes:
                near = difflib.get_close_matches(axis, self.axes, n=1)
                meant = f"did you mean {near[0]!r}? " if near else ""
                raise ShardingError(f"the mesh {self} has no axis {axis!r}", f"{meant}axes: {', '.join(self.axes)}")
        return math.prod(self.shape[self.axes.index(axis)] for axis in axes)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is split over a mesh.

    Attributes:
        mesh: the mesh.
        dims: for each dim the axes over which it is split; none: every device has all of the dim.
    """

    mesh: Mesh
    dims: tuple[tuple[str, ...], ...]

    @property
    def parts(self) -> int:
        """The number of parts that a tensor is cut into."""
        return self.mesh.count([axis for dim in self.dims for axis in dim])

    @property
    def is_replicated(self) -> bool:
        """Whether every device has the whole tensor."""
        return self.parts == 1

    @property
    def spec(self) -> tuple[str | tuple[str, ...] | None, ...]:
        """The spec as a user writes it."""
        return tuple(None if not dim else dim[0] if len(dim) == 1 else dim for dim in self.dims)

    def __str__(self) -> str:
        return f"{self.spec} on {self.mesh}"

    def tile(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of one device's part of a tensor of this shape."""
        return tuple(size // self.mesh.count(axes) for size, axes in zip(shape, self.dims, strict=True))

    def divides(self, shape: Sequence[int]) -> bool:
        """Whether all parts of a tensor of this shape have one size."""
        return len(shape) == len(self.dims) and all(
            size % self.mesh.count(axes) == 0 for size, axes in zip(shape, self.dims, strict=True)
        )

    def keep_divisible(self, shape: Sequence[int]) -> Sharding:
        """The same sharding of a tensor of this shape, without the axes that do not divide its dims."""
        kept = (axes if size % self.mesh.count(axes) == 0 else () for size, axes in zip(shape, self.dims, strict=True))
        return Sharding(self.mesh, tuple(kept))

    def drop_axis(self, axis: str) -> Sharding:
        """The same sharding, not split over an axis."""
        return Sharding(self.mesh, tuple(tuple(each for each in axes if each != axis) for axes in self.dims))

    def permute(self, order: Sequence[int]) -> Sharding:
        """The sharding of the tensor with its dims in this order."""
        return Sharding(self.mesh, tuple(self.dims[dim] for dim in order))


def replicate(mesh: Mesh, rank: int) -> Sharding:
    """The sharding of a tensor of this rank that every device has whole."""
    return Sharding(mesh, ((),) * rank)


def parse_dims(spec: Spec, rank: int | None = None) -> tuple[tuple[str, ...], ...]:
    """The axes of each dim, as a spec gives them.

    Args:
        rank: of the tensor; None: as many dims as the spec has.

    Raises:
        ShardingError: it is no spec, has more dims than the tensor, or names an axis twice.
    """
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        raise ShardingError(f"{spec!r} is no spec", "give a tuple with an axis or None for each dim: ('data', None)")
    dims = tuple(_parse_axes(each) for each in spec)
    named = [axis for dim in dims for axis in dim]
    if len(set(named)) != len(named):
        raise ShardingError(f"the spec {tuple(spec)} names an axis twice", "split at most one dim over an axis")
    if rank is None:
        return dims
    if len(dims) > rank:
        raise ShardingError(f"the spec {tuple(spec)} is for {len(dims)} dims", f"the tensor has {rank}")
    return dims + ((),) * (rank - len(dims))


def _parse_axes(given: object) -> tuple[str, ...]:
    axes = () if given is None else (given,) if isinstance(given, str) else given
    if not isinstance(axes, tuple) or not all(isinstance(axis, str) and axis.isidentifier() for axis in axes):
        raise ShardingError(f"{given!r} in a spec", "give None, the name of an axis, or a tuple of names")
    return axes


def parse_sharding(mesh: Mesh, spec: Spec, shape: Sequence[int], what: str = "the tensor") -> Sharding:
    """The sharding that a spec gives a tensor.

    Args:
        what: names the tensor in errors.

    Raises:
        ShardingError: it is no spec for such a tensor, the mesh lacks an axis, or an axis does not divide its dim.
    """
    made = Sharding(mesh, parse_dims(spec, len(shape)))
    for dim, axes in enumerate(made.dims):
        parts = mesh.count(axes)
        if shape[dim] % parts:
            raise ShardingError(
                f"dim {dim} of {what} has size {shape[dim]}, which {parts} devices ({', '.join(axes)}) do not divide",
                "split another dim, pad the dim, or take a bucket policy of multiples (dynaxla.Multiples)",
            )
    return made
