"""The rules of Fourier transforms, linear algebra and distances against eager torch, and graphs that hold them."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import pytest
import torch
from torch._ops import OpOverload
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from dynaxla.lowering.jax_rules import fft, linalg
from dynaxla.lowering.jax_rules.rule_set import JNP_DTYPES
from dynaxla.metrics.recorder import Recorder
from dynaxla.ops.tables.spectral import ROWS
from tests.ops.test_data_rules import run_sample, to_jax, to_torch

aten = torch.ops.aten

RULES = {**fft.RULES, **linalg.RULES}
CHECKS = {row.target: row.check for row in ROWS}
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)
SAMPLES = 10
CALLS_PER_OVERLOAD = 4
# Relative to the largest element: two libraries round differently and a product or solve mixes the elements of a matrix.
ROUNDING = {torch.float32: 2e-5, torch.complex64: 2e-5, torch.float64: 1e-9, torch.complex128: 1e-9}
VALUES = {aten._linalg_svd.default: 1, aten._linalg_eigh.default: 0}  # the vectors' signs are free

OPINFO_NAMES = """
fft.fft fft.ifft fft.rfft fft.irfft fft.hfft fft.ihfft fft.fft2 fft.ifft2 fft.rfft2 fft.irfft2 fft.hfft2 fft.ihfft2
fft.fftn fft.ifftn fft.rfftn fft.irfftn fft.hfftn fft.ihfftn stft istft
linalg.inv linalg.inv_ex linalg.solve linalg.solve_ex linalg.solve_triangular triangular_solve linalg.lu_factor
linalg.lu_factor_ex linalg.lu linalg.lu_solve lu_solve lu_unpack linalg.cholesky linalg.cholesky_ex cholesky_solve
cholesky_inverse linalg.qr geqrf ormqr linalg.householder_product linalg.det linalg.slogdet logdet linalg.svdvals
linalg.eigvalsh linalg.pinv matrix_exp linalg.cross cross cdist nn.functional.pdist
linalg.tensorinv linalg.tensorsolve
""".split()


def run_rule(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves, spec = tree_flatten((args, kwargs))

    def traced(*arrays: jax.Array) -> Any:
        left = iter(arrays)
        full = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        call_args, call_kwargs = tree_unflatten(full, spec)
        return RULES[target](*call_args, **call_kwargs)

    with jax.enable_x64(True):
        return jax.jit(traced)(*[to_jax(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)])


def refusal(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], reads: int | None = None) -> str | None:
    """What the row's check says of this call, made into a node of which result `reads` is used."""
    check = CHECKS[target]
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
    if reads is not None:
        graph.output(graph.call_function(operator.getitem, (node, reads)))
    return check(node)


def assert_same(target: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Any) -> None:
    results = run_rule(target, args, kwargs)
    assert isinstance(results, tuple) == isinstance(expected, (tuple, list))
    results, wanted = tree_leaves(results), tree_leaves(expected)
    assert len(results) == len(wanted)
    for position, (result, eager) in enumerate(zip(results, wanted, strict=True)):
        assert tuple(result.shape) == tuple(eager.shape)
        assert result.dtype == JNP_DTYPES[eager.dtype]
        if VALUES.get(target, position) == position:
            assert_close(to_torch(result), eager.detach().resolve_conj().resolve_neg())


def assert_close(actual: torch.Tensor, eager: torch.Tensor) -> None:
    finite = eager.abs()[eager.isfinite()]
    scale = max(float(finite.max()) if finite.numel() else 0.0, 1.0)
    rounding = ROUNDING.get(eager.dtype, 0.0)
    torch.testing.assert_close(actual, eager, rtol=rounding, atol=rounding * scale, equal_nan=True)


class Catch(TorchDispatchMode):
    """Compares the calls that have a rule, a few of each kind, and counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[OpOverload, torch.dtype]] = Counter()
        self.dtype = torch.float32

    def __torch_dispatch__(self, target: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        expected = target(*args, **kwargs)
        key = (target, self.dtype)
        if target not in RULES or self.counts[key] >= CALLS_PER_OVERLOAD or refusal(target, args, kwargs):
            return expected
        self.counts[key] += 1
        assert_same(target, args, kwargs, expected)
        return expected


@pytest.mark.parametrize("name", OPINFO_NAMES)
def test_rules_agree_with_eager_on_opinfo_samples(name: str) -> None:
    infos = [info for info in op_db if info.name == name]
    assert infos, f"no OpInfo is named {name}"
    catch = Catch()
    for info in infos:
        for dtype in DTYPES:
            if dtype not in info.dtypes:
                continue
            catch.dtype = dtype
            backward = dtype in (torch.float32, torch.complex128) and info.supports_autograd
            samples = list(info.sample_inputs("cpu", dtype, requires_grad=backward))
            for sample in samples[:: math.ceil(len(samples) / SAMPLES) or 1]:
                with catch:
                    run_sample(info, sample, backward)
    assert catch.counts
