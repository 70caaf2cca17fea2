"""What writes to a tensor of the device raises its version where it does so on the host, so that autograd sees the write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_unary_op_db,
)

from dynaxla.torch_api.mutation_schema import find_written_parameters, version_counter_of
from dynaxla.torch_api.overloads import aten_ops, is_composite
from dynaxla.torch_api.pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
FOREACH = [
    op
    for op in (*foreach_unary_op_db, *foreach_binary_op_db, *foreach_pointwise_op_db, *foreach_other_op_db)
    if op.inplace_variant is not None
]


def raised(run: Callable[..., Any], args: Any, kwargs: Any, device: str) -> list[bool]:
    """For every tensor of the arguments whether a call raises its version."""
    args, kwargs = tree_map_only(torch.Tensor, lambda x: x.clone().to(device), (args, kwargs))
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    before = [x._version for x in tensors]
    run(*args, **kwargs)
    return [x._version > was for x, was in zip(tensors, before, strict=True)]


def check(run: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    assert raised(run, args, kwargs, "dynaxla") == raised(run, args, kwargs, "cpu")


@pytest.mark.parametrize("op", FOREACH, ids=lambda op: op.name)
def test_lists_in_place(op: Any) -> None:
    for number, sample in enumerate(op.sample_inputs("cpu", torch.float32, num_input_tensors=[2])):
        if number > 3:
            break
        args = (sample.input, *sample.args)
        try:
            raised(op.inplace_variant, args, sample.kwargs, "cpu")
        except RuntimeError:
            continue
        check(op.inplace_variant, *args, **sample.kwargs)


def xs(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes or (3,))


def whole(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": True, "maximize": False}
SGD = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
ADAGRAD = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
FIVE, ONE = [[xs()]] * 5, torch.ones(())
NORM = (xs(2, 3, 4), xs(), xs(), xs(), xs())

OTHERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "_fused_adam_": ((*FIVE, [ONE]), ADAM),
    "_fused_adamw_": ((*FIVE, [ONE]), ADAM),
    "_fused_adam_.tensor_lr": ((*FIVE, [ONE]), {**ADAM, "lr": ONE}),
    "_fused_adamw_.tensor_lr": ((*FIVE, [ONE]), {**ADAM, "lr": ONE}),
    "_fused_sgd_": (tuple(FIVE[:3]), {**SGD, "is_first_step": False}),
    "_fused_sgd_.tensor_lr": (tuple(FIVE[:3]), {**SGD, "lr": ONE, "is_first_step": False}),
    "_fused_adagrad_": ((*FIVE[:3], [ONE]), ADAGRAD),
    "_fused_adagrad_.tensor_lr": ((*FIVE[:3], [ONE]), {**ADAGRAD, "lr": ONE}),
    "_amp_foreach_non_finite_check_and_unscale_": (([xs()], torch.zeros(()), ONE), {}),
    "_amp_update_scale_": ((ONE, torch.zeros((), dtype=torch.int32), torch.zeros(()), 2.0, 0.5, 10), {}),
    "native_batch_norm": ((*NORM, True, 0.1, 1e-5), {}),
    "_native_batch_norm_legit": ((*NORM, True, 0.1, 1e-5), {}),
    "_batch_norm_with_update": ((*NORM, 0.1, 1e-5), {}),
    "rrelu_with_noise": ((xs(), torch.zeros(3), 0.1, 0.3, True), {}),
    "_cummax_helper": ((xs(), xs(), whole(0, 0, 0), 0), {}),
    "_cummin_helper": ((xs(), xs(), whole(0, 0, 0), 0), {}),
    "unbind_copy.int_out": ((xs(2, 3), 0), {"out": [xs(), xs()]}),
    "split_copy.Tensor_out": ((xs(4), 2), {"out": [xs(2), xs(2)]}),
    "unsafe_split.Tensor_out": ((xs(4), 2), {"out": [xs(2), xs(2)]}),
    "split_with_sizes_copy.out": ((xs(4), [1, 3]), {"out": [xs(1), xs(3)]}),
    "unsafe_split_with_sizes.out": ((xs(4), [1, 3]), {"out": [xs(1), xs(3)]}),
    "adaptive_avg_pool1d.out": ((xs(1, 1, 4), [2]), {"out": xs(1, 1, 2)}),
    "avg_pool1d.out": ((xs(1, 1, 4), [2]), {"out": xs(1, 1, 2)}),
    "_histogramdd_bin_edges.out": ((xs(4, 2), [2, 2]), {"out": [xs(), xs()]}),
    "_foreach_add.Scalar_out": (([xs()], 1.0), {"out": [xs()]}),
    "_fused_sgd.out": (tuple(FIVE[:3]), {**SGD, "is_first_step": False, "out": [xs()]}),
    "index_put_": ((xs(), [whole(0)], xs(1)), {}),
    "masked_fill_.Scalar": ((xs(), xs() > 0, 2.0), {}),
    "copy_": ((xs(), xs()), {}),
    "add.out": ((xs(), xs()), {"out": xs()}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_writes(name: str) -> None:
    packet, _, overload = name.partition(".")
    args, kwargs = OTHERS[name]
    check(getattr(getattr(aten, packet), overload or "default"), *args, **kwargs)


NOT_THERE = "cudnn miopen mps quantize dequantize flash_attention moving_avg record_stream upsample detach_".split()
"""Of no host, of tensors that the device does not keep, or without a kernel by that name."""


def test_every_op_that_torch_does_not_count_is_tried() -> None:
    names = {
        name
        for name, op in aten_ops().items()
        if find_written_parameters(op)
        and version_counter_of(op) != "torch"
        and not is_composite(op)
        and not name.startswith("_foreach_")
    }
    tried = {name.removesuffix("_") for name in OTHERS}
    missing = {n for n in names if n.removesuffix("_") not in tried and not any(part in n for part in NOT_THERE)}
    alike = {
        n for n in missing if n.startswith(("_fused_", "_amp_")) and n.endswith("out")
    }  # copies, as _fused_sgd.out
    assert missing == alike


def _bump(x: torch.Tensor) -> None:
    x.add_(1)


def test_ops_of_other_packages() -> None:
    torch.library.define("dynaxla_tests::counted", "(Tensor(a!) x, Tensor y) -> ()")
    torch.library.impl("dynaxla_tests::counted", "cpu", lambda x, y: _bump(x))
    check(torch.ops.dynaxla_tests.counted, xs(), xs())
    torch.library.custom_op("dynaxla_tests::known", mutates_args={"x"}, schema="(Tensor(a!) x) -> ()")(_bump)
    check(torch.ops.dynaxla_tests.known, xs())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_a_backward_behind_a_step_is_refused(kind: type[torch.optim.Optimizer]) -> None:
    for device in ("cpu", "dynaxla"):
        w = torch.ones(3, device=device, requires_grad=True)
        optimizer = kind([w], lr=0.1, foreach=True)
        loss = (w * w).exp().sum()
        w.grad = torch.ones(3, device=device)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
