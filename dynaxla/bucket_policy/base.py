"""Base classes of bucket policies, and checks of their parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from dynaxla.errors import OptionError


class BucketPolicy(ABC):
    """Maps sizes to buckets; the subclasses are frozen values."""

    __slots__ = ()

    def bucket(self, size: int) -> int:
        """Returns the bucket of a size >= 0."""
        return size if size <= 1 else self._bucket(size)

    def buckets(self, low: int, high: int) -> tuple[int, ...]:
        """Returns all buckets of the sizes from low to high, inclusive, in ascending order; empty if low > high."""
        return tuple(self._walk(low, high))

    def _walk(self, low: int, high: int) -> Iterator[int]:
        size = low
        while size <= high:
            bucket = self.bucket(size)
            yield bucket
            size = bucket + 1

    @abstractmethod
    def _bucket(self, size: int) -> int:
        """Returns the bucket of a size >= 2."""


class JointPolicy(ABC):
    """Maps the sizes of several dims together to their buckets; the subclasses are frozen values.

    Buckets are their own buckets, as in a policy of one dim. While the other sizes stay, each size has the first two guarantees
    too. The last does not hold: the bucket of a size depends on the other sizes, and may shrink or grow when one of them grows.
    """

    __slots__ = ()

    @abstractmethod
    def bucket(self, *sizes: int) -> tuple[int, ...]:
        """Returns the buckets of sizes >= 0; sizes 0 and 1 are their own buckets."""


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_whole(value: object, least: int, name: str) -> None:
    if type(value) is not int or value < least:
        raise OptionError(f"{name} is {value!r}", f"write a whole number >= {least}")


def require_power_of_two(value: int, name: str) -> None:
    require_whole(value, 1, name)
    if value & (value - 1):
        raise OptionError(f"{name} is {value}, which is not a power of two", f"write {next_power_of_two(value)}")


def next_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def require_above(above: object) -> None:
    """Raises OptionError unless the value is one of the two treatments of a size above the largest bucket."""
    if above not in ("error", "exact"):
        raise OptionError(f"above={above!r} is not known", 'write above="exact" or above="error"')
