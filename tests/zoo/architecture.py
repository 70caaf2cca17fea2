"""What one entry of the zoo is, and how its weights and inputs are drawn."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""An eval-mode module, and the positional and keyword arguments of one forward call."""

Build = Callable[[torch.dtype], Built]
Inputs = Callable[[], Mapping[str, Any]]

BOTH_DTYPES = (torch.float32, torch.bfloat16)
FLOAT32_ONLY = (torch.float32,)
SEED = 20


@dataclass(frozen=True)
class Architecture:
    """A model that is small enough to be built and compiled in a test.

    name: unique in the zoo. family: text, vision, speech, multimodal, diffusion or plain.
    build(dtype): a new module and new inputs, bitwise the same at every call. Some modules write into their
        inputs (key-value caches): build again, or deep-copy the inputs, for each run that is compared.
    dtypes: the dtypes whose results can be compared; dtypes_reason says why one is missing.
    graphs: how many graphs Dynamo cuts the forward call into, counted on a module that eager has called once (some
        models of transformers install hooks at their first call, which breaks the graph); graphs_reason says why it
        is not 1.
    """

    name: str
    build: Build
    family: str
    dtypes: tuple[torch.dtype, ...] = BOTH_DTYPES
    dtypes_reason: str = ""
    graphs: int = 1
    graphs_reason: str = ""

    def __post_init__(self) -> None:
        if self.dtypes != BOTH_DTYPES and not self.dtypes_reason:
            raise ValueError(f"{self.name}: say why dtypes is {self.dtypes}")
        if self.graphs != 1 and not self.graphs_reason:
            raise ValueError(f"{self.name}: say why there are {self.graphs} graphs")


def build_from_config(library: str, model: str, config: str, inputs: Inputs, settings: Mapping[str, Any]) -> Build:
    """Build `library.model(library.config(**settings))`; the library is imported at the first build only."""

    def build(dtype: torch.dtype) -> Built:
        module = importlib.import_module(library)
        torch.manual_seed(SEED)
        net = getattr(module, model)(getattr(module, config)(**settings))
        return finish(net, (), inputs(), dtype)

    return build


def build_from_settings(library: str, model: str, inputs: Inputs, settings: Mapping[str, Any]) -> Build:
    """Build `library.model(**settings)`, the way of diffusers."""

    def build(dtype: torch.dtype) -> Built:
        module = importlib.import_module(library)
        torch.manual_seed(SEED)
        return finish(getattr(module, model)(**settings), (), inputs(), dtype)

    return build


def finish(net: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Built:
    """Give every weight a size that matters to the output, then cast net and float32 inputs to `dtype`.

    Initial weights are often zeros, ones, or so small that attention is uniform: a backend could drop a bias, a
    scale or a mask and still agree with eager. Batch normalization gets the statistics of these inputs, or deep
    networks would fade to a constant.
    """
    net.eval()
    with torch.no_grad():
        for parameter in net.parameters():
            _randomise_parameter(parameter)
        _calibrate(net, args, kwargs)
    return net.to(dtype), tuple(_cast(a, dtype) for a in args), {name: _cast(a, dtype) for name, a in kwargs.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
        return value.to(dtype)
    return value


def _randomise_parameter(parameter: torch.Tensor) -> None:
    if not parameter.is_floating_point() or parameter.numel() == 0:
        return
    noise = torch.randn_like(parameter)
    if parameter.ndim < 2:
        parameter.add_(0.1 * noise)
        return
    fan_in = parameter[0].numel()
    scale = 1.0 / math.sqrt(fan_in)
    if parameter.std(correction=0) < 0.5 * scale:
        parameter.copy_(scale * noise)


def _calibrate(net: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Measure running means and variances on the inputs, then move them a little off what was measured.

    Scales are drawn around 1, because some models of transformers start them near 0.
    """
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)]
    if not norms:
        return
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        if norm.weight is not None:
            norm.weight.copy_(1.0 + 0.1 * torch.randn_like(norm.weight))
        norm.train()
    net(*args, **kwargs)
    for norm in norms:
        norm.eval()
        mean, variance = norm.running_mean, norm.running_var
        if mean is not None and variance is not None:
            mean.add_(0.1 * torch.randn_like(mean))
            variance.mul_(0.8 + 0.4 * torch.rand_like(variance)).clamp_(min=0.01)
