"""Trains a convolutional net and a small transformer on scikit-learn's handwritten digits, compiled and in eager.

    pip install 'dynaxla[examples]'
    python examples/train_digits.py                # both nets, 15 epochs, a plot of the losses in digits.png
    python examples/train_digits.py --net transformer --epochs 5 --plot losses.png
    python examples/train_digits.py --device dynaxla   # nets and images on the device: they are moved, nothing else
    python examples/train_digits.py --devices 8    # data parallel over eight devices of the CPU: each batch is split

1,797 images of 8 x 8 pixels, a fifth of them kept for the test. The last batch of an epoch is smaller than the others. Both
runs start from the same weights and see the same batches.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import dynaxla

BATCH = 64


class ConvNet(nn.Module):
    """Two convolutions with batch norms, pooling, dropout and a linear layer: [batch, 1, 8, 8] -> [batch, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.second_norm = nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.head = nn.Linear(32 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first_norm(self.first(x))), 2)
        x = F.max_pool2d(F.relu(self.second_norm(self.second(x))), 2)
        return self.head(x.flatten(1))


class Transformer(nn.Module):
    """The rows of an image as a sequence of 8 tokens, two encoder layers, the mean: [batch, 1, 8, 8] -> [batch, 10]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(8, width), nn.Parameter(torch.zeros(8, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x[:, 0]) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


NETS: dict[str, Callable[[], nn.Module]] = {"conv": ConvNet, "transformer": Transformer}


@dataclass(frozen=True)
class Digits:
    """Images, float32 in 0..1, and labels, int64."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls) -> Digits:
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        images = torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        images, targets = images[order], torch.from_numpy(labels)[order]
        kept = len(images) // 5
        return cls(images[kept:], targets[kept:], images[:kept], targets[:kept])

    def to(self, move: Callable[[Any], Any]) -> Digits:
        """The same, moved."""
        return Digits(*(move(getattr(self, field.name)) for field in fields(self)))

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(epoch))
        for start in range(0, len(order), BATCH):
            chosen = order[start : start + BATCH]
            yield self.images[chosen], self.labels[chosen]


@dataclass(frozen=True)
class Trained:
    """Attributes:
    losses: of every step.
    accuracy: share of the test images that are recognized.
    seconds: of all epochs, compiles included.
    """

    losses: list[float]
    accuracy: float
    seconds: float


def train(net: nn.Module, digits: Digits, epochs: int, title: str, wrap: Callable[[Any], Any]) -> Trained:
    """Trains with AdamW and a falling learning rate; `wrap` compiles the net and the optimizer's step, or does not."""
    optimizer = torch.optim.AdamW(net.parameters(), torch.tensor(3e-3))
    steps = epochs * -(-len(digits.images) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    forward, update = wrap(net), wrap(optimizer.step)
    losses: list[float] = []
    started = time.perf_counter()
    with tqdm(total=steps, desc=title) as progress:
        for epoch in range(epochs):
            for images, labels in digits.batches(epoch):
                optimizer.zero_grad()
                loss = F.cross_entropy(forward(images), labels)
                loss.backward()
                update()
                schedule.step()
                losses.append(loss.item())
                progress.update()
            progress.set_postfix(loss=f"{losses[-1]:.3f}")
    seconds = time.perf_counter() - started
    net.eval()
    with torch.no_grad():
        right = (forward(digits.test_images).argmax(1) == digits.test_labels).float().mean().item()
    return Trained(losses, right, seconds)


def split_batches(net: nn.Module) -> None:
    """Has each batch of a net be split over the devices; of one that they do not divide XLA pads the last parts."""
    net.register_forward_pre_hook(lambda module, args: (dynaxla.constrain(args[0], ("data",)),))


def compare(name: str, digits: Digits, epochs: int, device: str = "cpu", devices: int = 1) -> dict[str, Trained]:
    """The same net trained in eager and compiled, the latter on a device or on several; prints accuracies and what was
    compiled."""
    torch.manual_seed(0)
    net = NETS[name]()
    twin, move = copy.deepcopy(net), lambda value: value.to(device)
    if devices > 1:
        mesh = dynaxla.make_mesh((devices,), ("data",))
        move = lambda value: dynaxla.shard(value, mesh, {} if isinstance(value, nn.Module) else ())  # noqa: E731
        split_batches(twin)
    twin, there = move(twin), digits.to(move)
    eager = train(net, digits, epochs, f"{name}, eager", lambda function: function)
    before = dynaxla.read_metrics()
    compiled = train(
        twin, there, epochs, f"{name}, dynaxla", lambda function: torch.compile(function, backend="dynaxla")
    )
    after = dynaxla.read_metrics()
    print(
        f"{name}: test accuracy {eager.accuracy:.4f} in eager, {compiled.accuracy:.4f} compiled; "
        f"{eager.seconds:.1f} s and {compiled.seconds:.1f} s with compiles; "
        f"{after.compiles - before.compiles} executables of {after.graphs - before.graphs} graphs"
    )
    return {f"{name}, eager": eager, f"{name}, dynaxla": compiled}


def plot(runs: dict[str, Trained], path: Path) -> None:
    """Draws the losses of the runs."""
    from matplotlib import pyplot

    for title, run in runs.items():
        pyplot.plot(run.losses, label=title, linewidth=0.8)
    pyplot.yscale("log")
    pyplot.xlabel("step")
    pyplot.ylabel("cross-entropy")
    pyplot.legend()
    pyplot.savefig(path, dpi=120)
    print(f"losses: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--net", choices=[*NETS, "both"], default="both")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--plot", type=Path, default=Path("digits.png"))
    parser.add_argument("--device", choices=["cpu", "dynaxla"], default="cpu", help="where the compiled net is trained")
    parser.add_argument("--devices", type=int, default=1, help="of the CPU, over which the compiled net is trained")
    given = parser.parse_args()
    if given.devices > 1:
        dynaxla.use("cpu", devices=given.devices)
    elif given.device == "dynaxla":
        dynaxla.use()
    digits = Digits.load()
    runs: dict[str, Trained] = {}
    for name in NETS if given.net == "both" else [given.net]:
        runs.update(compare(name, digits, given.epochs, given.device, given.devices))
    plot(runs, given.plot)


if __name__ == "__main__":
    main()
