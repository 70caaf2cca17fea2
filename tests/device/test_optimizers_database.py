"""torch's optimizer database on the device: parameters, states and gradients of steps beside the host's.

All of it, in a process each, is in `python -m conformance.device_sweep optimizers`.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.common_optimizers import optim_db

import dynaxla
from conformance.device_optimizers import OptimizerCall, check_optimizer, optimizer_calls
from tests.tolerances import assert_close

QUICK = ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Muon")


def _cases() -> list[object]:
    """Each optimizer in each of its ways, with its first input; and one with all that accelerators take."""
    found = {}
    for info in optim_db:
        if not info.only_supports_sparse_grads:
            for call in optimizer_calls(info):
                found.setdefault((call.kind, call.way), call)
                if call.name == "Adam Tensor lr, Tensor betas, with capturable and amsgrad":
                    found[call.name, call.way] = call
    return [
        pytest.param(call, id=f"{call.name}, {call.way}", marks=() if call.kind in QUICK else (pytest.mark.long,))
        for call in found.values()
    ]


@pytest.mark.parametrize("call", _cases())
def test_an_optimizer_is_eagers(call: OptimizerCall) -> None:
    assert check_optimizer(call) == ("right", "")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("overflows", [False, True])
def test_a_fused_step_unscales_and_skips(kind: type[torch.optim.Optimizer], overflows: bool) -> None:
    """As a GradScaler has it: the gradients are divided by the scale, and nothing is written where one is infinite."""
    before = dynaxla.read_metrics().host_ops
    found = []
    for device in ("cpu", "dynaxla"):
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(5, 3, generator=generator).to(device).requires_grad_()
        optimizer = kind([w], lr=0.1, fused=True, weight_decay=0.2, maximize=True)
        for step in range(3):
            w.grad = torch.randn(5, 3, generator=generator).to(device)
            optimizer.grad_scale = torch.full((), 4.0, device=device)
            optimizer.found_inf = torch.full((), float(overflows and step == 1), device=device)
            optimizer.step()
        state = [x for x in optimizer.state[w].values() if isinstance(x, torch.Tensor)]
        found.append([x.detach().cpu() for x in (w, w.grad, *state)])
    for own, host in zip(*reversed(found), strict=True):
        assert_close(own, host)
    assert dynaxla.read_metrics().host_ops == before


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_step_of_16_bits(kind: type[torch.optim.Optimizer]) -> None:
    """Beside the loop on the host: the host's fused kernel of SGD is off by some units in the last place."""
    found = []
    for device, fused in (("cpu", False), ("dynaxla", True)):
        generator = torch.Generator().manual_seed(0)
        w = torch.randn(40, generator=generator).to(device, torch.bfloat16).requires_grad_()
        optimizer = kind([w], lr=0.01, fused=fused)
        for _ in range(3):
            w.grad = torch.randn(40, generator=generator).to(device, torch.bfloat16)
            optimizer.step()
        found.append(w.detach().cpu())
    assert_close(found[1], found[0])


@pytest.mark.parametrize("fused", [False, True])
def test_a_rate_that_changes_is_no_other_program(fused: bool) -> None:
    w = torch.ones(7, device="dynaxla", requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=0.1, fused=fused, foreach=not fused)
    compiles = []
    for step in range(6):
        w.grad = torch.full_like(w, step + 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
        optimizer.step()
        compiles.append(dynaxla.read_metrics().compiles)
    assert compiles[-1] == compiles[1]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_steps_rate_is_a_number_of_the_host(kind: type[torch.optim.Optimizer]) -> None:
    stepped = []
    for device in ("cpu", "dynaxla"):
        weight = torch.nn.Parameter(torch.arange(4.0, device=device))
        weight.grad = torch.ones_like(weight)
        kind([weight], lr=torch.tensor([0.1]), fused=True).step()  # type: ignore[call-arg]
        stepped.append(weight.detach().cpu())
    assert_close(*stepped)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_steps_of_fake_tensors(kind: type[torch.optim.Optimizer]) -> None:
    """DTensors ask for a step's fake results, and torch has no meta kernel for most."""
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(4, device="dynaxla"))
        weight.grad = torch.empty(4, device="dynaxla")
        kind([weight], lr=torch.tensor(0.1), fused=True).step()  # type: ignore[call-arg]
        assert isinstance(weight.data, FakeTensor)
