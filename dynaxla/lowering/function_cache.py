"""Functions on disk, for later processes: a call that was lowered once is not lowered again, on whatever processor."""

from __future__ import annotations

import json
from dataclasses import dataclass

from dynaxla.cache.environment_key import Environment, versions
from dynaxla.cache.key import Key
from dynaxla.cache.kinds import FUNCTION
from dynaxla.cache.store import Store
from dynaxla.lowering.exact_division import DivisionFlow
from dynaxla.lowering.stablehlo_functions import FunctionKey, StablehloFunction
from dynaxla.ops.record import Body
from dynaxla.ops.table import core_table
from dynaxla.options import Options
from dynaxla.runtime.xla import settings
from dynaxla.torch_api.overloads import OpOverload

KIND = FUNCTION.name


@dataclass(frozen=True, slots=True)
class FunctionCache:
    """Attributes:
    store: on disk; None: nothing is stored.
    beside: the digest of a key of all that a function depends on beside its call, made once for many calls.
    """

    store: Store | None
    beside: str

    @classmethod
    def of(cls, store: Store | None, options: Options) -> FunctionCache:
        """With JAX's settings of now."""
        if store is None:
            return cls(None, "")
        return cls(store, FUNCTION.key(options, Environment({}, settings(), versions())).digest)

    def find(self, target: OpOverload, body: Body | None, key: FunctionKey) -> StablehloFunction | None:
        """The stored function of a call: of its body, or of torch-mlir."""
        if self.store is None or not is_own(target, body):
            return None
        found = self.store.get(KIND, self._disk_key(target, body, key))
        return None if found is None else _unpack(found)

    def put(self, target: OpOverload, body: Body | None, key: FunctionKey, function: StablehloFunction) -> None:
        """Stores a function, unless it is of a body of the user's: nothing says what that computes."""
        if self.store is not None and is_own(target, body):
            self.store.put(KIND, self._disk_key(target, body, key), _pack(function), {"op": str(target)})

    def _disk_key(self, target: OpOverload, body: Body | None, key: FunctionKey) -> Key:
        own = core_table().records.get(target)
        by = "torch-mlir" if body is None else "body" if own is None or own.body is body else "on_tpu"
        return Key.of(by=by, call=key, beside=self.beside)


def is_own(target: OpOverload, body: Body | None) -> bool:
    """Whether a call is torch-mlir's, or a body's of this package."""
    own = None if body is None else core_table().records.get(target)
    return body is None or (own is not None and body in (own.body, own.on_tpu))


def _pack(function: StablehloFunction) -> bytes:
    flow = function.flow
    places = [sorted(flow.stepped), [sorted(results) for results in flow.passed], sorted(flow.quotients)]
    return json.dumps([function.name, function.text, function.exact, places, function.unfinished]).encode()


def _unpack(packed: bytes) -> StablehloFunction:
    name, text, exact, (stepped, passed, quotients), unfinished = json.loads(packed)
    flow = DivisionFlow(frozenset(stepped), tuple(map(frozenset, passed)), frozenset(quotients))
    return StablehloFunction(name, text, exact, flow, unfinished)
