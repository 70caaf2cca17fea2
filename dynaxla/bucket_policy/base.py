"""What a bucket policy is, and the checks of what policies are made with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from dynaxla.errors import OptionError


class BucketPolicy(ABC):
    """From sizes to buckets; the subclasses are frozen values."""

    __slots__ = ()

    def bucket(self, size: int) -> int:
        """The bucket of a size >= 0."""
        return size if size <= 1 else self._bucket(size)

    def buckets(self, low: int, high: int) -> tuple[int, ...]:
        """Every bucket of the sizes from low to high, both included, ascending; empty where low > high."""
        return tuple(self._walk(low, high))

    def _walk(self, low: int, high: int) -> Iterator[int]:
        size = low
        while size <= high:
            bucket = self.bucket(size)
            yield bucket
            size = bucket + 1

    @abstractmethod
    def _bucket(self, size: int) -> int:
        """The bucket of a size >= 2."""


class JointPolicy(ABC):
    """From the sizes of several dims together to their buckets; the subclasses are frozen values.

    Each size keeps the first two promises of a policy of one dim while the other sizes stay. The others are not kept: the
    bucket of a size depends on the other sizes, and may fall or grow when one of these grows.
    """

    __slots__ = ()

    @abstractmethod
    def bucket(self, *sizes: int) -> tuple[int, ...]:
        """The buckets of sizes >= 0; sizes 0 and 1 are their own."""


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
    """Raises OptionError unless the value says what becomes of a size above the largest bucket."""
    if above not in ("error", "exact"):
        raise OptionError(f"above={above!r} is not known", 'write above="exact" or above="error"')
