"""Conversions of modules to other devices and dtypes: `to`, `cpu`, `half`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch

from dynaxla.torch_api.private_device import taken_name


def keep_parameters() -> None:
    """Has modules that come to the device, or leave it, keep their parameters: those that are tied stay so, and an optimizer
    that was made before has them still.

    For its own devices torch gives a parameter other data, which takes tensors of one kind; for others it makes new
    parameters, one for each place that a tied one has. Relies on `nn.Module._apply`, through which all conversions go, and
    on `torch.__future__.set_swap_module_params_on_conversion`, which has torch swap the parameters' contents.
    """
    own, future = torch.nn.Module._apply, torch.__future__

    @wraps(own)
    def apply(
        module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> torch.nn.Module:
        if future.get_swap_module_params_on_conversion() or not _crosses(module, fn):
            return own(module, fn, recurse)  # type: ignore[no-any-return]
        future.set_swap_module_params_on_conversion(True)
        try:
            return own(module, fn, recurse)  # type: ignore[no-any-return]
        finally:
            future.set_swap_module_params_on_conversion(False)

    torch.nn.Module._apply = apply  # type: ignore[method-assign]


def _crosses(module: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a module has parameters on the device, or what converts them gives tensors of it."""
    first = next(module.parameters(), None)
    if first is None:
        return False
    with torch.no_grad():
        return taken_name() in {first.device.type, fn(torch.empty(0, dtype=first.dtype, device="cpu")).device.type}
