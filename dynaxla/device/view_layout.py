"""How a tensor lies in a memory, and how a program reads and writes it there.

A memory holds one row-major array. A tensor of it has sizes, strides and an offset of its own, in elements of its own dtype.
Where its strides are those of a grid into which the array can be cut, it is read by a window, steps and a permutation, and
the window's place is an input of the program: what reads `x[i]` is compiled once for all `i`. Any other tensor is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dynaxla.custom_ops.dynamic_slice import WINDOW, WINDOW_SCATTER
from dynaxla.custom_ops.internal import GATHER_STRIDED
from dynaxla.types import TensorSpec, row_major_strides

aten = torch.ops.aten
Ints = tuple[int, ...]


class OverlappingView(Exception):
    """Several elements of a tensor share a place, or it does not end where an element of its memory does."""


@dataclass(frozen=True, slots=True)
class WindowGrid:
    """A cut of a memory's array in which a tensor is a window with steps.

    Attributes:
        sizes: of the array, seen so.
        extents: of the window, in each of its dims.
        steps: the distance of two of the tensor's elements, in each of its dims.
        order: for each dim of the tensor the grid's dim that it walks along; None: it walks nowhere.
        ones: for each dim of the tensor that has one element the grid's dim whose stride it has, else None. It changes no
            value, but torch chooses the strides of results by it: an image alone in its batch is channels-last or not.
    """

    sizes: Ints
    extents: Ints
    steps: Ints
    order: tuple[int | None, ...]
    ones: tuple[int | None, ...]

    @property
    def is_windowed(self) -> bool:
        return self.extents != self.sizes

    @property
    def walked(self) -> Ints:
        """The grid's dims that the tensor walks along, in the order of its own."""
        return tuple(place for place in self.order if place is not None)

    @property
    def permutation(self) -> Ints:
        """The grid's dims: those walked along, then the others, whose extent is 1."""
        return (*self.walked, *(d for d in range(len(self.sizes)) if d not in self.walked))

    @property
    def permutation_with_ones(self) -> Ints:
        """As `permutation`, with the dims in `ones` in their places."""
        places = [one if place is None else place for place, one in zip(self.order, self.ones, strict=True)]
        first = tuple(place for place in places if place is not None)
        return (*first, *(d for d in range(len(self.sizes)) if d not in first))

    @property
    def counts(self) -> Ints:
        """Elements of the tensor in each of the grid's dims."""
        return tuple((extent - 1) // step + 1 for extent, step in zip(self.extents, self.steps, strict=True))


@dataclass(frozen=True, slots=True)
class ViewLayout:
    """How a tensor lies in a memory; the start of its window is given beside it.

    Attributes:
        memory: of the memory's array.
        tensor: of the tensor.
        strides, offset: where there is no grid, in elements of the tensor's.
        grid: None: the tensor is gathered.
    """

    memory: TensorSpec
    tensor: TensorSpec
    strides: Ints = ()
    offset: int = 0
    grid: WindowGrid | None = None

    @property
    def is_empty(self) -> bool:
        return 0 in self.tensor.shape

    @property
    def is_spread(self) -> bool:
        """Whether a dim repeats the same elements."""
        grid = self.grid
        return grid is not None and any(
            place is None and size > 1 for place, size in zip(grid.order, self.tensor.shape, strict=True)
        )

    @property
    def is_whole(self) -> bool:
        """Whether the tensor has each element of its memory once: who writes it need not know what was there."""
        grid = self.grid
        if grid is None or self.is_spread:
            return self.memory.nbytes == 0
        return not grid.is_windowed and set(grid.steps) <= {1}

    @property
    def is_plain(self) -> bool:
        """Whether the memory's array is the tensor."""
        return self.memory == self.tensor and (self.grid is None or self.grid.order == _own_order(self.tensor.shape))

    @property
    def has_order_of_memory(self) -> bool:
        """Whether the tensor's strides are those of a window of the grid, its dims in any order."""
        return self.grid is not None and set(self.grid.steps) <= {1}

    @property
    def own_strides(self) -> Ints:
        """The tensor's strides in memory. A dim of one element that has no place in the grid has that of row-major order."""
        if self.grid is None:
            return self.strides
        distances, found, inner = row_major_strides(self.grid.sizes), list[int](), 1
        places = [one if place is None else place for place, one in zip(self.grid.order, self.grid.ones, strict=True)]
        for size, place in zip(reversed(self.tensor.shape), reversed(places), strict=True):
            alone = inner if size == 1 else 0
            found.append(alone if place is None else distances[place] * self.grid.steps[place])
            inner = found[-1] * size
        return tuple(reversed(found))

    def read(self, array: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
        """The tensor, of the memory's array and the window's start, int64 [dims of the grid]."""
        if self.is_empty:
            return torch.empty(self.tensor.shape, dtype=self.tensor.dtype)
        if self.is_plain:
            return array
        elements = _retyped(array, self.tensor.dtype)
        if self.grid is None:
            flat = aten.view.default(elements, [-1])
            return GATHER_STRIDED(flat, self.tensor.shape, self.strides, self.offset)  # type: ignore[no-any-return]
        grid = self.grid
        part = _window(_shaped(elements, grid.sizes), grid, starts)
        for dim, step in enumerate(grid.steps):
            if step > 1:
                part = aten.slice.Tensor(part, dim, 0, grid.extents[dim], step)
        moved = _permuted(part, grid.permutation_with_ones)
        ones = [1 if place is None else grid.counts[place] for place in grid.order]
        shaped = _shaped(moved, ones)
        return aten.expand.default(shaped, self.tensor.shape) if self.is_spread else shaped  # type: ignore[no-any-return]

    def write(self, array: torch.Tensor | None, starts: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
        """The memory's array after the tensor was given a value of its sizes and dtype.

        Args:
            array: as it was; None where the tensor is whole.

        Raises:
            CannotWrite: several elements share a place.
        """
        if self.is_plain:
            return value
        if self.is_empty and array is not None:
            return array
        if self.is_spread:
            raise OverlappingView("more than one element of the written-to tensor refers to a single memory location")
        if self.is_whole and self.grid is not None:
            written = _back(value, self.grid)
        else:
            assert array is not None
            elements = _retyped(array, self.tensor.dtype)
            if elements.numel() * elements.itemsize != self.memory.nbytes:
                raise OverlappingView("the memory does not end with an element of the tensor's dtype")
            written = self._written(elements, starts, value)
        typed = _retyped(written, self.memory.dtype)
        return _shaped(typed, self.memory.shape)

    def _written(self, elements: torch.Tensor, starts: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
        if self.grid is None:
            if _meet(self.tensor.shape, self.strides):
                raise OverlappingView("elements of the written-to tensor may share a place in memory")
            flat = aten.view.default(elements, [-1])
            place = self.tensor.shape, self.strides, self.offset
            return aten.as_strided_scatter.default(flat, value, *place)  # type: ignore[no-any-return]
        grid = self.grid
        whole, piece = _shaped(elements, grid.sizes), _back(value, grid)
        if any(step > 1 for step in grid.steps):
            piece = _stepped(_window(whole, grid, starts), piece, grid, 0)
        return WINDOW_SCATTER(whole, piece, starts) if grid.is_windowed else piece  # type: ignore[no-any-return]


def memory_order(strides: Sequence[int]) -> Ints:
    """The dims in the order in which they lie in memory, the outermost first."""
    return tuple(sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim)))


def view_layout_of(memory: TensorSpec, tensor: TensorSpec, strides: Ints, offset: int) -> tuple[ViewLayout, Ints]:
    """How a tensor lies in a memory, and where its window starts; () where it has none.

    Args:
        strides, offset: of the tensor, in its own elements, all inside of the memory.
    """
    if 0 in tensor.shape:
        return ViewLayout(memory, tensor), ()
    for sizes in _cuts(memory, tensor, strides):
        found = _fit(sizes, tensor.shape, strides, offset)
        if found is not None:
            grid, starts = found
            return ViewLayout(memory, tensor, grid=grid), starts if grid.is_windowed else ()
    return ViewLayout(memory, tensor, strides, offset), ()


def _own_order(sizes: Sequence[int]) -> tuple[int | None, ...]:
    return tuple(dim if size > 1 else None for dim, size in enumerate(sizes))


def _cuts(memory: TensorSpec, tensor: TensorSpec, strides: Ints) -> Iterator[Ints]:
    """Sizes of grids in which the tensor may be a window: the memory's own, and one made of its strides."""
    same = memory.dtype is tensor.dtype
    if same:
        yield memory.shape
    count = math.prod(memory.shape) if same else memory.nbytes // tensor.dtype.itemsize
    lengths = {stride for size, stride in zip(tensor.shape, strides, strict=True) if size > 1 and stride > 0}
    made, left = [], count
    for stride in sorted(lengths, reverse=True):
        if left % stride:
            return
        made.append(left // stride)
        left = stride
    yield (*made, left)


def _fit(cut: Ints, sizes: Ints, strides: Ints, offset: int) -> tuple[WindowGrid, Ints] | None:
    """The window of a grid that a tensor is, and its start; None if it is none."""
    distances = row_major_strides(cut)
    starts, left = [], offset
    for size, distance in zip(cut, distances, strict=True):
        starts.append(left // distance if size > 1 else 0)
        left -= starts[-1] * distance
    extents, steps, order = [1] * len(cut), [1] * len(cut), list[int | None]()
    if left:
        return None
    for size, stride in zip(sizes, strides, strict=True):
        order.append(None)
        if size == 1 or stride == 0:
            continue
        for dim, distance in enumerate(distances):
            step, rest = divmod(stride, distance)
            inside = starts[dim] + (size - 1) * step < cut[dim]
            if step and not rest and inside and dim not in order:
                order[-1], extents[dim], steps[dim] = dim, (size - 1) * step + 1, step
                break
        else:
            return None
    ones = _ones(distances, sizes, strides, order)
    return WindowGrid(cut, tuple(extents), tuple(steps), tuple(order), ones), tuple(starts)


def _ones(distances: Ints, sizes: Ints, strides: Ints, order: Sequence[int | None]) -> tuple[int | None, ...]:
    """As `WindowGrid.ones`; all None where the tensor's dims are in the order of the grid's."""
    found: list[int | None] = []
    for size, stride in zip(sizes, strides, strict=True):
        free = (dim for dim, distance in enumerate(distances) if distance == stride and dim not in (*order, *found))
        found.append(next(free, None) if size == 1 else None)
    places = [one if place is None else place for place, one in zip(order, found, strict=True)]
    known = [place for place in places if place is not None]
    return (None,) * len(found) if known == sorted(known) else tuple(found)


def _retyped(array: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The array's bytes as elements of another dtype, flat if it is another; what is left at the end is cut off."""
    if array.dtype is dtype:
        return array
    flat = aten.view.default(array, [-1])
    fitting = flat.numel() * array.itemsize // dtype.itemsize * dtype.itemsize // array.itemsize
    if fitting != flat.numel():
        flat = aten.slice.Tensor(flat, 0, 0, fitting)
    return aten.view.dtype(flat, dtype)  # type: ignore[no-any-return]


def _shaped(array: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
    return array if array.shape == tuple(sizes) else aten.reshape.default(array, list(sizes))


def _permuted(array: torch.Tensor, order: Ints) -> torch.Tensor:
    return array if order == tuple(range(array.dim())) else aten.permute.default(array, list(order))


def _window(whole: torch.Tensor, grid: WindowGrid, starts: torch.Tensor | None) -> torch.Tensor:
    if not grid.is_windowed:
        return whole
    if all(type(size) is int for size in (*grid.sizes, *grid.extents)):
        return WINDOW(whole, starts, list(grid.extents))  # type: ignore[no-any-return]
    for dim, (size, extent) in enumerate(zip(grid.sizes, grid.extents, strict=True)):
        if extent is not size:  # sizes vary, and the op above has no rule for padding
            places = aten.select.int(starts, 0, dim) + aten.arange.default(extent, dtype=torch.int64, device="cpu")
            whole = aten.index_select.default(whole, dim, places)
    return whole


def _back(value: torch.Tensor, grid: WindowGrid) -> torch.Tensor:
    """A tensor's value as its grid has it."""
    order = grid.permutation
    shaped = _shaped(value, [grid.counts[dim] for dim in order])
    return _permuted(shaped, tuple(sorted(range(len(order)), key=order.__getitem__)))


def _stepped(into: torch.Tensor, piece: torch.Tensor, grid: WindowGrid, dim: int) -> torch.Tensor:
    """`into` with `piece` in every step-th place of each dim from `dim` on."""
    while dim < len(grid.steps) and grid.steps[dim] == 1:
        dim += 1
    if dim == len(grid.steps):
        return piece
    place = dim, 0, grid.extents[dim], grid.steps[dim]
    inner = _stepped(aten.slice.Tensor(into, *place), piece, grid, dim + 1)
    return aten.slice_scatter.default(into, inner, *place)  # type: ignore[no-any-return]


def _meet(sizes: Ints, strides: Ints) -> bool:
    """Whether two elements may lie in one place."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
