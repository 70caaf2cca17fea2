"""Checks that the settings of servers share."""

from __future__ import annotations

from dynaxla.errors import OptionError


def require_positive_int(name: str, value: object) -> None:
    """Raises:
    OptionError: the value of this setting is no whole number above 0.
    """
    if type(value) is not int or value < 1:
        raise OptionError(f"{name}={value!r} is not a whole number >= 1", f"write {name}=16, for instance")
