"""Runs torch's optimizer database on the device, and compares parameters and states after some steps with the host's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import dynaxla
from conformance.opinfo_compare import first_line, tensor_difference
from conformance.opinfo_samples import EAGER_ERRORS

STEPS = 5
MADE_FOR = "cuda"
"""For this device the database has the inputs that only accelerators take: the device takes them all."""
SHAPES = ((6, 4), (4, 3), (5,), ())
ONLY_MATRICES = ("Muon",)
IN_FLOAT64 = ("LBFGS",)
"""Optimizers that go on from differences of gradients, and so from errors of rounding: these are compared in float64."""
FEW_ITERATIONS = {"LBFGS": {"max_iter": 3}}
"""Where more would be those behind the minimum."""

Result = tuple[str, str]  # status, detail
Values = Mapping[str, Any]


class OptimizerCall:
    """An optimizer of the database with one of its inputs.

    Args:
        info: the OptimizerInfo.
        given: its OptimizerInput's arguments.
        flag: of the ways to step that exclude one another the one that is taken; None for the loop.
    """

    def __init__(self, info: Any, given: Mapping[str, Any], what: str, flag: str | None) -> None:
        self._info = info
        self._given = given
        self._flag = flag
        self.kind = info.name
        self.name = f"{info.name} {what}"
        self.way = flag or "loop"

    @property
    def is_differentiable(self) -> bool:
        return self._flag == "differentiable"

    def difference(self) -> str | None:
        """What differs on the device, in a line; None if nothing does.

        Raises:
            EAGER_ERRORS: the optimizer refuses the call there, or here.
        """
        values = self._differentiated if self.is_differentiable else self._stepped
        steps = self._steps()
        dtype = torch.float64 if self._info.name in IN_FLOAT64 else torch.float32
        here, there, wide = (
            values("cpu", steps, dtype),
            values("dynaxla", steps, dtype),
            values("cpu", steps, torch.float64),
        )
        if here.keys() != there.keys():
            return f"other states: {sorted(here.keys() ^ there.keys())}"
        for name, expected in here.items():
            told = tensor_difference(there[name], expected, wide[name], False)
            if told is not None:
                return f"{name}: {told}"
        return None

    def _steps(self) -> int:
        """So many as the host takes: gradients of two steps some optimizers have not."""
        if not self.is_differentiable:
            return STEPS
        try:
            self._differentiated("cpu", 2, torch.float32)
        except RuntimeError:
            return 1
        return 2

    def _made(self, parameters: Any, device: str) -> torch.optim.Optimizer:
        given = {**self._given, **FEW_ITERATIONS.get(self._info.name, {})}
        if device == "cpu":  # which refuses it; the numbers are those of any other way
            given.pop("capturable", None)
        if "foreach" in given and self._flag is None:
            given["foreach"] = False
        for flag in self._info.supported_impls:
            given[flag] = flag == self._flag and (device != "cpu" or flag != "foreach")
        if device == "cpu":
            return self._info.optim_cls(parameters, **_own(given))  # type: ignore[no-any-return]
        on_device = given.get("capturable") or given.get("fused")
        return self._info.optim_cls(parameters, **(_moved(given) if on_device else _own(given)))  # type: ignore[no-any-return]

    def _stepped(self, device: str, steps: int, dtype: torch.dtype) -> Values:
        parameters = [x.requires_grad_() for x in self._numbers(device, dtype, 0)]
        targets = [self._numbers(device, dtype, step) for step in range(1, steps + 1)]
        optimizer = self._made(parameters, device)
        sparse = self._info.only_supports_sparse_grads
        losses = [optimizer.step(_closure(optimizer, parameters, there, sparse)) for there in targets]
        found = {f"parameter {i}": parameter for i, parameter in enumerate(parameters)}
        found |= {f"loss {i}": loss for i, loss in enumerate(losses)}
        return _on_host(found | _states(optimizer, parameters))

    def _differentiated(self, device: str, steps: int, dtype: torch.dtype) -> Values:
        """Gradients of what steps give, in the parameters and the gradients that they began with."""
        leaves = [x.requires_grad_() for x in self._numbers(device, dtype, 0)]
        gradients = [[x.requires_grad_() for x in self._numbers(device, dtype, step + 1)] for step in range(steps)]
        parameters = [leaf.clone() for leaf in leaves]
        optimizer = self._made(parameters, device)
        for each in gradients:
            for parameter, gradient in zip(parameters, each, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step(lambda: parameters[0].sum())
        sum(parameter.square().sum() for parameter in parameters).backward()  # type: ignore[union-attr]
        found = {f"parameter {i}": parameter for i, parameter in enumerate(parameters)}
        found |= {f"gradient of parameter {i}": leaf.grad for i, leaf in enumerate(leaves)}
        flat = [gradient for each in gradients for gradient in each]
        return _on_host(found | {f"gradient of gradient {i}": gradient.grad for i, gradient in enumerate(flat)})

    def _numbers(self, device: str, dtype: torch.dtype, number: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        matrices = self._info.name in ONLY_MATRICES
        shapes = [shape for shape in SHAPES if len(shape) == 2 or not matrices]
        return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def optimizer_calls(info: Any) -> Iterator[OptimizerCall]:
    """All calls of an OptimizerInfo: each of its inputs in each of the ways to step that it has."""
    for given in info.optim_inputs_func(MADE_FOR):
        for flag in (None, *info.supported_impls):
            if flag != "differentiable" or not given.kwargs.get("capturable"):
                yield OptimizerCall(info, given.kwargs, given.desc, flag)


def check_optimizer(call: OptimizerCall) -> Result:
    """What comes of a call on the device: as `device_sweep` says."""
    before = Counter(dynaxla.read_metrics().host_ops)
    try:
        told = call.difference()
    except EAGER_ERRORS as error:
        return "raised", f"{type(error).__name__}: {first_line(error)}"
    if told is not None:
        return "wrong", told
    hosted = Counter(dynaxla.read_metrics().host_ops) - before
    return ("host", " ".join(sorted(hosted))) if hosted else ("right", "")


def _closure(optimizer: torch.optim.Optimizer, parameters: Any, targets: Any, sparse: bool) -> Any:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        parts = [(p.sin() + 0.5 * p - t).square().mean() for p, t in zip(parameters, targets, strict=True)]
        total = torch.stack(parts).sum() + parts[0] * parts[-1]
        total.backward()
        for parameter in parameters:
            parameter.grad = parameter.grad.to_sparse() if sparse else parameter.grad
        return total

    return loss


def _states(optimizer: torch.optim.Optimizer, parameters: Any) -> dict[str, Any]:
    found = {}
    for number, parameter in enumerate(parameters):
        for name, value in optimizer.state[parameter].items():
            for place, leaf in enumerate(tree_leaves(value)):
                found[f"{name} {place} of parameter {number}"] = leaf
    return found


def _on_host(found: Mapping[str, Any]) -> Values:
    floats = {name: torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x for name, x in found.items()}
    return tree_map(lambda x: x.detach().cpu() if isinstance(x, torch.Tensor) else x, floats)  # type: ignore[no-any-return]


def _own(given: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, given)


def _moved(given: Any) -> Any:
    return tree_map(lambda x: x.detach().to("dynaxla") if isinstance(x, torch.Tensor) else x, given)
