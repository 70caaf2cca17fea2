"""torch.distributed: how a backend is registered, and what a process group has that is no public name.

Relies on `torch.distributed.distributed_c10d`: its options of a group, gloo's group, the registry of names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import wraps
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


def has_process_groups() -> bool:
    """Whether this build of torch has torch.distributed."""
    return dist.is_available()


def register_backend(name: str, make: Callable[..., Any]) -> None:
    """Makes `name` a backend of `init_process_group` for tensors of the device of that name.

    Args:
        make: called as `make(options, backend_options)`, with `DistributedBackendOptions`; returns a process group.
    """
    dist.Backend.register_backend(name, make, extended_api=True, devices=[name])


def make_gloo_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """gloo's part of a process group, for tensors of the host. Waits for the group's other processes.

    Relies on `ProcessGroupGloo`.
    """
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    return ProcessGroupGloo(store, rank, size, timeout)


def _stores() -> Any:
    """torch's module of stores and options. Relies on `torch._C._distributed_c10d`."""
    from torch._C import _distributed_c10d

    return _distributed_c10d


def make_options(kind: str) -> Any:
    """The default options of a collective: "Allreduce", "Allgather", "ReduceScatter", "AllToAll"."""
    return getattr(_stores(), f"{kind}Options")()


def prefix_store(prefix: str, store: Any) -> Any:
    """A store whose keys begin with a prefix in another one."""
    return _stores().PrefixStore(prefix, store)


def meet_by_environment(limit: timedelta) -> tuple[Any, int, int]:
    """The store that torchrun's variables name, this process's number, and how many there are.

    Relies on `torch.distributed.rendezvous`.
    """
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://", timeout=limit))
    store.set_timeout(limit)
    return store, rank, size


def completed_future(value: Any) -> torch.futures.Future:
    """A future that has its value."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


_Group: Any = dist.ProcessGroup if dist.is_available() else object
# Its methods are overloaded for C++; torch calls Python's with the arguments that are here.


class PythonProcessGroup(_Group):  # type: ignore[misc]
    """A process group whose collectives are Python's, for tensors of one device and for those of the host.

    Relies on `_device_types` and `_get_backend`, by which torch asks a group for what it takes, and on the methods that C++
    calls of Python's groups. Its collectives are hidden from Dynamo, which else captures what C++ calls between two graphs.
    """

    def __init_subclass__(cls) -> None:
        for name, value in list(vars(cls).items()):
            if isinstance(value, FunctionType) and not name.startswith("__"):
                setattr(cls, name, torch.compiler.disable(value))

    def __init__(self, store: Any, rank: int, size: int, device_type: str, host: Any) -> None:
        super().__init__(rank, size)
        self._store = store
        self._name = self._description = ""
        self._device_type = device_type
        self._of_host = host

    def get_group_store(self) -> Any:
        return self._store

    def getBackendName(self) -> str:
        return self._device_type

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        return self._description

    def name(self) -> str:
        return self._device_type

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device(self._device_type)]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type not in ("cpu", self._device_type):
            raise RuntimeError(f"No backend type associated with device type {torch.device(device).type}")
        return self._of_host if torch.device(device).type == "cpu" else self

    def _get_backend_name(self) -> str:
        return self._device_type

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def supports_coalescing(self) -> bool:
        return False

    @property
    def supports_time_estimate(self) -> bool:
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._of_host._set_default_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        self._of_host.shutdown()

    def abort(self) -> None:
        self._of_host.abort()


def keep_used_parameters_on_host(own: str) -> None:
    """Has `DistributedDataParallel` keep on the host which parameters were used: it exchanges that by pinned memory otherwise.

    Args:
        own: the device's type. A process group of it takes tensors of the host as well.

    Relies on `torch.distributed.Reducer`, which makes one tensor of int32 on the parameters' device at its creation and in
    `_set_static_graph`: for the numbers of uses. It copies them without pinned memory where that tensor is on the host.
    """

    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = kwargs or {}
            device = named.get("device") if func is torch.ops.aten.empty.memory_format else None
            if device is not None and device.type == own and named["dtype"] is torch.int32:
                named = {**named, "device": torch.device("cpu")}
            return func(*args, **named)

    class UsesOnHost(dist.Reducer):  # type: ignore[misc,name-defined,attr-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            with OnHost():
                super().__init__(*args, **kwargs)

        def _set_static_graph(self) -> None:
            with OnHost():
                super()._set_static_graph()

    dist.Reducer = UsesOnHost  # type: ignore[misc,attr-defined]


def reduction_of(op: Any) -> tuple[str, Any]:
    """The name of a reduction, as functional collectives have it, and a factor that operands are multiplied by, or None.

    Relies on the names of `ReduceOp.RedOpType`, and on `ReduceOp.factor` of PREMUL_SUM.
    """
    kinds = dist.ReduceOp.RedOpType.__members__
    name = next(name for name, kind in kinds.items() if op == kind)
    if name == "PREMUL_SUM":
        return "sum", op.factor
    return name.lower(), None


def is_unlimited(timeout: timedelta) -> bool:
    """Whether a time limit given to a work is none: torch's default is no milliseconds."""
    return timeout.total_seconds() <= 0


def list_inner_tensors(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that have memory: themselves, and in the place of one of a wrapper subclass those that it is made of.

    torch calls the collectives of Python's groups with the subclass itself, where those of others are ops, which it dispatches.
    Relies on `is_traceable_wrapper_subclass` and `__tensor_flatten__`.
    """
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            found += list_inner_tensors(getattr(tensor, name) for name in names)
        else:
            found.append(tensor)
    return found


def host_of_store(store: Any) -> str | None:
    """The host of a TCP store, below prefixes; None for other stores.

    Relies on `PrefixStore.underlying_store` and `TCPStore.host`.
    """
    while isinstance(store, _stores().PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, _stores().TCPStore) else None


def list_groups() -> list[tuple[str, list[int]]]:
    """Returns the name and the members' ranks of each group that this process knows, by name: that of all is among them.

    Relies on `torch.distributed.distributed_c10d._world.pg_names` and `_world.pg_group_ranks`.
    """
    from torch.distributed.distributed_c10d import _world

    return sorted((str(_world.pg_names[group]), sorted(ranks)) for group, ranks in _world.pg_group_ranks.items())


def find_group(groups: list[int], size: int, ranks: list[int]) -> str:
    """The name of this process's group of several. Relies on `torch.distributed.distributed_c10d._world.pg_group_ranks`.

    Args:
        groups: places in `ranks` of the processes of each group of `size`, one group after the other.
    """
    from torch.distributed.distributed_c10d import _world

    mine = ranks.index(dist.get_rank())
    own = next(groups[i : i + size] for i in range(0, len(groups), size) if mine in groups[i : i + size])
    wanted = [ranks[place] for place in own]
    found = next(group for group, places in _world.pg_group_ranks.items() if sorted(places) == sorted(wanted))
    return str(found.group_name)


def run_functional(
    name: str, groups: list[int], size: int, ranks: list[int], x: torch.Tensor, *arguments: Any
) -> torch.Tensor:
    """Runs a functional collective in eager, in this process's group of several, and waits for it.

    Relies on `torch.ops._c10d_functional`. The groups are those of `find_group`.
    """
    functional = torch.ops._c10d_functional
    started = getattr(functional, name)(x.contiguous(), *arguments, find_group(groups, size, ranks))
    return functional.wait_tensor(started).clone()  # type: ignore[no-any-return]


def permute_in_group(x: torch.Tensor, targets: list[int], name: str) -> torch.Tensor:
    """What the process of a group whose target is this one gives, in eager: that at place i sends to that at `targets[i]`.

    Relies on `torch.ops._c10d_functional`, as `funcol.permute_tensor` does, and on `_resolve_process_group`.
    """
    from torch.distributed import distributed_c10d

    place = dist.get_rank(distributed_c10d._resolve_process_group(name))  # type: ignore[attr-defined,arg-type]
    sent, received = (
        [x.shape[0] * (i == it) for i in range(len(targets))] for it in (targets[place], targets.index(place))
    )
    functional = torch.ops._c10d_functional
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), received, sent, name)).clone()  # type: ignore[no-any-return]


def keep_permutations(own: str, permute: Callable[..., torch.Tensor]) -> None:
    """Has `funcol.permute_tensor` put a permutation into the graph that Dynamo captures, in place of this process's part of it.

    Args:
        own: the device's type.
        permute: the op in the graph: of a tensor of one dim, the targets and the group's name.

    Relies on `torch.distributed._functional_collectives.permute_tensor`, which Dynamo inlines, and on `_resolve_group_name`.
    """
    from torch.distributed import _functional_collectives as functional

    theirs = functional.permute_tensor

    def permute_tensor(self: torch.Tensor, src_dst: list[int], group: Any, tag: str = "") -> torch.Tensor:
        is_whole = sorted(src_dst) == list(range(len(src_dst)))  # else a process receives nothing
        if torch.compiler.is_dynamo_compiling() and self.device.type == own and self.dim() == 1 and is_whole:
            return permute(self, src_dst, functional._resolve_group_name(group, tag))
        return theirs(self, src_dst, group, tag)

    functional.permute_tensor = wraps(theirs)(permute_tensor)
