"""`torch.dynaxla`, `torch.accelerator`, random numbers and autocast."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.device.registration import device_in_use
from dynaxla.errors import OptionError, TargetError
from tests.tolerances import assert_close


def test_what_the_module_says() -> None:
    assert torch.dynaxla.is_available()
    assert (torch.dynaxla.device_count(), torch.dynaxla.current_device()) == (1, 0)
    assert torch.dynaxla.platform() == device_in_use().client.platform
    with torch.dynaxla.device(0), torch.dynaxla.stream(torch.dynaxla.current_stream()):
        torch.dynaxla.synchronize()
    torch.dynaxla.set_device("dynaxla:0")
    with pytest.raises(RuntimeError, match="one device of a type"):
        torch.dynaxla.set_device(1)
    assert torch.dynaxla.get_device_name()


def test_accelerator() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("dynaxla")
    assert (torch.accelerator.device_count(), torch.accelerator.current_device_index()) == (1, 0)
    torch.accelerator.set_device_index(0)
    assert torch.get_device_module("dynaxla") is torch.dynaxla
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() == torch.dynaxla.memory_allocated()
    assert torch.ones(1, device="dynaxla").is_dynaxla
    assert torch.ones(2).dynaxla().device.type == "dynaxla"


def test_memory_is_counted_and_given_back() -> None:
    before = torch.dynaxla.memory_allocated()
    x = torch.ones(1 << 16, device="dynaxla")
    view = x[:10]
    assert torch.dynaxla.memory_allocated() == before + (1 << 18)
    del x
    assert torch.dynaxla.memory_allocated() == before + (1 << 18)
    assert torch.dynaxla.max_memory_allocated() >= before + (1 << 18)
    del view
    assert torch.dynaxla.memory_allocated() == before
    assert torch.dynaxla.memory_stats()["tensors.bytes"] == before


def test_one_platform_per_process() -> None:
    assert dynaxla.use() == dynaxla.use(device_in_use().platform) == torch.device("dynaxla")
    with pytest.raises(OptionError, match=f"the process uses {device_in_use().platform}, not tpu"):
        dynaxla.use("tpu")


def test_seeds_repeat_draws() -> None:
    def draw() -> list[torch.Tensor]:
        x = torch.empty(50, device="dynaxla").uniform_(-1, 1)
        dropped = nn.functional.dropout(torch.ones(50, device="dynaxla"), 0.5)
        return [
            each.cpu() for each in (torch.randn(50, device="dynaxla"), x, dropped, torch.randperm(9, device="dynaxla"))
        ]

    torch.manual_seed(3)
    first, second = draw(), draw()
    torch.manual_seed(3)
    for mine, again, other in zip(first, draw(), second, strict=True):
        assert torch.equal(mine, again)
        assert not torch.equal(mine, other)
    state = torch.dynaxla.get_rng_state()
    third = torch.rand(4, device="dynaxla")
    torch.dynaxla.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="dynaxla"), third)
    torch.dynaxla.manual_seed(7)
    assert torch.dynaxla.initial_seed() == 7
    with torch.random.fork_rng(devices=[0], device_type="dynaxla"):
        torch.rand(4, device="dynaxla")


def test_the_generators_state_is_a_seed_and_an_offset() -> None:
    torch.dynaxla.manual_seed(5)
    state = torch.dynaxla.get_rng_state("dynaxla:0")
    assert (state.dtype, state.device.type, state.view(torch.int64).tolist()) == (torch.uint8, "cpu", [5, 0])
    first, second = (torch.randn(4, device="dynaxla").tolist() for _ in range(2))
    seed, offset = torch.dynaxla.get_rng_state().view(torch.int64).tolist()
    assert (seed, first != second) == (5, True)
    torch.dynaxla.set_rng_state(torch.tensor([5, offset // 2]).view(torch.uint8))
    assert torch.randn(4, device="dynaxla").tolist() == second
    torch.dynaxla.manual_seed(-1)
    assert torch.dynaxla.initial_seed() == torch.Generator().manual_seed(-1).initial_seed() == 2**64 - 1
    assert torch.dynaxla.get_rng_state().tolist() == [255] * 8 + [0] * 8
    with pytest.raises(RuntimeError, match=r"is uint8 \[16\], a seed and an offset, not torch.uint8 \[5056\]"):
        torch.dynaxla.set_rng_state(torch.get_rng_state())
    with pytest.raises(ValueError, match="Overflow"):
        torch.dynaxla.manual_seed(2**64)


def test_draws_on_the_host_are_of_the_devices_generator() -> None:
    rates = torch.full((40,), 30.0, device="dynaxla")
    state, host = torch.dynaxla.get_rng_state(), torch.get_rng_state()
    one, two = torch.poisson(rates).tolist(), torch.poisson(rates).tolist()
    torch.dynaxla.set_rng_state(state)
    assert torch.poisson(rates).tolist() == one != two
    given = [torch.poisson(rates, generator=torch.Generator().manual_seed(3)).tolist() for _ in range(2)]
    assert given[0] == given[1]
    assert torch.equal(torch.get_rng_state(), host)


def test_draws_compile_once() -> None:
    torch.randn(6, 2, device="dynaxla")
    with dynaxla.recorder().expect(compiles=0):
        one, other = torch.randn(6, 2, device="dynaxla"), torch.randn(6, 2, device="dynaxla")
    assert not torch.equal(one, other)


def test_generators_of_the_host_are_taken() -> None:
    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.empty(8, device="dynaxla").normal_(generator=generator).cpu()

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_generators_of_the_device() -> None:
    """They are the host's, of which ops take seeds, in compiled graphs too."""
    generator = torch.Generator(device="dynaxla")

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(4, device=x.device, generator=generator)

    x, compiled = torch.zeros(4, device="dynaxla"), torch.compile(add, backend="dynaxla")
    before = dict(dynaxla.read_metrics().host_ops)
    for draw in (
        lambda: torch.randn(4, generator=generator, device="dynaxla"),
        lambda: torch.multinomial(torch.ones(9, device="dynaxla"), 3, generator=generator),
        lambda: torch.randint(0, 99, (4,), generator=generator, device="dynaxla"),
        lambda: torch.randperm(9, generator=generator, device="dynaxla"),
        lambda: compiled(x),
    ):
        drawn = []
        for seed in (1, 1, 2):
            generator.manual_seed(seed)
            drawn.append((draw().tolist(), draw().tolist()))
        assert drawn[0] == drawn[1] != drawn[2]
        assert drawn[0][0] != drawn[0][1]
    assert dynaxla.read_metrics().host_ops == before
    with pytest.raises(RuntimeError, match="dynaxla:1"):
        torch.Generator("dynaxla:1")


def test_distributions() -> None:
    torch.manual_seed(0)
    x = torch.randn(20000, device="dynaxla")
    assert abs(x.mean().item()) < 0.03
    assert abs(x.std().item() - 1) < 0.03
    assert abs(torch.bernoulli(torch.full((20000,), 0.3, device="dynaxla")).mean().item() - 0.3) < 0.02
    assert torch.randint(3, 7, (1000,), device="dynaxla").unique().tolist() == [3, 4, 5, 6]


def test_autocast() -> None:
    model, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)), torch.randn(3, 4)
    there = copy.deepcopy(model).to("dynaxla")
    with torch.autocast("dynaxla", dtype=torch.bfloat16):
        inner = there[0](x.to("dynaxla"))
        out = there(x.to("dynaxla"))
        assert inner.dtype is torch.bfloat16
        assert there[2](inner).dtype is torch.float32
        assert out.softmax(-1).dtype is torch.float32
        assert (inner @ inner.t()).dtype is torch.bfloat16
        assert torch.addcmul(out.float(), out, out).dtype is torch.float32
        with torch.autocast("dynaxla", enabled=False):
            assert there[0](x.to("dynaxla")).dtype is torch.float32
    out.float().sum().backward()
    assert there[0].weight.grad.dtype is torch.float32
    expected = model(x)
    assert (out.detach().float().cpu() - expected.detach()).abs().max() < 0.1


def test_an_unknown_platform_is_an_error_of_its_own() -> None:
    from dynaxla.targets.registry import connect, find_target

    with pytest.raises(TargetError):
        connect(find_target("no_such_platform"))


def test_sums_stay_exact_enough() -> None:
    x = torch.randn(1000)
    assert_close(x.to("dynaxla").sum().cpu(), x.sum())


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_a_checkpoint_computes_again_draws_the_same(reentrant: bool) -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5)).to("dynaxla")
    x = torch.ones(16, 6, device="dynaxla", requires_grad=True)
    result = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
    result.sum().backward()
    kept = (result.detach() != 0).sum(0)
    assert layer[0].bias.grad.tolist() == (2 * kept).tolist()
