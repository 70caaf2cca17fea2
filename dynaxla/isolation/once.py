"""What a process makes once, whichever of its threads asks first, and whole, whatever interrupts it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

from dynaxla.isolation.forking import new_reentrant_lock
from dynaxla.isolation.interrupts import defer_interrupts

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


def once(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """`functools.cache` for what has a state or an identity: two threads that ask at once get the same object.

    `functools.cache` calls the function in both threads and hands each its own result: two states of one process, two clients
    of one device. Here the second thread waits for the first. An interrupt is raised when the object is made, and the next
    caller finds it: half an import of a native library, or half a change of torch, could not be made again. Arguments are
    hashable, and given by position.
    """
    lock = new_reentrant_lock()
    made: dict[tuple[Any, ...], Made] = {}

    @wraps(make)
    def make_alone(*args: Any) -> Made:
        with lock:
            if args not in made:
                with defer_interrupts():
                    made[args] = cast(Callable[..., Made], make)(*args)
            return made[args]

    return cast(Callable[Arguments, Made], cache(make_alone))  # found without the lock, and without a Python frame
