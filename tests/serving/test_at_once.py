"""A server that accepts requests before anything is compiled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import dynaxla
from dynaxla.observe.recorder import Recorder
from dynaxla.runtime_state import process
from dynaxla.serving import Server, Settings
from tests.async_compile.ended import until
from tests.tolerances import assert_close


def pooled(x: torch.Tensor) -> torch.Tensor:
    return x.softmax(1).square().sum(1)


def test_requests_are_served_while_their_shapes_are_compiled(recorder: Recorder) -> None:
    compiled = torch.compile(pooled, backend="dynaxla", options={"compile": "behind"})
    settings = Settings(max_size=16, min_size=2, sizes=dynaxla.Explicit((8, 16)), max_batch=4, max_wait_s=0.01)

    @torch.no_grad()
    def run(batch: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        longest = max(map(len, batch))
        return list(
            compiled(torch.stack([torch.nn.functional.pad(x, (0, longest - len(x)), value=-1e9) for x in batch]))
        )

    @torch.no_grad()
    def prepare() -> None:
        example = torch.randn(2, 8)
        dynaxla.mark_bucketed(example, 0, policy=settings.rows, min=2, max=4)
        dynaxla.mark_bucketed(example, 1, policy=settings.sizes, min=2, max=16)
        dynaxla.warmup(compiled, (example,), progress=False, wait=False)

    def check(server: Server[torch.Tensor, torch.Tensor]) -> None:
        asked = [torch.randn(size) for size in (5, 7, 8)]
        for x, future in zip(asked, server.submit_all(asked), strict=True):
            assert_close(future.result(timeout=60), pooled(x[None])[0])

    before = recorder.snapshot()
    with Server(run, len, settings, prepare=prepare) as server:
        check(server)
        assert recorder.snapshot().served_eager > before.served_eager, "nothing was compiled when it began"
        until(lambda: process().compile_service.idle)
        with recorder.expect(graphs=0, compiles=0, served_eager=0):
            check(server)
    assert recorder.snapshot().served_own > before.served_own
