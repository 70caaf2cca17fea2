"""What the wall relies on of torch.distributed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dynaxla.torch_api import c10d
from tests.torch_api.boundary import boundary

LIMIT = timedelta(seconds=60)


class Group(c10d.PythonProcessGroup):
    """A process group of one process, which takes tensors of the meta device."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self.reduced = c10d.reduction_of(opts.reduceOp)
        return self._of_host.allreduce([torch.zeros(1)], c10d.make_options("Allreduce"))


def _make(options: Any, backend_options: Any) -> Group:
    host = c10d.make_gloo_group(c10d.prefix_store("host", options.store), 0, 1, options.timeout)
    return Group(options.store, 0, 1, "meta", host)


@pytest.fixture
def group() -> Iterator[Any]:
    c10d.register_backend("meta", _make)
    dist.init_process_group("meta", store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)
    yield dist.group.WORLD
    dist.destroy_process_group()


@boundary("c10d.list_inner_tensors")
def test_a_wrapper_has_inner_tensors() -> None:
    x, a, b = (torch.zeros(2) for _ in range(3))
    found = c10d.list_inner_tensors([x, TwoTensor(a, b)])
    assert all(one is other for one, other in zip(found, (x, a, b), strict=True))


@boundary("c10d.register_backend", "c10d.make_gloo_group", "c10d.PythonProcessGroup", "c10d.has_process_groups")
def test_a_group_is_pythons() -> None:
    assert c10d.has_process_groups()


@boundary("c10d.list_groups")
def test_groups_have_names_and_members() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    try:
        names = [dist.group.WORLD.group_name, dist.new_group([1, 3]).group_name]
        assert c10d.list_groups() == sorted(zip(names, ([0, 1, 2, 3], [1, 3]), strict=True))
    finally:
        dist.destroy_process_group()


@boundary(
    "c10d.PythonProcessGroup", "c10d.reduction_of", "c10d.make_options", "c10d.make_gloo_group", "c10d.register_backend"
)
def test_torch_calls_a_group_of_pythons(group: Any) -> None:
    assert isinstance(group, Group)
    assert dist.get_backend() == group.name() == group._get_backend_name() == "meta"
    assert group.group_name == group.getGroupName()
    assert group._get_backend(torch.device("meta")) is group
    assert [each.type for each in group._device_types] == ["cpu", "meta"]
    for op, wanted in ((dist.ReduceOp.MAX, ("max", None)), (dist.ReduceOp.AVG, ("avg", None))):
        dist.all_reduce(torch.empty(2, device="meta"), op)
        assert group.reduced == wanted
    dist.all_reduce(torch.empty(2, device="meta"), dist._make_nccl_premul_sum(2.0))
    assert group.reduced == ("sum", 2.0)
    with pytest.raises(RuntimeError, match="No backend type"):
        group._get_backend(torch.device("cuda"))


@boundary("c10d.run_functional", "c10d.find_group", "c10d.permute_in_group")
def test_a_functional_collective_is_run_in_the_group_of_its_processes() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)
    try:
        x = torch.arange(4.0)
        assert torch.equal(c10d.run_functional("all_reduce", [0], 1, [0], x, "sum"), x)
        assert torch.equal(c10d.run_functional("all_gather_into_tensor", [0], 1, [0], x, 1), x)
        name = c10d.find_group([0], 1, [0])
        assert name == dist.group.WORLD.group_name  # type: ignore[union-attr]
        assert torch.equal(c10d.permute_in_group(x, [0], name), x)
    finally:
        dist.destroy_process_group()


@boundary("c10d.meet_by_environment")
def test_the_store_that_torchrun_names(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    store, rank, size = c10d.meet_by_environment(LIMIT)
    assert (rank, size, c10d.host_of_store(store)) == (0, 1, "127.0.0.1")


@boundary("c10d.prefix_store", "c10d.host_of_store")
def test_a_store_has_its_host_below_prefixes() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    below = c10d.prefix_store("a", c10d.prefix_store("b", store))
    below.set("key", "value")
    assert store.get("b/a/key") == b"value"
    assert c10d.host_of_store(below) == "127.0.0.1"
    assert c10d.host_of_store(dist.HashStore()) is None


@boundary("c10d.completed_future", "c10d.is_unlimited")
def test_futures_and_limits() -> None:
    future = c10d.completed_future([torch.ones(1)])
    assert future.done()
    assert future.then(lambda done: done.value()[0] + 1).wait().item() == 2
    assert c10d.is_unlimited(timedelta(0))
    assert not c10d.is_unlimited(timedelta(seconds=1))


@boundary("c10d.keep_used_parameters_on_host")
def test_a_reducer_makes_one_tensor_of_numbers_of_uses(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes of it is in tests/distributed/test_training.py."""
    monkeypatch.setattr(dist, "Reducer", dist.Reducer)  # put back afterwards
    made = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if kwargs and kwargs.get("dtype") is torch.int32 and func is torch.ops.aten.empty.memory_format:
                made.append((args[0], kwargs["device"].type))
            return func(*args, **kwargs or {})

    weights = [torch.nn.Parameter(torch.empty(3, device="meta")) for _ in range(2)]
    for wanted in ("meta", "cpu"):
        with Seen():
            reducer = dist.Reducer(weights, [[0, 1]], [100], group, find_unused_parameters=True)
            reducer._set_static_graph()
        assert made == [([2], wanted)] * 2
        made.clear()
        c10d.keep_used_parameters_on_host("meta")


@boundary("c10d.keep_permutations")
def test_a_permutation_is_kept_in_the_graph_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes of it, in several processes, is in tests/distributed/test_compiled.py."""
    theirs = funcol.permute_tensor
    monkeypatch.setattr(funcol, "permute_tensor", theirs)  # put back afterwards
    c10d.keep_permutations("cpu", lambda x, targets, group: x + 10 * len(targets))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)

    def permuted(x: torch.Tensor) -> torch.Tensor:
        return funcol.permute_tensor(x, [0], dist.group.WORLD) + 0

    try:
        assert permuted(torch.ones(2)).tolist() == [1, 1]
        assert torch.compile(permuted, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [11, 11]
    finally:
        dist.destroy_process_group()
