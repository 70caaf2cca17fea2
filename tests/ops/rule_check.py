"""Compares the bodies of ops with eager torch: value, shape and dtype of every ATen call caught while OpInfo's samples run."""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from dynaxla.ops.dtypes import XLA_DTYPES
from dynaxla.ops.promotion import JNP_DTYPES, round_float
from dynaxla.ops.table import core_table, families

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)
COMPILER_OPTIONS: dict[str, Any] = {}  # XLA's own; in the quick list those of conftest.py
CALLS_PER_OVERLOAD = 2  # for one OpInfo and dtype: each call is compiled; in the quick list only in float32
SAMPLES = 8
SEED = 1234  # torch's own for samples

# The memory behind these is not initialized, so only the shape and dtype are specified.
UNSPECIFIED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
# What these keep for their backward has another form in torch's kernels than in its own meta functions; the tests of the
# gradients speak for it.
FIRST_RESULT_ONLY = {"_embedding_bag", "_embedding_bag_forward_only"}
# The second result says where the first was found; torch leaves open which of equal elements that is.
PLACES = {"sort": 1, "topk": 2, "kthvalue": 2, "median": 1, "nanmedian": 1, "mode": 1}


# Which test compares the calls of which families (files of dynaxla/ops). test_families.py sees to it that each family
# stands here once: one that is split off takes its ops out of every comparison otherwise.
FAMILIES = {
    "data": """
        indexing insertion_points scattering slice_writing ordering reductions var_mean norms softmax losses cumulative
        creation arange signal_windows views split_and_stack
    """,
    "nn": "attention convolution embedding normalization pooling adaptive_pooling fractional_pooling",
    "resampling": "resampling padding grid_sampling",
    "spectral": "fft linalg factorizations distances",
    "segments": "segments",
    "segments of attention": "segment_attention",  # tests/ops/test_splash_attention.py
    "histograms": "histograms",
    "pointwise": """
        activations activation_gradients arithmetic bounds_and_rounding casting division logic powers transcendental matrix
    """,
    "special functions": "bessel error_functions polynomials incomplete_gamma",
    "grouped products": "grouped_products",
    "recurrent": "recurrent",
    "random": "random",
    "sampling": "sampling",
    "several processes": "process_collectives",  # tests/distributed/test_compiled.py
}


def targets_of(test: str) -> frozenset[OpOverload]:
    """The overloads whose calls the test `test` of `FAMILIES` compares."""
    known = {module.__name__.rpartition(".")[2]: records for module, records in families()}
    return frozenset(record.target for family in FAMILIES[test].split() for record in known[family])


class Call(NamedTuple):
    """A call of an op, and what eager gave."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    expected: Any

    @classmethod
    def of(cls, target: OpOverload, *args: Any, **kwargs: Any) -> Call:
        return cls(target, args, kwargs, target(*args, **kwargs))

    def copy(self) -> Call:
        """The same, which later writes into its tensors do not change."""
        return Call(self.target, *tree_map_only(torch.Tensor, lambda x: x.detach().clone(), self[1:]))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.dtype == torch.bfloat16:
        return plain.view(torch.uint16).numpy().view(jnp.bfloat16)
    return plain.numpy()


def to_torch(array: jax.Array) -> torch.Tensor:
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(array).view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def run_rule(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return run_rules([Call(target, args, kwargs, None)])[0]


def run_rules(calls: Sequence[Call]) -> list[Any]:
    """The result of each call, from one executable for all: most of an executable's time is its own."""
    leaves, spec = tree_flatten([(call.args, call.kwargs) for call in calls])

    def traced(*arrays: jax.Array) -> list[Any]:
        left = iter(arrays)
        full = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return [_apply(call, *given) for call, given in zip(calls, tree_unflatten(full, spec), strict=True)]

    with jax.enable_x64(True):
        return jax.jit(traced, compiler_options=COMPILER_OPTIONS)(
            *[to_numpy(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
        )


def _apply(call: Call, args: Any, kwargs: Any) -> Any:
    try:
        return core_table().bodies[call.target](*args, **kwargs)
    except Exception as error:
        error.add_note(f"the call is {call.target}{call.args}, {call.kwargs}")
        raise


def refusal(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What the record says of this call: its dtypes, and its check of the call made into a node."""
    record = core_table().records[target]
    check = record.check
    used = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    if used - (XLA_DTYPES if record.dtypes is None else record.dtypes):
        return "a dtype that the record does not have"
    if check is None:
        return None
    graph = torch.fx.Graph()

    def as_argument(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = graph.placeholder(f"input_{len(graph.nodes)}")
        node.meta["val"] = leaf
        return node

    node_args, node_kwargs = tree_map(as_argument, (args, kwargs))
    node = graph.call_function(target, node_args, node_kwargs)
    with contextlib.suppress(RuntimeError, IndexError, NotImplementedError):  # eager refuses it for its arguments
        node.meta["val"] = target(*args, **kwargs)
    return check(node)


def in_wider(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Eager torch in the next wider float: its own kernels round too, some 16-bit ones at every step."""
    wider = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(wider.get(leaf.dtype, leaf.dtype))
        return wider.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

    wide_args, wide_kwargs = tree_map(widen, (args, kwargs))
    return tree_leaves(target(*wide_args, **wide_kwargs))


def assert_same(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any) -> None:
    assert_all_same([Call(target, args, kwargs, expected)])


def assert_all_same(calls: Sequence[Call]) -> None:
    for call, results in zip(calls, run_rules(calls), strict=True):
        assert_agrees(call, results)


def assert_agrees(call: Call, results: Any) -> None:
    """Compare what the rule gave with eager; a 16-bit float may instead be what float32 gives, rounded once."""
    wanted = call.expected
    said = f"the call is {call.target}{call.args}, {call.kwargs}"
    assert isinstance(results, tuple) == isinstance(wanted, (tuple, list)), said
    results, wanted = tree_leaves(results), tree_leaves(wanted)
    assert len(results) == len(wanted), said
    name = call.target.overloadpacket.__name__
    if name in FIRST_RESULT_ONLY:
        results, wanted = results[:1], wanted[:1]
    for position, (result, eager) in enumerate(zip(results, wanted, strict=True)):
        assert tuple(result.shape) == tuple(eager.shape), f"result {position} has another shape; {said}"
        result = round_float(result, eager.dtype)
        assert result.dtype == JNP_DTYPES[eager.dtype], (
            f"result {position} is {result.dtype}, not {eager.dtype}; {said}"
        )
        if name in UNSPECIFIED:
            continue
        try:
            _assert_values(call, position, to_torch(result), eager.detach().resolve_conj().resolve_neg())
        except AssertionError as error:
            raise AssertionError(f"{error}\n{said}") from error


def _assert_values(call: Call, position: int, actual: torch.Tensor, eager: torch.Tensor) -> None:
    target, args, kwargs, _ = call
    name = target.overloadpacket.__name__
    if position == 1 and name in PLACES and not kwargs.get("stable"):
        assert_same_elements(name, args, kwargs, actual, eager)
    elif eager.dtype == torch.bfloat16 and name == "linspace":  # eager's last bits depend on its vector width
        rounding = torch.finfo(eager.dtype).eps * max(float(eager.abs().max()) if eager.numel() else 0.0, 1.0)
        torch.testing.assert_close(actual, eager, rtol=0, atol=rounding)
    elif eager.dtype in (torch.bfloat16, torch.float16):
        if not is_close(actual, eager):
            reference = in_wider(target, args, kwargs)[position].to(eager.dtype)
            torch.testing.assert_close(actual, reference, equal_nan=True)
    else:
        tolerance = {"rtol": 2e-5, "atol": 2e-5} if eager.dtype in (torch.float32, torch.complex64) else {}
        if eager.dtype is not torch.float32 or is_close(actual, eager, **tolerance):
            torch.testing.assert_close(actual, eager, equal_nan=True, **tolerance)
        else:  # an ill-conditioned call, on which eager's own float32 is off too, by its processor's order of sums
            assert_as_exact_as(actual, eager, in_wider(target, args, kwargs)[position])


def assert_as_exact_as(actual: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor) -> None:
    """Asserts that the distance from float64 is at most twice eager's own."""
    finite = torch.isfinite(reference)
    assert torch.equal(torch.isfinite(actual), torch.isfinite(eager))
    own, ours = ((x.double() - reference)[finite].abs().max() for x in (eager, actual))
    assert ours <= 2 * own, f"off by {ours:.1e} from float64, eager by {own:.1e}"


def is_close(actual: torch.Tensor, eager: torch.Tensor, **tolerance: float) -> bool:
    try:
        torch.testing.assert_close(actual, eager, equal_nan=True, **tolerance)
    except AssertionError:
        return False
    return True


def assert_same_elements(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], actual: torch.Tensor, eager: torch.Tensor
) -> None:
    x = args[0].detach()
    if x.ndim == 0:
        return
    place = PLACES[name]
    dim = kwargs.get("dim", args[place] if len(args) > place else -1)
    if actual.ndim < x.ndim:
        actual, eager = actual.unsqueeze(dim), eager.unsqueeze(dim)
    torch.testing.assert_close(x.gather(dim, actual), x.gather(dim, eager), equal_nan=True, rtol=0, atol=0)


class Catch(TorchDispatchMode):
    """Collects the calls that have a rule, a few of each kind."""

    def __init__(self, targets: Collection[OpOverload], full: bool) -> None:
        super().__init__()
        self.targets = targets
        self.full = full
        self.counts: Counter[tuple[OpOverload, torch.dtype]] = Counter()
        self.dtype = torch.float32
        self.calls: list[Call] = []

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.is_wanted(target, args, kwargs):
            return target(*args, **kwargs)
        expected = target(*args, **kwargs)
        self.counts[target, self.dtype] += 1
        self.calls.append(Call(target, args, kwargs, expected).copy())
        return expected

    def is_enough(self, target: Any) -> bool:
        most = CALLS_PER_OVERLOAD if self.full or self.dtype == torch.float32 else 1
        return target not in self.targets or self.counts[target, self.dtype] >= most

    def is_wanted(self, target: Any, args: Any, kwargs: Any) -> bool:
        if self.is_enough(target):
            return False
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(tensor.layout != torch.strided or tensor.dtype not in JNP_DTYPES for tensor in tensors):
            return False
        return not refusal(target, args, kwargs)


def run_sample(info: Any, sample: Any, backward: bool) -> None:
    outputs = tree_leaves(info.op(sample.input, *sample.args, **sample.kwargs))
    outputs = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not backward or not outputs:
        return
    inputs = [leaf for leaf in tree_leaves((sample.input, sample.args)) if isinstance(leaf, torch.Tensor)]
    inputs = [leaf for leaf in inputs if leaf.requires_grad]
    torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True)


def draw_samples(info: Any, dtype: torch.dtype, backward: bool) -> list[Any]:
    """A few of the samples of an OpInfo.

    They are those of `info.sample_inputs`, which costs as much as all else: at each sample it seeds the generators of
    every device and looks through the stack for a test of unittest.
    """

    def drawn() -> Iterator[Any]:
        samples = iter(info.sample_inputs_func(info, "cpu", dtype, backward))
        while True:
            torch.default_generator.manual_seed(SEED)
            random.seed(SEED)
            np.random.seed(SEED)
            try:
                yield next(samples)
            except StopIteration:
                return

    samples = list(drawn())
    return samples[:: math.ceil(len(samples) / SAMPLES) or 1]


def check_opinfo(
    name: str, targets: Collection[OpOverload], full: bool, dtypes: Sequence[torch.dtype] = DTYPES
) -> None:
    """Runs the samples of the OpInfo `name`, forward and (in float32) backward, and compares the calls of `targets`."""
    infos = [info for info in op_db if info.name == name]
    assert infos, f"no OpInfo is named {name}"
    catch = Catch(targets, full)
    for info in infos:
        for dtype in dtypes:
            if dtype not in info.dtypes:
                continue
            catch.dtype = dtype
            backward = dtype == torch.float32 and info.supports_autograd
            for sample in draw_samples(info, dtype, backward):
                with catch:
                    run_sample(info, sample, backward)
    assert catch.calls, f"{name} calls none of these ops"
    assert_all_same(catch.calls)
