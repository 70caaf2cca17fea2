"""Random numbers of a device whose generators only C++ can create: `torch.Generator(device=...)`, and draws of DTensors.

Relies on `torch._C.Generator`, which can be subclassed, and on users getting it as `torch.Generator`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, wraps
from hashlib import blake2b
from typing import Any

import torch

DRAW_STRIDE = 4
"""By how much a draw moves the offset of the device's generator, as CUDA's least."""

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


class UntracedDrawError(NotImplementedError):
    """A graph would have the draw for a shard of a DTensor as an op of torch's, which knows nothing of the shard."""


class _TracedShard(threading.local):
    """The shard of a DTensor for which this thread traces an op that draws.

    Attributes:
        number: which shard, counted row-major, 0 outside of such an op.
        draws: how many draws were traced for it.
    """

    number = 0
    draws = 0


@cache
def _traced() -> _TracedShard:
    return _TracedShard()


def take_traced_shard() -> int:
    """Which shard of a DTensor the draw is for that is being traced; 0 for other tensors."""
    traced = _traced()
    traced.draws += 1
    return traced.number


def draw_shards_apart(own: str) -> None:
    """Has ops that draw for DTensors give the shards of one different numbers, and replicas the same.

    torch's own way goes by the generator's offset: it gives shards of less than four elements the same numbers, knows no
    generators that are on the host, and reads the state while a graph is traced, when it is not that of the call.

    Args:
        own: the device's type, whose module has a state of 16 bytes, a seed and an offset.

    Relies on `OffsetBasedRNGTracker._distribute_region`, in which torch runs such an op on this process's shard, on
    `_calc_shard_info` and `_calc_shard_linear_idx`, and on the modes of fake tensors and of traces, `_get_dispatch_mode`.
    """
    from torch.distributed.tensor import _random

    tracker: Any = _random.OffsetBasedRNGTracker
    theirs = tracker._distribute_region

    @contextmanager
    def distribute(self: Any, spec: Any, generator: torch.Generator | None = None) -> Iterator[None]:
        if self._device.type != own or not self.distribute_region_enabled:
            with theirs(self, spec, generator):
                yield
            return
        place, counts = _random._calc_shard_info([*map(spec.mesh._sym_get_coordinate, range(spec.mesh.ndim))], spec)
        shard, shards = int(_random._calc_shard_linear_idx(place, counts)), int(math.prod(counts))
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            region = _trace_for_shard(shard, shards, generator)
        else:
            region = _draw_for_shard(self._device_handle, shard, shards, generator)
        with region:
            yield

    tracker._distribute_region = torch.compiler.disable(wraps(theirs)(distribute))


@contextmanager
def _draw_for_shard(module: Any, shard: int, shards: int, generator: torch.Generator | None) -> Iterator[None]:
    """Gives each shard a seed of its own, a hash of the generator's state, and moves that by one draw: however often an
    op draws, it shares no draw with another shard or op. A generator of the user's gives a seed for all shards."""
    if generator is None and shards == 1:
        yield
        return
    state = module.get_rng_state()
    start = state.clone()
    seed, offset = start.view(torch.int64)
    if generator is not None:
        seed.random_(generator=generator)
        offset.zero_()
    if shards > 1:
        of_shard = blake2b(bytes(start.tolist()), digest_size=8, salt=shard.to_bytes(8, "little")).digest()
        seed.fill_(int.from_bytes(of_shard, "little", signed=True))
        offset.zero_()
    module.set_rng_state(start)
    try:
        yield
    finally:
        if generator is None:
            state.view(torch.int64)[1] += DRAW_STRIDE
        module.set_rng_state(state)


@contextmanager
def _trace_for_shard(shard: int, shards: int, generator: torch.Generator | None) -> Iterator[None]:
    """
    Raises:
        UntracedDrawError: the graph has the draw as an op of torch's.
    """
    traced = _traced()
    traced.number, before = shard, traced.draws
    try:
        yield
    finally:
        traced.number = 0
    is_unknown = generator is not None or (shards > 1 and traced.draws == before)
    if is_unknown and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise UntracedDrawError("a DTensor's draw from a given generator, or with the option rng='eager'")
