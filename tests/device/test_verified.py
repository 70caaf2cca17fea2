"""`options={"verify": f}` on the device: compared with eager PyTorch on the host, not with the device's own ops."""

from __future__ import annotations

import itertools
from typing import Any

import jax.numpy as jnp
import pytest
import torch

import dynaxla
from dynaxla.errors import DivergenceError
from dynaxla.observe.recorder import Recorder
from tests.tolerances import assert_close
from tests.verify.test_checked_graph import Trained, verified

_numbers = itertools.count()


@torch.no_grad()
def test_a_wrong_kernel_is_found_though_the_device_has_it_too(device: torch.device) -> None:
    name, schema = f"verify_on_device::op_{next(_numbers)}", "(Tensor x) -> Tensor"
    op: Any = torch.library.custom_op(name, torch.tanh, mutates_args=(), schema=schema)
    op.register_fake(lambda x: torch.empty_like(x))
    dynaxla.register_lowering(op._opoverload, lambda x: jnp.tanh(x) * 1.01)
    x = torch.randn(3, 4)
    with pytest.raises(DivergenceError, match=f"diverges: {op._opoverload}") as caught:
        verified(lambda x: op(x.sin()) + torch.arange(4, device=x.device))(x.to(device))
    assert "lowering or XLA" in str(caught.value)


def test_training_donation_and_draws_are_the_same(device: torch.device, recorder: Recorder) -> None:
    model = Trained().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    compiled = verified(model)
    update = verified(lambda cache, row: cache.index_copy_(0, torch.tensor([1], device=cache.device), row).sum(0))
    with recorder.expect(diverged_calls=0, verified_calls=4 + 2):
        for _ in range(2):
            compiled(torch.randn(5, 6, device=device)).square().sum().backward()
            optimizer.step()
        cache, row = torch.zeros(4, 3, device=device), torch.ones(1, 3, device=device)
        with torch.no_grad():
            for _ in range(2):
                update(cache, row)
    assert_close(cache.cpu(), torch.tensor([[0.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]))


@torch.no_grad()
def test_a_bucket_on_the_device_is_compared_at_true_sizes(device: torch.device, recorder: Recorder) -> None:
    compiled = verified(lambda x: (x.cumsum(0), x.t() * 2), dynamic=True)
    with recorder.expect(compiles=1, diverged_calls=0, verified_calls=2):
        for rows in (5, 7):
            x = torch.randn(rows, 3)
            for mine, eager in zip(compiled(x.to(device)), (x.cumsum(0), x.t() * 2), strict=True):
                assert_close(mine.cpu(), eager)


@torch.no_grad()
def test_verifying_draws_no_other_numbers_on_the_device(device: torch.device) -> None:
    x, results = torch.randn(20, 20, device=device), []
    for options in ({"verify": 1.0}, {}):
        torch.manual_seed(3)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: torch.dropout(x, 0.5, True), backend="dynaxla", options=options)
        results.append([compiled(x).cpu() for _ in range(2)])
    for with_verify, without in zip(*results, strict=True):
        assert torch.equal(with_verify, without)


@torch.no_grad()
def test_two_functions_on_the_device_are_compared(device: torch.device) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Softmax(-1)).to(device)
    found = dynaxla.compare(model, torch.compile(model, backend="dynaxla"), torch.randn(5, 6, device=device))
    assert found.is_close
    assert found.is_as_near
