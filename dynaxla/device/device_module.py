"""`torch.dynaxla`: what torch and users ask of the device beside its tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from struct import Struct
from types import ModuleType
from typing import Any

import torch

from dynaxla.device.op_call import check_index
from dynaxla.device.storage import DeviceStorages
from dynaxla.errors import ExecutionError
from dynaxla.isolation.forking import new_lock
from dynaxla.runtime.pjrt_clients import PjrtClient
from dynaxla.runtime.transfers import memory_stats
from dynaxla.torch_api.generators import DRAW_STRIDE
from dynaxla.types import DEVICE_TYPE

DeviceLike = torch.device | str | int | None
_STATE = Struct("<QQ")


class Generator:
    """The device's default generator: a seed, and an offset that every draw moves, in the layout of CUDA's Philox generator.

    What a draw takes is a hash of both, so that the draws of two seeds or offsets have nothing in common.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self.manual_seed(torch.initial_seed())

    def manual_seed(self, seed: int) -> None:
        """
        Raises:
            ValueError: the seed does not fit into 64 bits.
        """
        taken = torch.Generator(device="cpu").manual_seed(seed).initial_seed()
        with self._lock:
            self._seed, self._offset = taken, 0

    def state(self) -> torch.Tensor:
        """uint8 [16] on the host: the seed, then the offset, each of 8 bytes, the lowest first."""
        with self._lock:
            return torch.frombuffer(bytearray(self._packed()), dtype=torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        """
        Raises:
            RuntimeError: it is no state of this device's.
        """
        if state.dtype != torch.uint8 or state.shape != (_STATE.size,):
            raise RuntimeError(
                f"a state of torch.{DEVICE_TYPE} is uint8 [{_STATE.size}], a seed and an offset, "
                f"not {state.dtype} {list(state.shape)}"
            )
        with self._lock:
            self._seed, self._offset = _STATE.unpack(bytes(state.tolist()))

    def initial_seed(self) -> int:
        return self._seed

    def seed(self, given: torch.Generator | None = None) -> torch.Tensor:
        """A seed, int64 [], of this generator or of one of the user's, which advances."""
        if given is not None:
            return torch.empty((), dtype=torch.int64, device="cpu").random_(generator=given)
        with self._lock:
            drawn = blake2b(self._packed(), digest_size=8).digest()
            self._offset = (self._offset + DRAW_STRIDE) % 2**64
        return torch.tensor(int.from_bytes(drawn, "little", signed=True), device="cpu")

    def make_host_generator(self) -> torch.Generator:
        """A generator for an op that the host computes: its seed is a draw of this one."""
        return torch.Generator(device="cpu").manual_seed(int(self.seed()))

    def _packed(self) -> bytes:
        return _STATE.pack(self._seed, self._offset)


class Stream:
    """The one stream of the device, on which PJRT runs everything in the order of the calls."""

    def __init__(self, module: DeviceModule) -> None:
        self._module = module

    @property
    def device(self) -> torch.device:
        return torch.device(DEVICE_TYPE, 0)

    def synchronize(self) -> None:
        self._module.synchronize()

    def wait_stream(self, stream: Stream) -> None:
        """There is one, which waits for itself."""

    def wait_event(self, event: Event) -> None:
        """What was recorded comes before what follows: there is one stream."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event of what was submitted so far."""
        return (event or Event(self._module)).record(self)

    def query(self) -> bool:
        """Whether all work is done: it is, after waiting for it."""
        self.synchronize()
        return True


class Event:
    """A moment of the one stream."""

    def __init__(self, module: DeviceModule, enable_timing: bool = False) -> None:
        self._module = module
        self._is_timed = enable_timing
        self._moment: float | None = None

    def record(self, stream: Stream | None = None) -> Event:
        """Marks what was submitted so far; a timed event waits for it."""
        if self._is_timed:
            self._module.synchronize()
        self._moment = time.perf_counter()
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """What was recorded comes before what follows: there is one stream."""

    def query(self) -> bool:
        """Whether what was recorded is done: it is, after waiting for it."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Waits for what was submitted."""
        self._module.synchronize()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to another, both timed.

        Raises:
            ValueError: one of them was not recorded, or is not timed.
        """
        if self._moment is None or end_event._moment is None or not (self._is_timed and end_event._is_timed):
            raise ValueError("both events must be recorded, and made with enable_timing=True")
        return 1000 * (end_event._moment - self._moment)


class DeviceModule(ModuleType):
    """The module. Everything that takes a device takes number 0 alone, as a number, a text or a `torch.device`."""

    def __init__(
        self, client: PjrtClient, memories: DeviceStorages, generator: Generator, force: Callable[[], None]
    ) -> None:
        super().__init__(f"torch.{DEVICE_TYPE}", "The device of dynaxla: docs/device.md.")
        self._client = client
        self._memories = memories
        self._generator = generator
        self._force = force
        self._most_bytes = 0
        self._stream = Stream(self)
        self.Stream, self.Event = self.stream_of, partial(Event, self)

    # What is there

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    @property
    def _initialized(self) -> bool:
        """Asked by `torch.utils.checkpoint`, which else keeps no state of the generator for what it computes again."""
        return True

    def device_count(self) -> int:
        """One: torch's Python hooks know no more of a type. `dynaxla.use` says which of the platform's it is."""
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: DeviceLike) -> None:
        """Raises:
        RuntimeError: it is another than number 0.
        """
        self._check(device)

    @contextmanager
    def device(self, device: DeviceLike) -> Iterator[None]:
        """Computes on the device within the context: it is always so."""
        self._check(device)
        yield

    def get_device_name(self, device: DeviceLike = None) -> str:
        """What PJRT calls it."""
        self._check(device)
        return str(self._client.device.device_kind)

    def platform(self) -> str:
        """PJRT's platform: "cpu", "cuda", "tpu"."""
        return self._client.platform

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return self._memories.is_lost

    # Work under way

    def synchronize(self, device: DeviceLike = None) -> None:
        """Waits until everything that was computed is there.

        Raises:
            ExecutionError: a run failed whose result nobody read.
        """
        self._check(device)
        self._force()
        for memory in self._memories:
            for buffer in memory.buffers:
                try:
                    self._client.wait_for(buffer)
                except ExecutionError as error:
                    raise memory.make_error(error) from error

    def current_stream(self, device: DeviceLike = None) -> Stream:
        self._check(device)
        return self._stream

    default_stream = current_stream

    def stream_of(self, device: DeviceLike = None, priority: int = 0) -> Stream:
        """The one stream, whatever its priority."""
        return self.current_stream(device)

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        """There is one stream."""
        yield

    # Memory

    def memory_allocated(self, device: DeviceLike = None) -> int:
        """Bytes of the buffers that tensors have."""
        self._check(device)
        held = self._memories.bytes_held
        self._most_bytes = max(self._most_bytes, held)
        return held

    def max_memory_allocated(self, device: DeviceLike = None) -> int:
        """The most that PJRT had in use; where it does not say, the most that `memory_allocated` gave."""
        self.memory_allocated(device)
        return int(memory_stats(self._client).get("peak_bytes_in_use", self._most_bytes))

    def memory_stats(self, device: DeviceLike = None) -> dict[str, Any]:
        """What PJRT says, and "tensors.bytes" and "tensors.memories" of this package."""
        held = {"tensors.bytes": self.memory_allocated(device), "tensors.memories": len(self._memories)}
        return {**memory_stats(self._client), **held}

    def empty_cache(self) -> None:
        """PJRT keeps its memory itself."""

    # Random numbers. What makes or reads a state is hidden from Dynamo, which traces functions that run between two graphs.

    def manual_seed(self, seed: int) -> None:
        self._generator.manual_seed(int(seed))

    manual_seed_all = manual_seed

    def draw_seed(self) -> torch.Tensor:
        """A seed, int64 [], on the host; the generator advances."""
        return self._generator.seed()

    def initial_seed(self) -> int:
        return self._generator.initial_seed()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def get_rng_state(self, device: DeviceLike = None) -> torch.Tensor:
        """The generator's state, uint8 [16] on the host: a seed and an offset, as CUDA's."""
        self._check(device)
        return self._generator.state()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def set_rng_state(self, new_state: torch.Tensor, device: DeviceLike = None) -> None:
        """
        Raises:
            RuntimeError: it is no state of this device's.
        """
        self._check(device)
        self._generator.set_state(new_state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state()]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        self.set_rng_state(new_states[0])

    def _check(self, device: DeviceLike) -> None:
        index = device if isinstance(device, int) else None if device is None else torch.device(device).index
        if index is not None and index > 0:
            check_index(torch.device(DEVICE_TYPE, index))
