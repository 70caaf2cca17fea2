"""Architectures of the zoo as something to train: dropout off, a loss of fixed targets, five steps of AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.zoo.architecture import SEED, Architecture

STEPS = 5
LEARNING_RATE = 1e-3
ROUNDING = 2.0**-24
EPSILON = 1e-5
"""AdamW's, as Llama 2 was trained with. AdamW divides a gradient by its own size plus this: with torch's 1e-8 a gradient that
is zero but for rounding (that of a key's bias, of a bias before a batch norm) moves its parameter as far as any other does,
in a direction that is chance, in eager too."""

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
_RANDOM_SETTINGS = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
"""Of DINOv3: how far positions are moved at random in training; None is not at all."""


@dataclass(frozen=True)
class Trainee:
    """A network in training mode, one batch, and what its outputs should be.

    Attributes:
        net: without dropout, so that nothing is random.
        args, kwargs: of its forward call.
        targets: for each floating output that has a gradient a tensor of its shape and dtype; for scores of classes (the
            outputs named logits) the classes instead, int64, without the dim of the classes.
    """

    net: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Tensor, ...]

    def loss(self) -> Tensor:
        """Mean squares and cross entropies of all outputs, summed: a float of shape ()."""
        out = self.net(*self.args, **self.kwargs)
        parts = [_part(x, target) for x, target in zip(_trained(out), self.targets, strict=True)]
        return torch.stack(parts).sum()


@dataclass(frozen=True)
class Trained:
    """What training left.

    Attributes:
        losses: before each step.
        gradients: of the first step, by the parameter's name; None for a parameter that the loss does not depend on.
        state: parameters and buffers after the last step, by name.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor | None]
    state: Mapping[str, Tensor]


def trainee(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Trainee:
    """The same weights, inputs and targets at every call; the weights are float32's in any dtype."""
    net, args, kwargs = architecture.build(dtype)
    without_randomness(net)
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False  # what is kept for the next token is not trained
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = _with_padding_behind(kwargs["attention_mask"])
    out = net(*args, **kwargs)  # some models install hooks at their first call, too
    net.train()
    torch.manual_seed(SEED + 1)
    return Trainee(net, args, kwargs, tuple(_targets(out)))


def _with_padding_behind(mask: Tensor) -> Tensor:
    """In front of the text, it gives causal models tokens that may look at nothing: NaN in every gradient, in eager."""
    return mask.sort(1, descending=True)[0]


def without_randomness(net: nn.Module) -> None:
    """Every probability of dropping anything becomes zero, of modules and of the configs that they read in forward."""
    for module in net.modules():
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(vars(owner).items()) if owner is not None else ():
                if isinstance(value, float) and "drop" in name:
                    setattr(owner, name, 0.0)
                if name in _RANDOM_SETTINGS:
                    setattr(owner, name, None)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.1  # the zoo measured statistics with None, which is a mean over all batches


def _trained(out: Any) -> list[Tensor]:
    leaves = [x.mode() if hasattr(x, "mode") and not isinstance(x, Tensor) else x for x in pytree.tree_leaves(out)]
    return [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]


def _targets(out: Any) -> Iterator[Tensor]:
    logits = getattr(out, "logits", None)
    for x in _trained(out):
        if x is logits:
            yield torch.randint(0, x.shape[_classes(x)], x.select(_classes(x), 0).shape)
        else:
            yield torch.randn(x.shape, dtype=torch.float32).to(x.dtype)


def _classes(scores: Tensor) -> int:
    """The dim of the classes: that of channels in an image, else the last."""
    return 1 if scores.dim() == 4 else -1


def _part(x: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return F.mse_loss(x, target)
    return F.cross_entropy(x.movedim(_classes(x), 1), target)


def shaken(trainee: Trainee) -> Trainee:
    """The same, in place, from weights that are each off by about one rounding of float32."""
    torch.manual_seed(SEED + 2)
    with torch.no_grad():
        for parameter in trainee.net.parameters():
            parameter.mul_(1 + ROUNDING * torch.randn_like(parameter).sign())
    return trainee


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def train(trainee: Trainee, compiler: Compiler = _as_it_is, compile_step: Compiler = _as_it_is) -> Trained:
    """Trains the network in place.

    Args:
        compiler, compile_step: make of the loss and of the optimizer's step what is called instead.
    """
    trained = [x for x in trainee.net.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(trained, torch.tensor(LEARNING_RATE), eps=EPSILON, weight_decay=0.01)
    loss, step = compiler(trainee.loss), compile_step(optimizer.step)
    losses: list[float] = []
    gradients: dict[str, Tensor | None] = {}
    for i in range(STEPS):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        losses.append(value.item())
        if i == 0:
            gradients = {n: None if x.grad is None else x.grad.clone() for n, x in trainee.net.named_parameters()}
        step()
    state = {name: x.detach() for name, x in (*trainee.net.named_parameters(), *trainee.net.named_buffers())}
    return Trained(tuple(losses), gradients, state)
