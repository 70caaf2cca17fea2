"""How often Dynamo captures one function for this package, where nobody set its limit.

Beyond the limit, which is 8 and counts the captures of all models of a class together, calls run in eager. A model that
generates has a capture for the prompt, for a step, for either behind the end of a sliding window, and each again for batches,
beams and kinds of caches: a small number, and larger than 8.

Relies on `exceeds_recompile_limit`, which `torch._dynamo.convert_frame._compile` finds in its module and asks before it
captures, on `_compile`'s variable `compiler_fn`, and on the `_recompile_limit` of the converter that calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch._dynamo import cache_size, config, convert_frame

from dynaxla.torch_api.dynamo import is_ours
from dynaxla.torch_api.frames import variables_of

_MOST = 64
_TORCHS_OWN = 8


@cache
def raise_limit() -> None:
    """Has Dynamo capture a function up to 64 times for this package's backend, once per process.

    What the user says holds: `torch._dynamo.config.recompile_limit` other than 8, or `torch.compile(recompile_limit=...)`. For
    other backends nothing changes.
    """
    own = _own_limit(cache_size.exceeds_recompile_limit)
    convert_frame.exceeds_recompile_limit = own  # type: ignore[attr-defined]


def most_captures() -> int:
    """So often Dynamo captures the function that it is at, or any where it is at none. Relies on the setting
    `recompile_limit`."""
    return _MOST if _is_ours() else config.recompile_limit


def _own_limit(exceeds: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(exceeds)
    def asked(*args: Any, **kwargs: Any) -> Any:
        if not _is_ours():
            return exceeds(*args, **kwargs)
        with config.patch(recompile_limit=_MOST):
            return exceeds(*args, **kwargs)

    return asked


def _is_ours() -> bool:
    """Whether a function is captured for this package's backend, and nobody set a limit."""
    if config.recompile_limit != _TORCHS_OWN:
        return False
    at, caller = (variables_of(function, convert_frame.__name__) for function in ("_compile", "__call__"))
    if at is None or (caller is not None and caller["self"]._recompile_limit is not None):
        return False
    return is_ours(at["compiler_fn"])
