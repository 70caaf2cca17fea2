"""Compiling for a device that is not here: what a model's programs cost on a TPU, and a package of them, from a machine
without one. Nothing is computed: the program of the user's runs on fake tensors (torch_api/uncomputed.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule

from dynaxla.backend import GraphCompiler
from dynaxla.bucketing.marked_dims import MarkedDims
from dynaxla.bucketing.size_buckets import SymbolPolicies
from dynaxla.cache.package import PackageWriter
from dynaxla.errors import DynaxlaError, NotComputedError, OptionError, ShardingError
from dynaxla.mesh import Mesh
from dynaxla.options import Options
from dynaxla.partition.part_runner import MakePart
from dynaxla.passes.parameter_shardings import InputPlacement
from dynaxla.pipeline import Pipeline
from dynaxla.precompile.declared_dims import DeclaredDims, mark_dims, named_arguments
from dynaxla.precompile.mesh_plan import MeshPlan, Rules, parse_mesh, parse_rules
from dynaxla.precompile.program_report import Compilation, ProgramReport
from dynaxla.precompile.topology_compiler import Collector, CompileOnlyPart, PackagingCache
from dynaxla.precompile.warmup import enumerate_calls
from dynaxla.programs.miss_policy import FunctionPolicy
from dynaxla.runtime.client import CompileOnlyClient
from dynaxla.runtime.pjrt_clients import many_cpus
from dynaxla.runtime.topologies import PjrtTopology
from dynaxla.runtime_state import RuntimeState, process
from dynaxla.targets.registry import compiler_for
from dynaxla.targets.target import Target
from dynaxla.torch_api.dynamo import BackendCompilerFailed, lift_capture_limits
from dynaxla.torch_api.fakes import FakeTensor, disable_modes
from dynaxla.torch_api.frames import raising_line
from dynaxla.torch_api.pytree import tree_leaves, tree_map, tree_map_only
from dynaxla.torch_api.uncomputed import UncomputedTensors, find_asked_value, find_missing_kernel, hold_uncomputed


def compile_for_target(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: str,
    options: Mapping[str, object] | None = None,
    buckets: Sequence[str] = (),
    train: bool = False,
    out: str | Path | None = None,
    mesh: Mesh | str | None = None,
    shard: Rules | str = "",
) -> list[ProgramReport]:
    """Captures a call, and compiles every program of it for a TPU topology. Nothing is computed, drawn or written.

    The call runs on fake tensors in place of the arguments and of the module's own tensors, so these may themselves be fake,
    or on the device "meta": they then count as tensors of the device of the first argument that is on another, else of the
    CPU. The values of small tensors are known as long as nothing writes to them.

    Args:
        function: a module or function, as torch.compile takes it.
        args, kwargs: one call's arguments. The call is made once for each combination of buckets.
        target: "tpu:<topology>", such as "tpu:v5e:1x1"; or "cpu".
        options: the backend's options.
        buckets: the dims that vary, and their buckets: "tokens:1,mask:1=8,16,32", "pixels:0=2..64"; see
            dynaxla/precompile/declared_dims.py. The programs are those that `dynaxla.warmup` compiles where the same is marked.
        train: compiles backward programs too: gradients are taken of the sum of all results. Else the calls are made without
            gradients.
        out: a folder that is not there yet, for a package with the executables: docs/tpu.md.
        mesh: the devices of the topology over which programs are partitioned, row-major: a `dynaxla.Mesh`, or a text such as
            "data=2,model=2".
        shard: how arguments and weights are sharded over the mesh: specs or styles by patterns of names, as `dynaxla.shard`
            takes them, or the text of rules; see dynaxla/precompile/mesh_plan.py.

    Returns:
        One report per program, in the order in which the calls met them. What the op table or torch-mlir refuses runs
        in eager with a logged reason, as it does without a target, and is in no report.

    Raises:
        OptionError: see `dynaxla.options.Options` and `dynaxla.precompile.declared_dims`; nothing needs a gradient;
        or the folder is
            there, and not empty.
        TargetError: no such topology, or libtpu is not installed.
        UnsupportedError: an op cannot be compiled, and the options say fallback="error"; or a part cannot be padded, and they
            say bucketing="require".
        CompileError: the target's compiler refused a program, or died of it; the first one, after all were tried. No package is
            written then, nor where a program does not fit the chip.
    """
    declared = [DeclaredDims.parse(text) for text in buckets]
    place = None if out is None else Path(out)
    plan = plan_mesh(function, mesh, shard)
    compilation = compile_and_report(function, args, kwargs or {}, target, options, declared, train, place, plan)
    if compilation.refused:
        raise compilation.refused[0].error
    return list(compilation.programs)


def plan_mesh(function: Callable[..., Any], mesh: Mesh | str | None, shard: Rules | str) -> MeshPlan | None:
    """How a model's programs are sharded; None where they are for one device.

    Raises:
        OptionError: there are rules and no mesh, or one of them is of another form.
        ShardingError: the mesh is none.
    """
    if mesh is None:
        if shard:
            raise OptionError("there are rules of a sharding, and no mesh", "name the mesh, such as data=2,model=4")
        return None
    made = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    return MeshPlan.of(made, parse_rules(shard, made, function) if isinstance(shard, str) and shard else shard or {})


def _partitioning(client: CompileOnlyClient, mesh: Mesh) -> CompileOnlyClient:
    """The compiler with as many devices as a mesh has.

    Raises:
        ShardingError: the topology has fewer.
    """
    if isinstance(client, PjrtTopology):
        if client.devices < mesh.size:
            raise ShardingError(
                f"the mesh {mesh} has {mesh.size} devices, and the topology {client.devices}", "name a larger topology"
            )
        return client
    return many_cpus(mesh.size)


def compile_and_report(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: str,
    options: Mapping[str, object] | None,
    declared: Sequence[DeclaredDims],
    train: bool,
    out: Path | None,
    plan: MeshPlan | None = None,
) -> Compilation:
    """As `compile_for_target`, but says all that there is to say, refused programs too, and raises no CompileError for them."""
    parsed = Options.from_mapping(options)
    found, client = compiler_for(target)
    if plan is not None:
        client = _partitioning(client, plan.mesh)
    with nullcontext() if out is None else PackageWriter(out) as writer:
        shared = process()
        executables = PackagingCache(shared.executables.store if parsed.cache else None, writer=writer)
        collector = Collector(found.chip, executables, plan)
        # What is stored, and where, is `executables`' to say, whatever the options say of the cache.
        backend = _Backend(
            replace(shared, executables=executables, marks=MarkedDims()),
            replace(parsed, cache=True),
            found,
            client,
            collector,
            FunctionPolicy(),
            UncomputedTensors(_device([args, kwargs])),
        )
        before = shared.recorder.snapshot()
        _call_at_every_bucket(backend, function, args, kwargs, declared, train)
        after = shared.recorder.snapshot()
        compilation = Compilation(
            target=target,
            device=client.identity(),
            chip=found.chip,
            options=dict(options or {}),
            train=train,
            declared=declared,
            programs=collector.programs,
            refused=collector.refused,
            eager=after.fallbacks[len(before.fallbacks) :],
            exact_shapes=after.exact_shapes[len(before.exact_shapes) :],
            plan=plan,
        )
        if writer is not None and compilation.complete:
            writer.finish(compilation.document())
    return compilation


@dataclass(frozen=True, slots=True)
class _Backend:
    """What Dynamo hands graphs to.

    Attributes:
        shared: what the process's graphs share, but for marks and executables, which are the compilation's own.
        function: says in a call which sizes are declared.
        tensors: what calls run on.
    """

    shared: RuntimeState
    options: Options
    target: Target
    client: CompileOnlyClient
    collector: Collector
    function: FunctionPolicy
    tensors: UncomputedTensors
    __name__: ClassVar[str] = "dynaxla"  # so that Dynamo captures as for the backend of this name

    def __deepcopy__(self, memo: object) -> _Backend:
        """Itself: Lightning, once imported, copies what torch.compile is given."""
        return self

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Any:
        plan = self.collector.plan
        compiler = GraphCompiler(
            self.shared,
            self.options,
            function=self.function,
            target=self.target,
            client=self.client,
            make_part=self._make_part,
            place_inputs=lambda inputs: InputPlacement() if plan is None else plan.find_placement(inputs),
        )
        with disable_modes():  # the constants of a graph are real
            return compiler.compile(module, example_inputs)

    def _make_part(self, pipeline: Pipeline, policies: SymbolPolicies) -> MakePart:
        return lambda graphs: CompileOnlyPart(graphs, pipeline, policies, self.collector, self.tensors)


def _call_at_every_bucket(
    backend: _Backend,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    declared: Sequence[DeclaredDims],
    train: bool,
) -> None:
    tensors, marks, plan = backend.tensors, backend.shared.marks, backend.collector.plan
    # Tensors of our own: marks stay on a tensor.
    args, kwargs = tree_map_only(torch.Tensor, partial(_own, tensors), (tuple(args), dict(kwargs)))
    named = named_arguments(function, args, kwargs) if declared else {}
    names = mark_dims(declared, named, marks)
    compiled = torch.compile(function, backend=backend)

    def take(value: Any) -> Any:
        taken = tensors.copy(value)
        if isinstance(value, torch.Tensor):
            for dim, policy in marks.of(value).items():
                marks.add(taken, dim, policy)
        return taken

    def call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        args, kwargs = tree_map(take, (args, kwargs))
        if plan is not None:
            plan.place_arguments(named_arguments(function, args, kwargs))
        with tensors.mode:
            outputs = compiled(*args, **kwargs)
            if train:
                _differentiate(function, (args, kwargs), outputs)

    with ExitStack() as stack:
        # Every call of torch.compile is a new backend to Dynamo, so calls for one module would add up to its limit, and then
        # run in eager.
        stack.enter_context(lift_capture_limits())
        stack.enter_context(torch.set_grad_enabled(train))
        stack.enter_context(_told_errors())
        owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            stack.enter_context(hold_uncomputed(tensors, owner))
            if plan is not None:
                plan.place_module(owner)
        for each in enumerate_calls([{"args": args, "kwargs": kwargs}], marks):
            backend.function.declared = each.declared if declared else None
            backend.collector.sizes = {names[size]: bucket for size, bucket in each.sizes.items()}
            each.run(call)


def _device(arguments: object) -> torch.device:
    """The device of the first tensor that has one."""
    devices = [leaf.device for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


def _own(tensors: UncomputedTensors, tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor object in the same memory, or a fake one where there is none; a parameter is itself, as it may be the
    model's."""
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return tensors.take(tensor)
    if isinstance(tensor, torch.nn.Parameter) or not tensor.is_leaf:
        return tensor
    with torch.inference_mode(tensor.is_inference()):
        return tensor.detach().requires_grad_(tensor.requires_grad)


def _differentiate(function: Callable[..., Any], arguments: object, outputs: object) -> None:
    """Runs the backward; no gradient is kept."""
    results = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    owned = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    wanted = [leaf for leaf in dict.fromkeys([*owned, *given]) if leaf.requires_grad]
    if not results or not wanted:
        raise OptionError(
            "nothing needs a gradient: no result depends on a parameter of the model or an argument that does",
            "leave out `train`, or give a module whose parameters require gradients",
        )
    total = torch.stack([(leaf.real if leaf.is_complex() else leaf).sum().double() for leaf in results]).sum()
    torch.autograd.grad(total, wanted, allow_unused=True)


@contextmanager
def _told_errors() -> Iterator[None]:
    """Takes an error of this package out of Dynamo's, and says what torch's errors about fake tensors mean here."""
    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, DynaxlaError):
            raise error.inner_exception from None
        raise
    except (RuntimeError, TypeError) as error:
        asked, missing = find_asked_value(error), find_missing_kernel(error)
        if asked is None and missing is None:
            raise
        explanation, hint = (
            f"{asked} asks for the value of a tensor that is not computed: compiling for a device elsewhere computes nothing",
            "make the value an argument, a Python number for one, or leave the line out while compiling",
        )
        if missing is not None:
            explanation = f"{missing} runs in eager and has no fake kernel, so the sizes of its results are not known"
            hint = "register one by torch.library.register_fake, or give the op a body by dynaxla.register_lowering"
        raise NotComputedError(explanation, hint, frame=raising_line(error.__traceback__)) from None
