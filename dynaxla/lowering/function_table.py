"""The functions of a process."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from dynaxla.lowering.shape_templates import ShapeTemplates
from dynaxla.lowering.stablehlo_functions import FunctionKey, StablehloFunction
from dynaxla.ops.record import Body


class FunctionTable:
    """The functions of a process, of every distinct call, platform and precision. Safe from several threads."""

    def __init__(self) -> None:
        self._by_torch_mlir: dict[FunctionKey, StablehloFunction] = {}
        self._torch_mlirs = ShapeTemplates()
        # By body: what belongs to one compiled graph goes with it.
        self._by_body: WeakKeyDictionary[Body, dict[FunctionKey, StablehloFunction]] = WeakKeyDictionary()
        self._bodies: WeakKeyDictionary[Body, ShapeTemplates] = WeakKeyDictionary()

    @property
    def names(self) -> list[str]:
        """The symbols of the functions that are kept."""
        stores = (self._by_torch_mlir, *self._by_body.values())
        return [function.name for store in stores for function in store.values()]

    def functions_of(self, body: Body | None) -> dict[FunctionKey, StablehloFunction]:
        """The functions that a body gave, or torch-mlir."""
        return self._by_torch_mlir if body is None else self._by_body.setdefault(body, {})

    def resizer(self, body: Body | None) -> ShapeTemplates:
        """What writes functions from those that a body gave, or torch-mlir."""
        return self._torch_mlirs if body is None else self._bodies.setdefault(body, ShapeTemplates())
