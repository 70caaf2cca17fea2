"""Runs torch's module database on the device, and compares results, gradients and buffers with the host's."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

import dynaxla
from conformance.opinfo_compare import first_line, tensor_difference
from conformance.opinfo_samples import EAGER_ERRORS, seed

Values = Mapping[str, Any]
Result = tuple[str, str]  # status, detail


class ModuleCall:
    """A module of the database with one of its inputs.

    Args:
        info: the ModuleInfo.
        given: its ModuleInput, made for the host, whose tensors of floating point have gradients.
    """

    def __init__(self, info: Any, given: Any, training: bool) -> None:
        self._info = info
        self._given = given
        self._training = training

    def made(self, dtype: torch.dtype) -> nn.Module:
        """The module on the host, as this call's seed makes it."""
        seed()
        constructed = self._given.constructor_input
        args, kwargs = _as_dtype((constructed.args, constructed.kwargs), dtype)
        module: nn.Module = self._info.module_cls(*args, **kwargs).to(dtype)
        return module.train(self._training)

    def moved(self, module: nn.Module, dtype: torch.dtype) -> nn.Module:
        """A copy on the device; of a lazy module one that saw this call's tensors there, with the host's numbers."""
        if not self._info.is_lazy:
            return copy.deepcopy(module).to("dynaxla")
        there = self.made(dtype).to("dynaxla")
        self.values(there, "dynaxla", dtype)
        self.values(module, "cpu", dtype)
        there.load_state_dict(module.state_dict())
        return there.requires_grad_()

    def values(self, module: nn.Module, device: str, dtype: torch.dtype, numbers: int = 0) -> Values:
        """What the module gives, the gradients of inputs and parameters, and what its buffers hold, all on the host.

        Args:
            numbers: seeds what is drawn.
        """
        called = self._given.forward_input
        args, kwargs = _leaves_on((called.args, called.kwargs) if called is not None else ((), {}), device, dtype)
        module.zero_grad()
        torch.manual_seed(numbers)
        results = _tensors(module(*args, **kwargs))
        _backward([result for result in results if result.requires_grad])
        found: dict[str, Any] = {f"result {i}": result for i, result in enumerate(results)}
        found |= {f"gradient of input {i}": x.grad for i, x in enumerate(_tensors((args, kwargs))) if x.requires_grad}
        found |= {f"gradient of {name}": parameter.grad for name, parameter in module.named_parameters()}
        found |= {f"buffer {name}": buffer for name, buffer in module.named_buffers()}
        return {name: None if value is None else value.detach().cpu() for name, value in found.items()}

    def difference(self, dtype: torch.dtype) -> str | None:
        """What differs on the device, in a line; None if nothing does.

        Raises:
            EAGER_ERRORS: the host does not take the call.
        """
        here = self.made(dtype)
        there = self.moved(here, dtype)
        drawn = [self.values(copy.deepcopy(here), "cpu", dtype, numbers) for numbers in (1, 2)]
        own = self.values(there, "dynaxla", dtype, 1)
        is_random = any(not _same(*pair) for pair in zip(drawn[0].values(), drawn[1].values(), strict=True))
        wide = None if is_random or dtype is torch.float64 else _or_none(self._wide, here)
        return values_difference(own, drawn[0], wide, is_random)

    def _wide(self, module: nn.Module) -> Values:
        return self.values(copy.deepcopy(module).double(), "cpu", torch.float64, 1)

    def runs_on_the_host(self, dtype: torch.dtype) -> bool:
        """Whether eager PyTorch takes the call there."""
        return _or_none(lambda module: self.values(module, "cpu", dtype), self.made(dtype)) is not None


def module_calls(info: Any, dtype: torch.dtype, training: bool) -> Iterator[ModuleCall]:
    """The calls of a ModuleInfo that eager takes on the host."""
    seed()
    makes = info.module_inputs_func
    for given in makes(info, device="cpu", dtype=dtype, requires_grad=True, training=training):
        call = ModuleCall(info, given, training)
        if call.runs_on_the_host(dtype):
            yield call


def check_module(info: Any, dtype: torch.dtype, training: bool, most: int | None = None) -> Result:
    """What comes of a ModuleInfo's calls on the device: as `device_sweep` says."""
    calls = list(islice(module_calls(info, dtype, training), most))
    before = Counter(dynaxla.read_metrics().host_ops)
    for number, call in enumerate(calls):
        try:
            told = call.difference(dtype)
        except EAGER_ERRORS as error:
            return "raised", f"{number}: {type(error).__name__}: {first_line(error)}"
        if told is not None:
            return "wrong", f"{number}: {told}"
    hosted = Counter(dynaxla.read_metrics().host_ops) - before
    if hosted:
        return "host", " ".join(sorted(hosted))
    return ("right", f"{len(calls)}") if calls else ("not run", "eager takes none of the calls")


def values_difference(own: Values, host: Values, wide: Values | None, is_random: bool) -> str | None:
    """What differs, in a line: in kind alone where the numbers are random."""
    if own.keys() != host.keys():
        return f"{sorted(own)}, the host gives {sorted(host)}"
    for name, expected in host.items():
        told = tensor_difference(own[name], expected, None if wide is None else wide[name], is_random)
        if told is not None:
            return f"{name}: {told}"
    return None


def _leaves_on(given: Any, device: str, dtype: torch.dtype) -> Any:
    def leaf(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            return PackedSequence(leaf(value.data), value.batch_sizes, *map(leaf, value[2:]))
        if not isinstance(value, torch.Tensor):
            return value
        floats = value.detach().to(dtype) if value.is_floating_point() else value.detach()
        return floats.to(device, copy=True).requires_grad_(value.requires_grad)

    return tree_map(leaf, given, is_leaf=_is_packed)


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _as_dtype(given: Any, dtype: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.detach().to(dtype) if is_float else value

    return tree_map(cast, given)


def _tensors(given: Any) -> list[torch.Tensor]:
    packed = [x.data if _is_packed(x) else x for x in tree_leaves(given, is_leaf=_is_packed)]
    return [x for x in packed if isinstance(x, torch.Tensor)]


def _backward(results: Sequence[torch.Tensor]) -> None:
    """With cotangents that are the same on all devices."""
    if results:
        torch.manual_seed(3)
        cotangents = [torch.randn(x.shape, dtype=x.dtype).to(x.device) for x in results]
        torch.autograd.backward(results, cotangents)


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


def _or_none(function: Any, module: nn.Module) -> Values | None:
    try:
        found: Values = function(module)
        return found
    except EAGER_ERRORS:
        return None
