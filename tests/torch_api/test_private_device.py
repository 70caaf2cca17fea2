"""What the wall relies on of a device in Python. Each test runs in a process of its own: a process has one such device."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from dynaxla.torch_api import (
    autocast_lists,
    fakes,
    frames,
    mutation_schema,
    overloads,
    private_device,
    symbols,
    tracing,
)
from dynaxla.torch_api.fakes import FakeTensorMode
from dynaxla.torch_api.tracing import TorchDispatchMode, trace_calls
from tests.torch_api.boundary import boundary

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]
_MADE = """
import gc, types, torch
from dynaxla.torch_api import private_device as wall
assert wall.get_registered_device_type() is None
module = types.ModuleType("torch.wall")
module.is_available = module.is_initialized = lambda: True
module.device_count = lambda: 1
module.current_device = lambda: 0
module.synchronize = module.memory_allocated = module.max_memory_allocated = lambda device=None: 5
module.memory_stats = module.empty_cache = lambda: {}
wall.register_device_type("wall", module)
assert wall.get_registered_device_type() == "wall" and torch.wall is module
kernels = wall.Kernels()
x = wall.tensor_at(1 << 60, torch.float32, 48, (3, 4), (4, 1))
"""


def _run(code: str) -> None:
    command = [sys.executable, "-c", _MADE + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@boundary(
    "private_device.get_registered_device_type", "private_device.register_device_type", "private_device.tensor_at"
)
def test_tensors_have_a_device_a_storage_and_no_memory() -> None:
    _run("""
assert (x.device, x.shape, x.stride()) == (torch.device("wall", 0), (3, 4), (4, 1))
assert x.untyped_storage().nbytes() == 48 and x.data_ptr() == 1 << 60
assert torch.accelerator.device_count() == 1
plain = wall.tensor_at(1 << 61, torch.float32, 48, (3, 4))
assert (plain.device, plain.shape, plain.stride(), plain.storage_offset()) == (x.device, x.shape, x.stride(), 0)
storage, other = plain.untyped_storage(), x.untyped_storage()
assert (storage.nbytes(), storage.data_ptr(), storage.resizable()) == (48, 1 << 61, other.resizable())
wall.attach_memory(storage, "kept")
del storage
gc.collect()
part = wall.get_meta_kernel(torch.ops.aten.as_strided.default)(plain, [4], [1], 4)
assert wall.get_attached_memory(part.untyped_storage()) == "kept" and part.data_ptr() == (1 << 61) + 16
for sizes in ((), (2, 1, 3), (1, 5, 1)):
    plain = wall.tensor_at(1 << 61, torch.bfloat16, 16, sizes)
    assert plain.is_contiguous() and plain.stride() == torch.empty(sizes).stride() and plain.shape == sizes
""")


@boundary("private_device.attach_memory", "private_device.get_attached_memory")
def test_a_storage_keeps_what_it_is_given_whoever_holds_it() -> None:
    _run("""
class Thing: pass
thing = Thing()
gone = []
import weakref
weakref.finalize(thing, gone.append, 1)
wall.attach_memory(x.untyped_storage(), thing)
views = wall.get_meta_kernel(torch.ops.aten.as_strided.default)
y = views(x, [4], [1], 2)
del x, thing
gc.collect()
assert not gone and wall.get_attached_memory(y.untyped_storage()) is not None
del y
gc.collect()
assert gone
""")


@boundary("private_device.set_view_metadata", "private_device.copy_view_metadata", "private_device.get_meta_kernel")
def test_tensors_are_placed_in_storages() -> None:
    _run("""
wall.set_view_metadata(x, x.untyped_storage(), (2, 2), (1, 2), 3)
assert (x.shape, x.stride(), x.storage_offset(), x.untyped_storage().nbytes()) == ((2, 2), (1, 2), 3, 48)
y = wall.tensor_at(1 << 61, torch.float32, 0, (0,), (1,))
wall.copy_view_metadata(y, x)
assert y.untyped_storage().data_ptr() == 1 << 60 and y.stride() == (1, 2)
view = wall.get_meta_kernel(torch.ops.aten._reshape_alias.default)(x, [4], [1])
assert view.device == x.device and view.untyped_storage().data_ptr() == 1 << 60
""")


@boundary("private_device.Kernels", "private_device.get_composite_kernel")
def test_kernels_are_called() -> None:
    _run("""
seen = []
kernels.add(torch.ops.aten.neg.default, lambda x: seen.append("neg") or x)
kernels.add(torch.ops.aten._copy_from.default, lambda x, to, non_blocking=False: seen.append("copy") or to)
kernels.add_rest(lambda op, *args, **kwargs: seen.append(str(op)) or args[0])
kernels.add_for_host(torch.ops.aten._pin_memory.default, lambda x, device=None: seen.append("pin") or x)
kernels.add_autocast(torch.ops.aten.sin.default, lambda x: seen.append("autocast") or x)
kernels.end_autocast()
x.neg(), torch.ones(1).pin_memory(), torch.ops.aten.nonzero(x)
wall.get_composite_kernel(torch.ops.aten.copy_.default)(torch.ones(3, 4), x)
module.get_amp_supported_dtype = lambda: [torch.bfloat16]
with torch.autocast("wall", dtype=torch.bfloat16):
    x.sin(), x.neg()
assert seen == ["neg", "pin", "aten.nonzero.default", "copy", "autocast", "neg"], seen
numbers = []
kernels.add(torch.ops.aten.add.Tensor, lambda x, other, *, alpha=1: numbers.append(type(other)) or x)
x + 1, x + 0.5
assert numbers == [int, float], numbers
""")


@boundary("private_device.Kernels")
def test_sparse_tensors_are_made_of_their_parts() -> None:
    _run("""
from functools import partial
seen, aten = [], torch.ops.aten
of_coo = [aten._sparse_coo_tensor_with_dims_and_tensors.default, aten._values.default, aten._nnz.default]
kernels.add_sparse(lambda op, *args, **kwargs: seen.append(str(op)) or args[0],
                   {"Sparse": of_coo, "SparseCsr": [aten.values.default]})
kernels.add(aten.resize_.default, lambda x, *args, **kwargs: x)
kernels.add(aten.empty.memory_format,
            lambda size, **o: wall.tensor_at(1 << 60, o.get("dtype") or torch.float32, 0, size, (1,) * len(size)))
places = wall.tensor_at(1 << 62, torch.int64, 24, (1, 3), (3, 1))
values = wall.tensor_at(1 << 61, torch.float32, 12, (3,), (1,))
make = partial(aten._sparse_coo_tensor_with_dims_and_tensors, 1, 0, [9], layout=torch.sparse_coo, device=values.device)
made = make(indices=places, values=values)
assert (made.layout, made.device, made._nnz()) == (torch.sparse_coo, values.device, 3)
assert made._values().untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
assert torch.ops.aten.isinf(made) is made and torch.ops.aten.mul.Tensor(made, 2) is made
assert seen == ["aten.isinf.default", "aten.mul.Tensor"], seen
""")


@boundary("tracing.enable_dispatch")
def test_modes_see_ops_within_a_block_without_dispatch() -> None:
    seen: list[str] = []

    class See(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with See(), torch._C._DisableTorchDispatch():
        torch.ones(2).sin()
        with tracing.enable_dispatch():
            torch.ones(2).exp()
            with See():
                torch.ones(2).cos()
        torch.ones(2).tan()
    assert [name for name in seen if "ones" not in name] == ["aten.cos.default"]


@boundary("private_device.give_storages", "private_device.answer_for_accelerator", "private_device.set_printer")
def test_what_torch_asks_beside_kernels() -> None:
    _run("""
kernels.add(torch.ops.aten.empty.memory_format,
            lambda size, **o: wall.tensor_at(1 << 61, o.get("dtype") or torch.float32, *size, size, (1,)))
wall.give_storages(lambda memory, size: 0)
made = torch.UntypedStorage(16, device="wall")
assert (made.device.type, made.nbytes()) == ("wall", 16) and torch.UntypedStorage(4).nbytes() == 4
wall.answer_for_accelerator(module)
assert torch.accelerator.memory_allocated() == torch.accelerator.memory.memory_allocated() == 5
assert torch.accelerator.synchronize() == 5
wall.set_printer(lambda tensor: torch.ones(3, 4))
assert repr(x).startswith("tensor([[1., 1.")
""")


@boundary(
    "mutation_schema.find_functional_variant",
    "mutation_schema.count_out_parameters",
    "mutation_schema.find_written_parameters",
    "mutation_schema.find_returned_parameters",
)
def test_schemas_say_what_is_written() -> None:
    twins = {
        aten.add_.Tensor: aten.add.Tensor,
        aten.add.out: aten.add.Tensor,
        aten.normal_.default: aten.normal_functional.default,
        aten._foreach_add_.List: aten._foreach_add.List,
        aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
        aten.bernoulli_.float: aten.bernoulli.p,
        aten.copy_.default: aten.copy.default,
    }
    for op, twin in twins.items():
        assert mutation_schema.find_functional_variant(op) is twin, op
    assert mutation_schema.count_out_parameters(aten.max.dim_max) == 2
    assert mutation_schema.find_written_parameters(aten._native_batch_norm_legit.default) == (
        "running_mean",
        "running_var",
    )
    assert mutation_schema.find_written_parameters(aten.max.dim_max) == ("max", "max_values")
    assert mutation_schema.find_returned_parameters(aten.add_.Tensor) == ("self",)
    assert mutation_schema.find_returned_parameters(aten.max.dim_max) == ("max", "max_values")
    assert mutation_schema.find_returned_parameters(aten.add.Tensor) == (None,)


@boundary("overloads.aten_ops", "private_device.trace_as_captured", "tracing.trace_calls", "frames.user_line")
def test_calls_are_traced() -> None:
    assert overloads.aten_ops()["add.Tensor"] is aten.add.Tensor
    with private_device.trace_as_captured(), FakeTensorMode():
        graph = trace_calls(lambda x: x * 2 + 1, [torch.empty(2, 3)], {}).graph
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    assert [node.target for node in nodes] == [aten.mul.Tensor, aten.add.Tensor]
    assert nodes[-1].meta["val"].shape == (2, 3)
    assert frames.user_line().startswith(f" at {__file__}:")


@boundary("fakes.make_symbolic_mode", "tracing.accept_symbolic_sizes", "symbols.guards")
def test_calls_are_traced_with_sizes_that_vary() -> None:
    mode, (size, other) = fakes.make_symbolic_mode([6, 12])
    assert symbols.expression(size) != symbols.expression(other)
    with private_device.trace_as_captured(), tracing.accept_symbolic_sizes(), mode:
        given = [torch.empty(2, size), torch.empty(size * 2), other]
        module = trace_calls(lambda x, y, n: [aten.addcmul(x, x, y[:size]), torch.arange(n)], given, {})
    assert symbols.guards(size) == []
    for n in (6, 9):
        x, y = torch.randn(2, n), torch.randn(2 * n)
        made, places = module(x, y, n + 1)
        torch.testing.assert_close(made, x + x * y[:n])
        assert places.tolist() == list(range(n + 1))
    with private_device.trace_as_captured(), tracing.accept_symbolic_sizes(), mode:
        torch.empty(size).view(2, -1)
    (guard,) = symbols.guards(size)
    assert [bool(guard.subs(symbols.expression(size), n)) for n in (7, 8)] == [False, True]


@boundary("tracing.trace_calls")
def test_no_other_thread_sees_what_is_traced() -> None:
    """What make_fx changes for all of them."""
    call, lookup = nn.Module.__call__, nn.Module.__getattr__
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((nn.Module.__call__ is call, nn.Module.__getattr__ is lookup, is_fx_symbolic_tracing()))
        return x + 1

    with private_device.trace_as_captured(), FakeTensorMode():
        trace_calls(function, [torch.empty(2)], {})
    assert seen == [(True, True, False)]


@boundary(
    *(
        "autocast_lists.LOWER_PRECISION",
        "autocast_lists.FLOAT32",
        "autocast_lists.FLOAT32_BY_DTYPE",
        "autocast_lists.WIDEST",
    ),
    *("autocast_lists.overloads_of", "autocast_lists.autocast_dtype", "autocast_lists.call_without_autocast"),
)
def test_autocasts_lists_are_torchs() -> None:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
    lists = {
        "LOWER_PRECISION_FP": autocast_lists.LOWER_PRECISION,
        "FP32": autocast_lists.FLOAT32,
        "FP32_SET_OPT_DTYPE": autocast_lists.FLOAT32_BY_DTYPE,
        "PROMOTE": autocast_lists.WIDEST,
    }
    for name, own in lists.items():
        text = re.search(rf"#define AT_FORALL_{name}\(_\)(.*?[^\\])\n", header, re.DOTALL)
        assert text is not None, name
        theirs = [entry.replace(", ", ".") for entry in re.findall(r"_\(([^)]*)\)", text[1])]
        assert theirs == own, name
        assert all(isinstance(op, torch._ops.OpOverload) for op in autocast_lists.overloads_of(own))
    assert autocast_lists.autocast_dtype("cpu") is torch.bfloat16
    assert autocast_lists.call_without_autocast(torch.add, (torch.ones(1), 1), {}).item() == 2


@boundary("private_device.register_device_type")
def test_what_only_cpp_can_make() -> None:
    _run("""
other = torch._C._construct_storage_from_data_pointer(1 << 62, torch.device("wall", 1), 48)
for made in (lambda: wall.set_view_metadata(x, other, (3, 4), (4, 1), 0), lambda: torch.Generator(device="wall")):
    try:
        made()
    except (RuntimeError, NotImplementedError):
        continue
    raise AssertionError("torch has it by now: docs/device.md names it as a limit")
""")


@boundary("generators.give_generators")
def test_generators_of_the_device_are_the_hosts() -> None:
    _run("""
import copy, pickle
from dynaxla.torch_api.generators import give_generators
before = torch.Generator()
give_generators(torch.device("wall", 0))
made = [torch.Generator(device="wall"), torch.Generator("wall:0"), torch.Generator(torch.device("wall"))]
assert all(type(each) is type(before) and isinstance(each, torch.Generator) for each in (*made, before))
assert issubclass(type(before), torch.Generator) and not isinstance(3, torch.Generator)
assert torch.equal(torch.rand(3, generator=made[0].manual_seed(3)), torch.rand(3, generator=before.manual_seed(3)))
assert torch.Generator().device == torch.Generator("cpu").device == torch.device("cpu")
for copied in (copy.deepcopy(before), pickle.loads(pickle.dumps(before))):
    assert torch.equal(copied.get_state(), before.get_state())
torch.jit.script(torch.nn.Linear(2, 2))
for wrong in ("wall:1", "meta", "nothing"):
    try:
        torch.Generator(wrong)
    except RuntimeError:
        continue
    raise AssertionError(wrong)
""")


@boundary("module_conversions.keep_parameters")
def test_torch_converts_modules_by_one_function_and_swaps_what_tensors_are() -> None:
    """What comes of it, on tensors that can be computed with, is in tests/device/test_parameters.py."""
    _run("""
import weakref
from dynaxla.torch_api.module_conversions import keep_parameters
keep_parameters()
net = torch.nn.Linear(3, 4)
weight, seen = net.weight, []
weight.told, hook, refers = "mine", weight.register_hook(print), weakref.ref(weight)

def there(tensor):
    seen.append(tensor.numel())
    return wall.tensor_at((1 << 60) + 64, torch.float32, 48, (3, 4), (4, 1)).detach()

net._apply(there)
assert seen == [0, 12, 4], seen
assert net.weight is weight is refers() and weight.device.type == "wall"
assert weight.told == "mine" and hook.id in weight._backward_hooks
seen.clear()
torch.nn.Linear(3, 4)._apply(lambda tensor: seen.append(tensor.numel()) or tensor.double())
assert seen == [0, 12, 4]
lazy = torch.nn.LazyLinear(2)
weight = lazy.weight
lazy._apply(there)
assert lazy.weight is weight and weight.device.type == "wall" and torch.nn.parameter.is_lazy(weight)
""")


@boundary("meta_kernels.use_cpu_meta_kernels")
def test_meta_kernels_ask_one_function_for_the_device() -> None:
    _run("""
from dynaxla.torch_api.fakes import FakeTensorMode
from dynaxla.torch_api.meta_kernels import use_cpu_meta_kernels

def sizes(device, width=4):  # another width where the answer is another: the mode remembers
    with FakeTensorMode():
        table, rows = torch.empty(9, width, device=device), torch.empty(7, dtype=torch.int64, device=device)
        return [tuple(x.shape) for x in torch.ops.aten._embedding_bag(table, rows, rows[:3])]

assert sizes("wall", 5) != sizes("cpu", 5)
for _ in range(2):
    use_cpu_meta_kernels()
    assert sizes("wall") == sizes("cpu")
    assert torch._meta_registrations.device_hint(torch.empty(2, device="meta")) == "cuda"
""")


@boundary("private_device.exchange_by_dlpack")
def test_dlpack_passes_a_tensor_of_the_device_to_torch() -> None:
    _run("""
adopted = []
wall.exchange_by_dlpack(lambda made: adopted.append(made) or made)
host = torch.arange(3.0)
assert torch.from_dlpack(host).data_ptr() == host.data_ptr() and not adopted
again = torch.from_dlpack(x)
assert adopted == [again] or adopted[0] is again
assert again.data_ptr() == x.data_ptr() and again.device.type == "wall"
""")


@boundary("tracing.pause_tracing", "tracing.run_fake_kernel")
def test_calls_that_are_no_part_of_a_trace() -> None:
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.randn(2, 3))

        def function(x: torch.Tensor) -> torch.Tensor:
            with tracing.pause_tracing():
                predicted = tracing.run_fake_kernel(torch.relu, (x,), {})
                assert tracing.run_fake_kernel(torch.nonzero, (x,), {}) is None
            assert predicted.shape == (2, 3)
            return torch.exp(x)

        graph = trace_calls(function, [x], {}).graph
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [aten.exp.default]


@boundary("module_conversions.move_states_of_fsdp")
def test_fsdp_moves_parameters_and_buffers_by_one_function() -> None:
    """What comes of it, in several processes, is in tests/distributed/test_training.py."""
    _run("""
from torch.distributed.fsdp._fully_shard import _fsdp_init
from dynaxla.torch_api.module_conversions import move_states_of_fsdp
move_states_of_fsdp()
weight, buffer = torch.nn.Parameter(torch.ones(3, 4)), torch.ones(3, 4)
weight.grad, moved = torch.ones(3, 4), []
def there(tensor, *args, **kwargs):
    moved.append(tensor.shape)
    return wall.tensor_at((1 << 60) + 64 * len(moved), torch.float32, 48, (3, 4), (4, 1))
before, torch.Tensor.to = torch.Tensor.to, there
_fsdp_init._move_states_to_device([weight], [buffer], torch.device("wall", 0))
torch.Tensor.to = before
assert len(moved) == 3 and {each.device.type for each in (weight, weight.grad, buffer)} == {"wall"}
assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad
""")


@boundary(
    "generators.draw_shards_apart",
    "generators.take_traced_shard",
    "generators.UntracedDrawError",
    "generators.DRAW_STRIDE",
)
def test_draws_of_dtensors_take_place_on_a_shard() -> None:
    """What comes of it, in several processes, is in tests/distributed/test_random.py."""
    _run("""
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, _random
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from dynaxla.torch_api.generators import DRAW_STRIDE, UntracedDrawError, draw_shards_apart, take_traced_shard
state = torch.tensor([5, 8]).view(torch.uint8)
def set_state(value, device=None):
    global state
    state = value
module.get_rng_state, module.set_rng_state = lambda device=None: state.clone(), set_state
dist.init_process_group("fake", rank=2, world_size=3, store=FakeStore())
mesh = DeviceMesh("wall", torch.arange(3), _init_backend=False)
draw_shards_apart("wall")
tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
offset = lambda: state.view(torch.int64).tolist()
meta = TensorMeta(torch.Size((3, 2)), (2, 1), torch.float32)
sharded, replicated = DTensorSpec(mesh, (Shard(0),), meta), DTensorSpec(mesh, (Replicate(),), meta)
seeds = {5}
with tracker._distribute_region(sharded):
    seeds.add(offset()[0])
    assert offset()[1] == 0
assert offset() == [5, 8 + DRAW_STRIDE]
with tracker._distribute_region(sharded):
    seeds.add(offset()[0])
after = [5, 8 + 2 * DRAW_STRIDE]
assert offset() == after and len(seeds) == 3
with tracker._distribute_region(replicated):
    assert offset() == after
generator = torch.Generator().manual_seed(3)
with tracker._distribute_region(sharded, generator):
    seeds.add(offset()[0])
    assert offset()[1] == 0 and len(seeds) == 4
drawn = torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(3)).item()
generator.manual_seed(3)
with tracker._distribute_region(replicated, generator):
    assert offset() == [drawn, 0]
assert offset() == after and not torch.equal(generator.get_state(), torch.Generator().manual_seed(3).get_state())
with FakeTensorMode(), tracker._distribute_region(sharded):
    assert take_traced_shard() == 2
assert take_traced_shard() == 0 and offset() == after
def untraced(x):
    with tracker._distribute_region(sharded):
        return x.sin()
try:
    make_fx(untraced, tracing_mode="fake")(torch.ones(2))
except UntracedDrawError:
    pass
else:
    raise AssertionError("a draw that nobody made different for the shards")
""")
