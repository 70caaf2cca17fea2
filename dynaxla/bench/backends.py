"""Backends by their names on the command line, and how each runs a model.

eager                                 PyTorch, as it is
dynamo                                PyTorch as torch.compile captures it: what Dynamo alone takes (torch's backend "eager")
inductor                              torch.compile's own backend; so any other that torch knows
dynaxla                               this package
dynaxla:bucketing=off,compile=behind  with options of the backend, or arguments of torch.compile (dynamic, fullgraph, mode)
device, device:mode=fused,target=cpu  on the device "dynaxla": compiled, or op by op (mode=eager) or in traces (mode=fused)
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dynaxla.bench.answers import TrainingAnswer
from dynaxla.bench.cases import Run
from dynaxla.bench.workloads import Workload
from dynaxla.device.registration import device_mode, use
from dynaxla.errors import OptionError
from dynaxla.options import Options, require_member
from dynaxla.torch_api.pytree import tree_leaves, tree_map_only
from dynaxla.verify.float64_mode import Float64Mode, widen

OF_TORCH_COMPILE = ("dynamic", "fullgraph", "mode")
DEVICE_WAYS = ("compiled", "eager", "fused")
_NAMES_IN_TORCH = {"device": "dynaxla", "dynamo": "eager"}
Calls = Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class BenchBackend:
    """A backend as it was asked for.

    Attributes:
        text: of the command line.
        name: torch's name of a backend, "eager" or "device".
        arguments: of torch.compile, without options.
        options: of the backend.
        mode: of the device: "compiled", "eager" or "fused".
        target: of the device.
    """

    text: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "compiled"
    target: str = "cpu"

    @classmethod
    def parse(cls, text: str) -> BenchBackend:
        """
        Raises:
            OptionError: an unknown backend or option (the message has the nearest), or a value that the option does not take.
        """
        name, _, rest = text.partition(":")
        known = ["eager", "dynamo", "dynaxla", "device", *torch.compiler.list_backends(exclude_tags=())]
        require_member(name, dict.fromkeys(known), "backend")
        given = dict(_setting(text, piece) for piece in rest.split(",") if piece)
        if given and name == "eager":
            raise OptionError(f"the backend {text!r} has options, and eager takes none", "write eager")
        own: dict[str, Any] = {}
        if name == "device":
            own = {each: given.pop(each) for each in ("mode", "target") if each in given}
            require_member(own.get("mode", "compiled"), DEVICE_WAYS, "mode of the backend device")
        arguments = {each: given.pop(each) for each in OF_TORCH_COMPILE if each in given}
        if name in ("dynaxla", "device"):
            Options.from_mapping(given)
        return cls(text, name, arguments, given, **own)

    def prepare(self, workload: Workload, *, train: bool) -> Run:
        """Makes a run on a copy of the workload's model, which other backends do not see.

        Args:
            train: takes gradients of a weighted sum of all results; a run gives results and gradients.
        """
        calls: Calls = workload.calls
        function = _copy(workload.function)
        if self.name == "device":
            device = use(self.target)
            function = function.to(device) if isinstance(function, nn.Module) else function
            calls = tree_map_only(torch.Tensor, lambda tensor: _move(tensor, device), calls)
        wait = _waiting_for((function, calls))
        call = self._compile(function)
        mode = self._mode()
        run_once = _take_gradients(call, function) if train else torch.no_grad()(call)

        def run(number: int) -> Any:
            args, kwargs = calls[number]
            with mode():
                results = run_once(*args, **kwargs)
            wait()
            return results

        return run

    @staticmethod
    def prepare_in_float64(workload: Workload, *, train: bool) -> Run:
        """Makes a run in eager, in float64 (integers stay): what others are judged by where their results differ."""
        function = _copy(workload.function)
        function = function.double() if isinstance(function, nn.Module) else function
        calls = tree_map_only(torch.Tensor, _widen, workload.calls)
        run_once = _take_gradients(function, function) if train else torch.no_grad()(function)

        def run(number: int) -> Any:
            args, kwargs = calls[number]
            with Float64Mode():
                return run_once(*args, **kwargs)

        return run

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if self.name == "eager" or self.mode != "compiled":
            return function
        how = {"backend": _NAMES_IN_TORCH.get(self.name, self.name), **self.arguments}
        if self.options:
            how["options"] = dict(self.options)
        try:
            if hasattr(function, "compile_parts"):  # a loop around a model, as `generate` is one
                function.compile_parts(**how)
                return function
            return torch.compile(function, **how)
        except RuntimeError as error:  # an option that Inductor does not know
            raise OptionError(
                f"torch.compile refuses {self.text!r}: {error}", "see torch.compile's documentation"
            ) from None

    def _mode(self) -> Callable[[], AbstractContextManager[Any]]:
        return (lambda: device_mode("fused")) if self.mode == "fused" else nullcontext


def _setting(text: str, piece: str) -> tuple[str, Any]:
    name, equals, value = piece.partition("=")
    if not equals or not name.strip():
        raise OptionError(
            f"{piece!r} in the backend {text!r} is no option", "write NAME=VALUE, as in dynaxla:bucketing=off"
        )
    try:
        return name.strip(), json.loads(value)
    except ValueError:  # a word
        return name.strip(), value.strip()


def _copy(function: Callable[..., Any]) -> Any:
    if not isinstance(function, nn.Module):
        return function
    try:
        return copy.deepcopy(function)
    except (RuntimeError, TypeError):  # it holds a tensor that autograd made, or what cannot be copied
        return function


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device).requires_grad_(tensor.requires_grad)


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return widen(tensor).requires_grad_(tensor.requires_grad)


def _waiting_for(used: Any) -> Callable[[], object]:
    """What waits until all work of the devices is done on which the tensors are; the CPU's is done when a call returns."""
    tensors = [each for each in tree_leaves(used) if isinstance(each, torch.Tensor)]
    tensors += [each for leaf in tree_leaves(used) if isinstance(leaf, nn.Module) for each in leaf.parameters()]
    kinds = {tensor.device.type for tensor in tensors} - {"cpu", "meta"}
    waits = [torch.get_device_module(kind).synchronize for kind in sorted(kinds)]
    return lambda: [wait() for wait in waits]


def _take_gradients(call: Callable[..., Any], function: Any) -> Callable[..., TrainingAnswer]:
    """A call that gives results, detached, and the gradients of parameters and of arguments that need one.

    The results' own gradients are cosines of positions: those of a plain sum vanish where a normalization is last.
    """
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    known: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def weigh(result: torch.Tensor) -> torch.Tensor:
        key = (result.shape, result.dtype)
        if key not in known:
            known[key] = torch.arange(result.numel()).cos().reshape(result.shape).to(result.device, result.dtype)
        return known[key]

    def run(*args: Any, **kwargs: Any) -> TrainingAnswer:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        leaves = [each for each in (*parameters, *given) if each.requires_grad]
        results = [each for each in tree_leaves(call(*args, **kwargs)) if isinstance(each, torch.Tensor)]
        needing = [each for each in results if each.requires_grad]
        if not needing:
            raise OptionError("no result of the model needs a gradient", "leave out --train")
        torch.autograd.backward(needing, [weigh(each) for each in needing])
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return TrainingAnswer([each.detach() for each in results], gradients)

    return run
