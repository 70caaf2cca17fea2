"""Counts of the sizes that were seen, to plan buckets from."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Self

from dynaxla.errors import OptionError
from dynaxla.isolation.disk import replace_file
from dynaxla.isolation.forking import new_lock


class Histogram:
    """How often each combination of sizes was seen. Any thread may call any method at any time."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._counts: Counter[tuple[int, ...]] = Counter()

    def add(self, *sizes: int) -> None:
        """Counts one observation: the size of the dim, or of each dim that varies."""
        with self._lock:
            self._counts[sizes] += 1

    def counts(self) -> dict[tuple[int, ...], int]:
        """A copy: sizes to the number of observations."""
        with self._lock:
            return dict(self._counts)

    def merge(self, other: Histogram) -> None:
        """Adds the counts of another histogram to this one."""
        # Copied first: holding both locks at once could wait forever for a thread that merges the other way round.
        counts = other.counts()
        with self._lock:
            self._counts.update(counts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file, readable by its owner alone. A reader sees the old file or the whole new one.

        Raises:
            OSError: the folder is not there, or not writable.
        """
        document = {"counts": [[list(sizes), count] for sizes, count in sorted(self.counts().items())]}
        replace_file(Path(path), [json.dumps(document).encode()])

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote.

        Raises:
            OptionError: the file holds something else.
            OSError: it can not be read.
        """
        content = Path(path).read_bytes()
        histogram = cls()
        try:
            for sizes, count in json.loads(content)["counts"]:
                histogram._counts[_whole_numbers(sizes)] += _whole_numbers([count])[0]
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(
                f"{os.fspath(path)} is not a histogram of sizes: {type(error).__name__}: {error}",
                "delete the file, or write it anew with Histogram.save",
            ) from error
        return histogram


def _whole_numbers(values: object) -> tuple[int, ...]:
    """Raises ValueError unless the value is a list of whole numbers >= 0."""
    if not isinstance(values, list) or not values or any(type(value) is not int or value < 0 for value in values):
        raise ValueError(f"{values!r} is not a list of whole numbers >= 0")
    return tuple(values)
