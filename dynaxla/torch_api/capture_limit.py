"""Raises Dynamo's limit of captures per function for this package, unless the user set one.

Beyond the limit, which is 8 and counts the captures of all models of a class together, calls run in eager. A model that
generates has a capture for the prompt and one for a step, each again beyond the end of a sliding window, and each again
for batches, beams and kinds of caches: a small number, but larger than 8.

Relies on `exceeds_recompile_limit`, which `torch._dynamo.convert_frame._compile` looks up in its module and calls
before it captures, on `_compile`'s variable `compiler_fn`, and on the `_recompile_limit` of the converter that calls
it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch._dynamo import cache_size, config, convert_frame

from dynaxla.torch_api.dynamo import is_ours
from dynaxla.torch_api.frames import variables_of

_LIMIT = 64
_DEFAULT_LIMIT = 8


@cache
def raise_limit() -> None:
    """Has Dynamo capture a function up to 64 times for this package's backend, once per process.

    The user's setting has priority: `torch._dynamo.config.recompile_limit` other than 8, or
    `torch.compile(recompile_limit=...)`. Other backends are not affected.
    """
    own = _with_limit(cache_size.exceeds_recompile_limit)
    convert_frame.exceeds_recompile_limit = own  # type: ignore[attr-defined]


def most_captures() -> int:
    """Returns Dynamo's limit of captures for the current function, or for any function if none is being captured.
    Relies on the setting `recompile_limit`."""
    return _LIMIT if _uses_own_limit() else config.recompile_limit


def _with_limit(exceeds: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(exceeds)
    def exceeds_own_limit(*args: Any, **kwargs: Any) -> Any:
        if not _uses_own_limit():
            return exceeds(*args, **kwargs)
        with config.patch(recompile_limit=_LIMIT):
            return exceeds(*args, **kwargs)

    return exceeds_own_limit


def _uses_own_limit() -> bool:
    """Whether Dynamo captures for this package's backend with no limit set by the user."""
    if config.recompile_limit != _DEFAULT_LIMIT:
        return False
    at, caller = (variables_of(function, convert_frame.__name__) for function in ("_compile", "__call__"))
    if at is None or (caller is not None and caller["self"]._recompile_limit is not None):
        return False
    return is_ours(at["compiler_fn"])
