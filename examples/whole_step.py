"""A training step as one executable: forward, backward and AdamW together, for a small net on handwritten digits.

    pip install 'dynaxla[examples]'
    python examples/whole_step.py                    # a perceptron, 200 steps, in four ways
    python examples/whole_step.py --net transformer --steps 300

The usual way has three pieces: `torch.compile(net)` is an executable for the forward and one for the backward, and
`torch.compile(optimizer.step)` a third. Two ways make it one:

- "in place" takes gradients inside of the compiled function, by `torch.autograd.grad` (`loss.backward()` works, too), which
  Dynamo captures where `torch._dynamo.config.trace_autograd_ops` is on, and updates the parameters that the net has;
- "functional" is a function from old parameters and moments to new ones, by `torch.func`, as one would write it in JAX.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.optim.adamw import adamw

import dynaxla

RATE, DECAY, EPSILON = 3e-3, 0.01, 1e-8
BETA, BETA_OF_SQUARES = 0.9, 0.999
BATCH = 32
Step = Callable[[Tensor, Tensor], Tensor]
"""Images [batch, 8, 8] and labels [batch] -> the loss, after which the net is trained by them."""


def perceptron() -> nn.Module:
    """[batch, 8, 8] -> [batch, 10]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def transformer() -> nn.Module:
    """The rows of an image as a sequence: [batch, 8, 8] -> [batch, 10]."""
    layers = [nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(2)]
    return nn.Sequential(nn.Linear(8, 32), *layers, nn.Flatten(), nn.Linear(256, 10))


NETS = {"perceptron": perceptron, "transformer": transformer}


def in_pieces(net: nn.Module, wrap: Callable[..., Any]) -> Step:
    """The usual step."""
    optimizer = torch.optim.AdamW(
        net.parameters(), torch.tensor(RATE), (BETA, BETA_OF_SQUARES), EPSILON, weight_decay=DECAY
    )
    loss_of, update = wrap(lambda images, labels: F.cross_entropy(net(images), labels)), wrap(optimizer.step)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(images, labels)
        loss.backward()
        update()
        return loss.detach()

    return step


def in_place(net: nn.Module, wrap: Callable[..., Any]) -> Step:
    """Gradients are taken and parameters written inside of the function that is compiled.

    torch's optimizers read the gradients outside of the graph, so the update is the function that AdamW itself calls.
    """
    parameters = list(net.parameters())
    means, squares = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    counts, rate = [torch.tensor(0.0) for _ in parameters], torch.tensor(RATE)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(net(images), labels)
        gradients = list(torch.autograd.grad(loss, parameters))
        with torch.no_grad():
            adamw(
                parameters,
                gradients,
                means,
                squares,
                [],
                counts,
                amsgrad=False,
                beta1=BETA,
                beta2=BETA_OF_SQUARES,
                lr=rate,
                weight_decay=DECAY,
                eps=EPSILON,
                maximize=False,
            )
        return loss.detach()

    return wrap(step, fullgraph=True)  # type: ignore[no-any-return]


Tensors = dict[str, Tensor]


def functional(net: nn.Module, wrap: Callable[..., Any]) -> Step:
    """New parameters and moments from old ones; the net's own are set to the new ones after each step."""
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    moments = [{name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2)]
    state = (parameters, *moments, torch.tensor(0.0))

    def loss_of(parameters: Tensors, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, parameters, (images,)), labels)

    def pure(state: tuple[Tensors, Tensors, Tensors, Tensor], images: Tensor, labels: Tensor) -> tuple[Any, Tensor]:
        parameters, means, squares, count = state
        gradients, loss = grad_and_value(loss_of)(parameters, images, labels)
        count = count + 1
        means = {name: torch.lerp(means[name], g, 1 - BETA) for name, g in gradients.items()}
        squares = {
            name: BETA_OF_SQUARES * squares[name] + (1 - BETA_OF_SQUARES) * g * g for name, g in gradients.items()
        }
        scale = RATE / (1 - BETA**count)
        root = (1 - BETA_OF_SQUARES**count).sqrt()
        parameters = {
            name: p * (1 - RATE * DECAY) - scale * means[name] / (squares[name].sqrt() / root + EPSILON)
            for name, p in parameters.items()
        }
        return (parameters, means, squares, count), loss

    compiled = wrap(pure, fullgraph=True)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        nonlocal state
        state, loss = compiled(state, images, labels)
        for name, parameter in net.named_parameters():
            parameter.data = state[0][name]
        return loss  # type: ignore[no-any-return]

    return step


@dataclass(frozen=True)
class Trained:
    """Attributes:
    losses: of every step.
    executables: how many were compiled for all steps together.
    first_s: of the first two steps, compiles included.
    step_ms: median of the others.
    """

    net: nn.Module
    losses: list[float]
    executables: int
    first_s: float
    step_ms: float


def train(net: nn.Module, step: Step, batches: Iterator[tuple[Tensor, Tensor]], steps: int) -> Trained:
    losses, seconds = [], []
    before = dynaxla.read_metrics().compiles
    for images, labels in itertools.islice(batches, steps):
        started = time.perf_counter()
        loss = step(images, labels)
        seconds.append(time.perf_counter() - started)
        losses.append(loss.item())
    executables = dynaxla.read_metrics().compiles - before
    return Trained(net, losses, executables, sum(seconds[:2]), 1e3 * sorted(seconds[2:])[len(seconds) // 2 - 1])


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's handwritten digits: images [1797, 8, 8] in 0..1, and labels."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return torch.from_numpy(pixels).float().view(-1, 8, 8) / 16, torch.from_numpy(labels)


def batches(images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The same ones for every way to train."""
    generator = torch.Generator().manual_seed(0)
    while True:
        chosen = torch.randint(0, len(images), (BATCH,), generator=generator)
        yield images[chosen], labels[chosen]


def compare(name: str, steps: int) -> dict[str, Trained]:
    """Trains the same net in four ways."""
    data = digits()
    torch.manual_seed(0)
    net = NETS[name]()
    eager, compiled = (lambda function, **_: function), (lambda f, **how: torch.compile(f, backend="dynaxla", **how))
    ways = {
        "eager": (in_pieces, eager),
        "three pieces": (in_pieces, compiled),
        "whole, in place": (in_place, compiled),
        "whole, functional": (functional, compiled),
    }
    runs = {}
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        for title, (way, wrap) in ways.items():
            own = copy.deepcopy(net)
            runs[title] = train(own, way(own, wrap), batches(*data), steps)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=NETS, default="perceptron")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    runs = compare(given.net, given.steps)
    table = Table(
        "way", "executables", "first steps, s", "a step, ms", "last loss", title=f"{given.net}, {given.steps} steps"
    )
    for title, run in runs.items():
        table.add_row(title, str(run.executables), f"{run.first_s:.1f}", f"{run.step_ms:.2f}", f"{run.losses[-1]:.5f}")
    Console().print(table)
    print(dynaxla.report())


if __name__ == "__main__":
    main()
