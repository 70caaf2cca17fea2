"""What training loops are made of, compiled: after every step parameters, buffers and gradients are eager's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dynaxla.observe.recorder import Recorder
from tests.lists import quick
from tests.tolerances import assert_close
from tests.training.stepping import FORWARD_AND_BACKWARD, Step, Wrap, check, draw, plain


def clipping_outside(net: nn.Module, wrap: Wrap) -> Step:
    forward = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        F.cross_entropy(forward(x), labels).backward()
        norm = clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        return norm

    return step


def test_clipping_outside(recorder: Recorder) -> None:
    check(clipping_outside, recorder, FORWARD_AND_BACKWARD)


@pytest.mark.parametrize("by", ["norm", "value"])
def test_clipping_inside(by: str, recorder: Recorder) -> None:
    """torch breaks the graph before and after every optimizer's step: clipping and step are two executables."""

    def run(net: nn.Module, wrap: Wrap) -> Step:
        optimizer = torch.optim.SGD(net.parameters(), torch.tensor(0.1), momentum=0.9)

        def update() -> Tensor | None:
            result = clip_grad_norm_(net.parameters(), 0.1) if by == "norm" else None
            if by == "value":
                clip_grad_value_(net.parameters(), 0.01)
            optimizer.step()
            return result

        forward, compiled_update = wrap(net), wrap(update)

        def step(x: Tensor, labels: Tensor) -> Tensor | None:
            optimizer.zero_grad()
            F.cross_entropy(forward(x), labels).backward()
            return compiled_update()  # type: ignore[no-any-return]

        return step

    check(run, recorder, [4, 1, 0, 0])  # the first step makes the momenta, so the second is another graph


def test_accumulation(recorder: Recorder) -> None:
    """Gradients of four micro-batches, of which the last is smaller and takes a bucket."""

    def run(net: nn.Module, wrap: Wrap) -> Step:
        loss = wrap(lambda x, labels: F.cross_entropy(net(x), labels, reduction="sum") / 30)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def step(*_: Tensor) -> None:
            x, labels = draw(7, 30)
            optimizer.zero_grad()
            for part, its_labels in zip(x.split(8), labels.split(8), strict=True):
                loss(part, its_labels).backward()
            optimizer.step()

        return step

    check(run, recorder, [4, 0, 0])


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again in the backward: [batch, 6] -> [batch, 3]."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant, self.first, self.head = reentrant, nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool, recorder: Recorder) -> None:
    check(plain, recorder, FORWARD_AND_BACKWARD, Checkpointed(reentrant))


def _recompute_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


_HOW_TO_CHECKPOINT: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not_reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _recompute_attention),
    },
}


@pytest.mark.parametrize(
    ("how", "dropout"),
    [*((how, 0.0) for how in _HOW_TO_CHECKPOINT), *quick([("not_reentrant", 0.5)])],
)
def test_attention_under_a_checkpoint(how: str, dropout: float, recorder: Recorder) -> None:
    """It draws nothing, or what this package draws: no generator's state is kept. With dropout the numbers are not eager's."""
    project, before = nn.Linear(8, 24), recorder.snapshot().exact_shapes

    def attend(x: Tensor) -> Tensor:
        q, k, v = project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).sin()

    def run(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(attend, x, **_HOW_TO_CHECKPOINT[how])
        return result

    compiled = torch.compile(run, backend="dynaxla", dynamic=True)
    with recorder.expect(compiles=2, eager_ops=0):
        for length in (7, 8):
            x = torch.randn(2, length, 8, requires_grad=True)
            weights = [x, project.weight]
            found = torch.autograd.grad(compiled(x).square().sum(), weights)
            if not dropout:
                expected = torch.autograd.grad(attend(x).square().sum(), weights)
                for mine, eager in zip(found, expected, strict=True):
                    assert_close(mine, eager)
    assert recorder.snapshot().exact_shapes == before


@pytest.mark.parametrize("around", ["the call", "what is compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_scaled_losses(dtype: torch.dtype, around: str, recorder: Recorder) -> None:
    """The second step's gradients overflow: the step is skipped and the scale halved."""

    def run(net: nn.Module, wrap: Wrap) -> Step:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)  # type: ignore[attr-defined]

        def cast(forward: Any) -> Any:
            def loss(x: Tensor, labels: Tensor) -> Tensor:
                with torch.autocast("cpu", dtype):
                    return F.cross_entropy(forward(x), labels)

            return loss

        loss = cast(wrap(net)) if around == "the call" else wrap(cast(net))
        scales: list[float] = []

        def step(x: Tensor, labels: Tensor) -> Tensor:
            before = [p.clone() for p in net.parameters()]
            optimizer.zero_grad()
            value = loss(x, labels)
            scaler.scale(value).backward()
            if len(scales) == 1:
                next(net.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            assert scales == [1024.0, 512.0, 512.0, 1024.0][: len(scales)]
            kept = all(torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True))
            assert kept == (len(scales) == 2)
            return value.detach()

        return step

    net = check(run, recorder, FORWARD_AND_BACKWARD)
    assert all(p.dtype == torch.float32 for p in net.parameters())


def test_overflow_that_autocast_makes(recorder: Recorder) -> None:
    """Values beyond float16 are infinite in both, so that the scaler skips the same steps."""

    def run(net: nn.Module, wrap: Wrap) -> Step:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)  # type: ignore[attr-defined]
        forward = wrap(net)

        def step(x: Tensor, labels: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                value = F.cross_entropy(forward(x), labels)
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
            return torch.tensor(scaler.get_scale())

        return step

    check(run, recorder, [2, 0, 0, 0, 0, 0])


class Tied(nn.Module):
    """A head that is the embedding: [batch, 6] -> [batch, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(3, 6), nn.Linear(6, 6), nn.Linear(6, 3, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(x + self.words(x.argmax(1) // 2))))


def test_tied_weights(recorder: Recorder) -> None:
    net = check(plain, recorder, FORWARD_AND_BACKWARD, Tied())
    assert net.head.weight is net.words.weight


def test_frozen_parts(recorder: Recorder) -> None:
    """Thawed at the third step, frozen again at the fifth: one more pair of graphs, no more."""

    def run(net: nn.Module, wrap: Wrap) -> Step:
        step, steps = plain(net, wrap), iter(range(9))

        def freezing(x: Tensor, labels: Tensor) -> None:
            net[0].requires_grad_(next(steps) in (2, 3))  # type: ignore[index]
            step(x, labels)

        return freezing

    check(run, recorder, [2, 0, 2, 0, 0, 0])
