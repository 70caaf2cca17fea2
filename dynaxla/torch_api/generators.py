"""`torch.Generator(device=...)` for a device whose generators only C++ can create: its ops draw their seeds from the CPU's.

Relies on `torch._C.Generator`, which can be subclassed, and on users getting it as `torch.Generator`.
"""

from __future__ import annotations

from typing import Any

import torch

_Generator: Any = torch._C.Generator


def give_generators(own: torch.device) -> None:
    """Has `torch.Generator(device)` return a CPU generator for the device `own`. `isinstance` checks of generators still hold.

    Dynamo would not accept a generator of another class. TorchScript recognizes `torch.Generator` in annotations by identity: a
    function annotated before this call cannot be scripted after it.

    Raises (when a generator is made):
        RuntimeError: the device has the type of `own` and another index.
    """

    class Kind(type(_Generator)):  # type: ignore[misc]
        def __call__(cls, device: Any = "cpu") -> Any:
            wanted = torch.device(device)
            if wanted.type != own.type:
                return _Generator(wanted)
            if wanted.index not in (None, own.index):
                raise RuntimeError(f"there is no {wanted}, and no generator of it: the device is {own}")
            return _Generator()

        def __instancecheck__(cls, thing: object) -> bool:
            return isinstance(thing, _Generator)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, _Generator)

    torch.Generator = Kind("Generator", (_Generator,), {"__doc__": _Generator.__doc__, "__module__": "torch"})  # type: ignore[misc]
