"""What surrounds a call: transforms (`torch.func`, `torch.autograd.forward_ad`) and the tensors that they wrap, dispatch modes.

Relies on `torch._C._functorch` and on `forward_ad._current_level`, which is negative while no dual level is entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _dispatch_tls_is_dispatch_key_excluded as _is_key_excluded
from torch._C import _dispatch_tls_is_dispatch_key_included as _is_key_included
from torch._C import _len_torch_dispatch_stack as _count_modes
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

_functorch = torch._C._functorch
_RUNS_PARTS = "_dynaxla_runs_parts"
_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")
_AUTOGRAD: Any = torch._C._parse_dispatch_key("AutogradFunctionality")


def is_in_transform() -> bool:
    """Whether ops run within a transform of torch.func: vmap, grad, jvp, functionalize.

    Relies on `torch._C._functorch.peek_interpreter_stack`.
    """
    return _functorch.peek_interpreter_stack() is not None


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether vmap has taken a dim of a tensor away: that of torch.func, or that of `torch.autograd.grad` (`is_grads_batched`).

    Relies on `torch._C._functorch.is_batchedtensor` and `is_legacy_batchedtensor`.
    """
    return _functorch.is_batchedtensor(tensor) or _functorch.is_legacy_batchedtensor(tensor)


def is_functional(tensor: torch.Tensor) -> bool:
    """Whether torch.func.functionalize has wrapped a tensor. AOTAutograd, which does so itself, does not capture with these.

    Relies on `torch._is_functional_tensor`.
    """
    return torch._is_functional_tensor(tensor)


def is_surrounded(values: Sequence[Any]) -> bool:
    """Whether what surrounds a call of these arguments is to see its ops: a dispatch mode, which makes other tensors of them
    (`FakeTensorMode`) or counts them; or a transform that has given an argument a tangent, or has wrapped it, whose memory
    then is not all that it is.

    Relies on `torch._C._len_torch_dispatch_stack` and `_get_dispatch_stack_at`; on
    `torch._C._functorch.is_functorch_wrapped_tensor`, which knows batched, differentiated and functional tensors; and on the
    dispatch key "VmapMode" (`_parse_dispatch_key`), included while `torch.autograd.grad` has `is_grads_batched`; and on
    "AutogradFunctionality", excluded in what autograd calls (the dispatch of a subclass), where nothing reads a tangent.
    """
    if _count_modes() and _sees_ops():
        return True
    if forward_ad._current_level < 0 and not is_in_transform() and not _is_key_included(_VMAP_MODE):
        return False
    return any(isinstance(value, torch.Tensor) and _is_wrapped(value) for value in values)


def let_parts_run(mode: TorchDispatchMode) -> None:
    """Says of a dispatch mode of the package's own that it is to see parts called, not their ops."""
    setattr(mode, _RUNS_PARTS, True)


def _sees_ops() -> bool:
    """Whether a dispatch mode is there beside those that `let_parts_run`, and AOTAutograd's own, which at a graph's first run
    looks what custom ops return."""
    from torch._functorch._aot_autograd.runtime_wrappers import _AnalyzeCustomOpInputOutputMode  # imports Dynamo

    modes = map(torch._C._get_dispatch_stack_at, range(_count_modes()))
    return any(
        not isinstance(each, _AnalyzeCustomOpInputOutputMode) and not hasattr(each, _RUNS_PARTS) for each in modes
    )


def _is_wrapped(tensor: torch.Tensor) -> bool:
    if _functorch.is_functorch_wrapped_tensor(tensor) or _functorch.is_legacy_batchedtensor(tensor):
        return True
    return not _is_key_excluded(_AUTOGRAD) and forward_ad.unpack_dual(tensor).tangent is not None
