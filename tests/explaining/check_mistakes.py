"""Mistakes of a new user's: `explain` names each first, and where it is mended the time is gained. `test_explaining.py` runs
these."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynaxla
from dynaxla.__main__ import main
from dynaxla.errors import OptionError
from dynaxla.explaining.explanation import Explanation


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, start = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}:{start + next(i for i, line in enumerate(lines) if text in line)}"


def kinds(found: Explanation) -> list[str]:
    return [finding.kind for finding in found.findings]


def check_gain(before: Explanation, after: Explanation, kind: str) -> None:
    """The mistake comes first, and is gone where it is mended. docs/explain.md has the times."""
    assert before.findings[0].kind == kind, before
    assert kind not in kinds(after), after


@torch.no_grad()
def test_a_word_that_changes() -> None:
    numbers, x = itertools.count(), torch.randn(64)

    def make(wrong: bool) -> Callable[[], Tensor]:
        compiled = torch.compile(lambda x, name: x * len(name), backend="dynaxla")
        return lambda: compiled(x, f"epoch {next(numbers)}" if wrong else "epoch")

    before, after = (dynaxla.explain(make(wrong), wrap=False, calls=6) for wrong in (True, False))
    assert "name" in before.findings[0].what, before
    check_gain(before, after, "recompile")


@torch.no_grad()
def test_a_loop_over_a_tensor() -> None:
    scale = torch.randn(1 << 17)  # its rows outweigh the host's part of a call, also beside other work

    def loop(x: Tensor) -> Tensor:
        return torch.stack([torch.tanh(row * scale).sum() for row in x])

    x = torch.randn(64, 1 << 17)
    before, after = dynaxla.explain(loop, x), dynaxla.explain(lambda x: torch.tanh(x * scale).sum(1), x)
    assert before.findings[0].where == line_of(loop, "for row in x"), before
    check_gain(before, after, "unrolled-loop")


@torch.no_grad()
def test_float64_by_accident() -> None:
    wide, x = torch.rand(512, dtype=torch.float64), torch.randn(2048, 512)

    def scale(x: Tensor, by: Tensor) -> Tensor:
        return torch.sin(x * by).exp().sum(1)

    def narrow(x: Tensor, by: Tensor) -> Tensor:
        return torch.sin(x * by.float()).exp().sum(1)

    scaled = torch.compile(lambda x: scale(x, wide), backend="dynaxla")
    mended = torch.compile(lambda x: narrow(x, wide), backend="dynaxla")
    before, after = dynaxla.explain(scaled, x), dynaxla.explain(mended, x)
    assert before.findings[0].where.startswith(__file__), before
    check_gain(before, after, "float64")


@torch.no_grad()
def test_an_item_in_the_middle() -> None:
    def cut(x: Tensor) -> Tensor:
        scale = x.abs().max().item()
        return torch.tanh(x / scale)

    x = torch.randn(16, 16)
    before, after = dynaxla.explain(cut, x), dynaxla.explain(lambda x: torch.tanh(x / x.abs().max()), x)
    broken = next(finding for finding in before.findings if finding.kind == "graph-break")
    assert broken.where.startswith(line_of(cut, "item()")), before
    check_gain(before, after, "graph-break")


@torch.no_grad()
def test_sizes_that_never_repeat() -> None:
    sizes = itertools.count(10, 700)
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    compiled = torch.compile(net, backend="dynaxla", dynamic=True)
    declared = torch.compile(net, backend="dynaxla", dynamic=True, options={"buckets": {0: dynaxla.Explicit((8192,))}})

    def step(which: Callable[[Tensor], Tensor]) -> Tensor:
        return which(torch.randn(next(sizes), 8))

    before = dynaxla.explain(step, compiled, wrap=False, calls=6)
    sizes = itertools.count(10, 700)
    after = dynaxla.explain(step, declared, wrap=False, calls=6)
    assert "sizes" in before.findings[0].what, before
    check_gain(before, after, "recompile")


@torch.no_grad()
def test_a_weight_that_is_converted_in_every_call() -> None:
    weight, x = torch.randn(4096, 1024).bfloat16(), torch.randn(1, 4096)

    def converts(x: Tensor, weight: Tensor) -> Tensor:
        wide = weight.float()
        return x @ wide

    before, after = dynaxla.explain(converts, x, weight), dynaxla.explain(lambda x, w: x @ w, x, weight.float())
    assert before.findings[0].where == line_of(converts, "float()"), before
    assert before.findings[0].kind == "slow-op", before
    assert before.findings[0].what.startswith("_to_copy takes"), before
    assert not any("_to_copy" in found.what for found in after.findings), after  # the product takes all of the time now


@torch.no_grad()
def test_a_part_that_refuses_buckets() -> None:
    sizes = itertools.count(3)

    def refuses(x: Tensor) -> Tensor:
        return torch.linalg.svdvals(x).sum() + x.sum()

    compiled = torch.compile(refuses, backend="dynaxla", dynamic=True)
    mended = torch.compile(lambda x: (x @ x.mT).diagonal().sqrt().sum() + x.sum(), backend="dynaxla", dynamic=True)

    def step(which: Callable[[Tensor], Tensor]) -> Tensor:
        size = next(sizes)
        return which(torch.randn(size, size))

    before = dynaxla.explain(step, compiled, wrap=False, calls=5)
    sizes = itertools.count(3)
    after = dynaxla.explain(step, mended, wrap=False, calls=5)
    assert before.findings[0].where.startswith(line_of(refuses, "svdvals")), before
    check_gain(before, after, "exact-shape")


def test_a_learning_rate_as_a_number() -> None:
    def make(rate: float | Tensor) -> Callable[[], None]:
        net = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(net.parameters(), rate)
        update = torch.compile(optimizer.step, backend="dynaxla")
        x = torch.randn(4, 8)

        def step() -> None:
            net(x).sum().backward()
            update()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].mul_(0.9)
                else:
                    group["lr"] *= 0.9

        return step

    before, after = (dynaxla.explain(make(rate), wrap=False, calls=6) for rate in (0.1, torch.tensor(0.1)))
    assert "learning rate" in before.findings[0].advice, before
    check_gain(before, after, "recompile")


@torch.library.custom_op("explaining::sorted_rows", mutates_args=())
def sorted_rows(x: Tensor) -> Tensor:
    return x.sort(1).values


@sorted_rows.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Mixed(nn.Module):
    """With a graph break, an op that runs in eager, a part that refuses buckets, and a slow convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 7, padding=3)

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        y = self.conv(x).mean()
        print(end="")
        ordered = sorted_rows(rows * 2)
        return y + ordered.sum() + torch.linalg.svdvals(ordered[:, :4]).sum()


@torch.no_grad()
def test_four_at_once() -> None:
    torch.manual_seed(0)
    model, x, rows = Mixed(), torch.randn(8, 64, 56, 56), torch.randn(300, 64)
    compiled = torch.compile(model, backend="dynaxla", dynamic=True)
    found = dynaxla.explain(compiled, x, rows)
    assert {"slow-op", "graph-break", "fallback", "exact-shape"} <= set(kinds(found)), found
    costs = [finding.cost_ms for finding in found.findings if finding.kind != "overhead"]
    assert costs == sorted(costs, reverse=True)
    places = {finding.kind: finding.where for finding in found.findings}
    assert places["graph-break"].startswith(line_of(Mixed.forward, "print"))
    assert places["fallback"].startswith(line_of(Mixed.forward, "sorted_rows"))
    assert places["exact-shape"].startswith(line_of(Mixed.forward, "svdvals"))
    slow = next(finding for finding in found.findings if finding.kind == "slow-op")
    assert "of conv " in slow.what
    assert slow.where == line_of(Mixed.forward, "self.conv(x)")
    assert all(finding.cost_ms > 0 for finding in found.findings), found


@torch.no_grad()
def test_text_json_and_page(tmp_path: Path) -> None:
    found = dynaxla.explain(nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8))
    read = json.loads(found.to_json())
    assert read["eager_ms"] > 0
    assert read["programs"]["compiled"] + read["programs"]["loaded"] == 1
    assert sum(read["device_time_ms"]["op"].values()) == pytest.approx(read["device_ms"])
    assert "device time" in str(found)
    found.write_html(tmp_path / "page.html")
    HTMLParser().feed((tmp_path / "page.html").read_text())
    assert "device time" in (tmp_path / "page.html").read_text()


@torch.no_grad()
def test_padding_is_that_of_the_function() -> None:
    """And not of what the process ran before."""
    sizes = itertools.cycle((33, 34, 35))
    padded = torch.compile(
        lambda x: torch.tanh(x @ x.mT), backend="dynaxla", dynamic=True, options={"call_metrics": True}
    )
    before = dynaxla.explain(lambda: padded(torch.randn(next(sizes), 64)), wrap=False)
    after = dynaxla.explain(torch.tanh, torch.randn(40, 40))
    assert "padding" in kinds(before), before
    assert "padding" not in kinds(after), after


def test_a_backward_is_explained() -> None:
    found = dynaxla.explain(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(32, 64), backward=True)
    assert any(name.endswith("/backward") for name in found.as_dict()["device_time_ms"]["module"])


def test_one_call_is_too_few() -> None:
    with pytest.raises(OptionError, match="two calls"):
        dynaxla.explain(torch.sin, torch.ones(2), calls=1)


FACTORY = """
import torch

def model():
    return (lambda x: x / x.abs().max().item()), (torch.ones(4),)
"""


@torch.no_grad()
def test_the_command_fails_on_what_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "explained.py").write_text(FACTORY)
    factory = f"{tmp_path / 'explained.py'}:model"
    assert main(["explain", factory, "--json", "--html", str(tmp_path / "page.html")]) == 0
    assert json.loads(capsys.readouterr().out)["findings"][0]["kind"] == "graph-break"
    assert (tmp_path / "page.html").exists()
    assert main(["explain", factory, "--fail-on", "fallback,recompile"]) == 0
    assert main(["explain", factory, "--fail-on", "graph-break"]) == 1
    assert "graph-break: the graph ends" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["explain", factory, "--fail-on", "breaks"])
