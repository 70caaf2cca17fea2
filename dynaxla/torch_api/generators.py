"""`torch.Generator(device=...)` for a device whose generators only C++ could make: its ops draw their seeds from the host's.

Relies on `torch._C.Generator`, of which classes may be made, and on `torch.Generator` being the name by which it is asked for.
"""

from __future__ import annotations

from typing import Any

import torch

_Made: Any = torch._C.Generator


def give_generators(own: torch.device) -> None:
    """Has `torch.Generator(device)` give a generator of the host's for a device. What is a generator to torch stays one.

    Of another class Dynamo would take it for no generator. TorchScript knows `torch.Generator` in annotations by its identity:
    a function that was annotated before cannot be scripted behind this.

    Raises (when a generator is made):
        RuntimeError: of the device's type with another index.
    """

    class Kind(type(_Made)):  # type: ignore[misc]
        def __call__(cls, device: Any = "cpu") -> Any:
            wanted = torch.device(device)
            if wanted.type != own.type:
                return _Made(wanted)
            if wanted.index not in (None, own.index):
                raise RuntimeError(f"there is no {wanted}, and no generator of it: the device is {own}")
            return _Made()

        def __instancecheck__(cls, thing: object) -> bool:
            return isinstance(thing, _Made)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, _Made)

    torch.Generator = Kind("Generator", (_Made,), {"__doc__": _Made.__doc__, "__module__": "torch"})  # type: ignore[misc]
