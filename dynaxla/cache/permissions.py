"""Whether a folder may be believed: who can put a file there can run code in every process that loads it."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from dynaxla.isolation.disk import CACHE_VARIABLE

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def trusted_owners() -> frozenset[int]:
    """Users whose files are believed: this process's, and root, who can do anything anyway."""
    return frozenset({os.geteuid(), 0})


def find_other_writers(status: os.stat_result) -> str | None:
    """Who else than this process's user and root can write to a file or folder; None if nobody can."""
    if status.st_uid not in trusted_owners():
        return f"it belongs to {_user(status.st_uid)}"
    if status.st_mode & _OTHERS_WRITE:
        return f"other users can write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def find_distrust_of(folder: Path, *, read_only: bool, variable: str = CACHE_VARIABLE) -> str | None:
    """Why a folder is not believed, and what to do about it; None if it is.

    Args:
        read_only: whether it is only read: then it may be root's.
        variable: of the environment, names another.

    Raises:
        OSError: it is not there, or cannot be looked at.
    """
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is no folder"
    reason = find_other_writers(status)
    if reason is None and not read_only and status.st_uid != os.geteuid():
        reason = "it belongs to root"
    if reason is not None:
        return f"{folder} is not used: {reason}; `chown` it to your user and `chmod go-w` it, or set {variable}"
    for above in _above(folder):
        if (reason := _replaceable(above.stat())) is not None:
            return f"{folder} is not used, because of {above}: {reason}; `chmod go-w` that, or set {variable}"
    return None


def _above(folder: Path) -> Iterator[Path]:
    """The folders on the way to it, those behind links too."""
    yield from dict.fromkeys([*folder.parents, *Path(os.path.realpath(folder)).parents])


def _replaceable(status: os.stat_result) -> str | None:
    """Who else can put another folder in the place of one in this; in a sticky one, such as /tmp, only owners can."""
    if status.st_uid not in trusted_owners():
        return find_other_writers(status)
    own_group = status.st_mode & _OTHERS_WRITE == stat.S_IWGRP and _is_private(status.st_gid)
    return None if status.st_mode & stat.S_ISVTX or own_group else find_other_writers(status)


def _is_private(group: int) -> bool:
    """Whether it is the group of this user alone: where such are usual, folders are writable by their group."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return found.gr_name == user.pw_name and found.gr_gid == user.pw_gid and set(found.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
