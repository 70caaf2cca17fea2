"""What `explain` and `report` say beside what to change: who lowers what, masks, folds, donation, memory, bytes that cross.
`test_explaining.py` runs these."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch import Tensor, nn

import dynaxla
from dynaxla.explaining.described_parts import LoweredOp, write_bytes
from dynaxla.explaining.explanation import Explanation
from tests.explaining.check_mistakes import line_of


@pytest.fixture(scope="module", autouse=True)
def device() -> torch.device:
    return dynaxla.use("cpu")


def lowered(found: Explanation, op: str) -> LoweredOp:
    (one,) = [each for each in found.account.list_lowered() if each.op == op]
    return one


@torch.library.custom_op("explaining::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("explaining::largest_first", mutates_args=())
def largest_first(x: Tensor) -> Tensor:
    return x.sort(1, descending=True).values


doubled.register_fake(torch.empty_like)
largest_first.register_fake(torch.empty_like)


def double(x: jax.Array) -> jax.Array:
    return x * 2


@torch.no_grad()
def test_a_loop_is_told_by_its_body() -> None:
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            begin = (torch.zeros((), dtype=torch.int64), x)
            return torch.while_loop(lambda n, x: n < 5, lambda n, x: (n + 1, self.inner(x)), begin)[1]  # type: ignore[no-any-return]

    found = dynaxla.explain(Turn(), torch.randn(16, 64))
    (cost,) = [cost for cost in found.list_costs() if cost.module == "inner"]
    assert cost.op in ("linear", "addmm")
    assert cost.flops == 2 * 16 * 64 * 64
    assert cost.line == line_of(Turn.forward, "self.inner")
    ops = {each.op: each.lowered_by for each in found.account.list_lowered()}
    assert ops["aten.lt.Scalar"] == "JAX body"
    assert not [op for op in ops if "dynaxla_regions" in op]


@torch.no_grad()
def test_who_lowers_what(tmp_path: Path) -> None:
    dynaxla.register_lowering(torch.ops.explaining.doubled.default, double)

    def compute(x: Tensor) -> Tensor:
        y = torch.relu(x) + torch.relu(x * 3)
        z = torch.nn.functional.pixel_shuffle(y.reshape(1, 4, 2, 4), 2)
        w = doubled(z.reshape(8, 4))
        u = torch.linalg.svdvals(w)
        return largest_first(w) + u

    found = dynaxla.explain(compute, torch.randn(4, 8))
    relu = lowered(found, "aten.relu.default")
    assert (relu.lowered_by, relu.calls, relu.stands_for) == ("torch-mlir", 2, "")
    assert relu.where.startswith(line_of(compute, "relu"))
    assert lowered(found, "aten._linalg_svd.default").lowered_by == "JAX body"
    assert lowered(found, "explaining.doubled.default").lowered_by == "your lowering"
    eager = lowered(found, "explaining.largest_first.default")
    assert (eager.lowered_by, eager.where.startswith(line_of(compute, "largest_first"))) == ("eager", True)
    (shuffle,) = [e for e in found.account.list_lowered() if e.op == "aten.permute.default" and e.stands_for]
    assert "(decomposed from aten.pixel_shuffle.default): torch-mlir, 1 call; at" in str(shuffle)
    assert str(shuffle) in str(found)
    assert {"op": eager.op, "lowered_by": "eager"}.items() <= json.loads(found.to_json())["lowered"][-1].items()
    found.write_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<h2>who lowers what</h2>" in page
    assert "aten._linalg_svd.default: JAX body, 1 call" in page


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.norm(self.conv(x)).relu().amax((2, 3))
        return self.out(pooled)


@torch.no_grad()
def test_folds_and_memory() -> None:
    found = dynaxla.explain(Normalized().eval(), torch.randn(2, 3, 8, 8))
    (part,) = found.account.parts
    kernel = next(value for value in part.folded if value.nbytes == 8 * 3 * 3 * 3 * 4)
    assert "aten.rsqrt.default" in kernel.ops  # the batch norm's, which is part of the kernel
    assert kernel.where.startswith(line_of(Normalized.forward, "self.norm"))
    program, fold = part.programs
    assert (program.bucket, fold.bucket) == ("fixed", "weights")
    folded, kept, given = sum(value.nbytes for value in part.folded), 4 * (8 * 4 + 4), 4 * 2 * 3 * 8 * 8
    assert program.memory is not None
    assert program.memory.arguments_bytes == folded + kept + given
    assert program.memory.outputs_bytes == 4 * 2 * 4
    assert program.memory.peak_bytes >= program.memory.arguments_bytes
    assert program.flops > 0
    line = f"outputs {write_bytes(32)}"
    assert line in found.account.list_sections()["memory of the programs that are loaded"][0]
    read = json.loads(found.to_json())["parts"][0]
    assert read["programs"][0]["memory"]["outputs_bytes"] == 32
    assert read["folded"][0]["nbytes"] == part.folded[0].nbytes


@torch.no_grad()
def test_the_costliest_ops_have_flops_and_bytes() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.out = nn.Linear(256, 512), nn.Linear(512, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.wide(x).tanh())

    found = dynaxla.explain(Two(), torch.randn(64, 256))
    costs = {cost.module: cost for cost in found.list_costs() if cost.op in ("addmm", "linear")}
    assert costs["wide"].flops == 2 * 64 * 256 * 512
    assert costs["wide"].nbytes == 4 * (64 * 256 + 256 * 512 + 512 + 64 * 512)
    assert costs["out"].flops == 2 * 64 * 512 * 2
    assert sum(cost.device_ms for cost in found.list_costs()) == pytest.approx(found.calls.device_ms)


@torch.no_grad()
def test_masks() -> None:
    sizes = itertools.cycle((5, 6, 7))

    def attend(x: Tensor) -> Tensor:
        scores = x @ x.mT
        return torch.softmax(scores, -1)

    compiled = torch.compile(attend, backend="dynaxla", dynamic=True)
    found = dynaxla.explain(lambda: compiled(torch.randn(next(sizes), 8)), wrap=False)
    (part,) = [part for part in found.account.parts if part.masked]
    (mask,) = [each for each in part.masked if each.op == "aten._softmax.default"]
    assert (mask.fill, mask.masks) == ("-inf", 1)
    assert mask.where.startswith(line_of(attend, "softmax"))
    assert "masks of padding" in str(found)


@torch.no_grad()
def test_what_is_donated_and_what_is_not(device: torch.device) -> None:
    def step(cache: Tensor, held: Tensor, x: Tensor) -> Tensor:
        cache[:, 2] = x
        old = held * 1
        held.add_(1)
        return (cache * 2).sum() + old.sum()

    def share(x: Tensor) -> Tensor:
        ordered = largest_first(x)
        x.add_(1)
        return ordered.sum()

    def check(x: Tensor) -> Tensor:
        torch._assert_async((x > -1e9).all())
        return x.add_(1).sum()

    given = (torch.zeros(4, 8), torch.zeros(4), torch.ones(4))
    (part,) = dynaxla.explain(step, *(t.to(device) for t in given)).account.parts
    taken = part.programs[0].donated
    assert [text.partition(";")[0] for text in taken] == ["float32[4, 8]", "float32[4]"]
    assert line_of(step, "cache[:, 2]") in taken[0]
    assert part.programs[0].memory is not None
    assert part.programs[0].memory.aliased_bytes == 4 * (32 + 4)
    assert not part.kept

    host = dynaxla.explain(step, *given)
    assert [why.partition("; at")[0] for why in host.account.parts[0].kept] == [
        "float32[4, 8]: torch owns its memory, and PJRT takes what it allocated",
        "float32[4]: torch owns its memory, and PJRT takes what it allocated",
    ]
    assert "inputs that are written, and keep their memory" in str(host)
    shared = dynaxla.explain(share, torch.zeros(3, 2, device=device)).account.parts
    (kept,) = [why for part in shared for why in part.kept]
    assert kept.startswith("float32[3, 2]: another part of the graph, or an op in eager, reads it")
    assert line_of(share, "add_") in kept
    (kept,) = dynaxla.explain(check, torch.zeros(3, device=device)).account.parts[0].kept
    assert "an assertion of the graph may fail" in kept


@torch.no_grad()
def test_bytes_that_cross(device: torch.device) -> None:
    """An op of the device that the host computes: its operand goes there, its result comes back."""

    def positions(x: Tensor) -> Tensor:
        return (x * 2).nonzero() + 1

    x = torch.zeros(4, 8, device=device)
    x[0, 0] = x[1, 2] = x[3, 3] = 1.0
    found = dynaxla.explain(positions, x, calls=2)
    crossed = found.calls.whole.host_bytes["aten.nonzero.default"]
    assert (crossed.to_host, crossed.to_device) == (2 * 4 * 8 * 4, 2 * 3 * 2 * 8)
    assert "2 calls, 256 B to the host, 96 B to the device" in str(found)
    (finding,) = [each for each in found.findings if "the host computed" in each.what]
    assert "256 B to the host" in finding.what
    (read,) = json.loads(found.to_json())["host_ops"]
    assert read == {"op": "aten.nonzero.default", "calls": 2, "to_host": 256, "to_device": 96}
    assert not dynaxla.explain(torch.tanh, x).calls.whole.host_ops  # it is not told of what was before


@torch.no_grad()
def test_the_report_is_the_short_form() -> None:
    """Its lines are explain's, of the whole process, without those that need a look at the calls of each program."""
    model = torch.compile(Normalized().eval(), backend="dynaxla")
    found: Any = dynaxla.explain(model, torch.randn(2, 3, 8, 8))
    sections, told = found.account.list_sections(), dynaxla.report()
    for title in ("memory of the programs that are loaded", "computed once per version of the weights"):
        assert title in told.splitlines()
        assert sections[title]
        lines = {
            re.sub(r" \(\d+ times\)$", "", line) for line in told.splitlines()
        }  # of the process, which has others' too
        assert lines >= {f"  {line}" for line in sections[title]}
    assert str(found.account.metrics.captured[0]) in told
    assert "who lowers what" in sections
    assert "who lowers what" not in told
