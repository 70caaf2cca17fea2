"""Ops outside of compiled graphs whose sizes vary: one graph of buckets for a kind of calls, with eager's numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynaxla
from dynaxla.device import dynamic_op_graphs
from dynaxla.device.dynamic_op_calls import MOST_COPIED
from dynaxla.device.dynamic_op_graphs import DynamicOpGraphs, find_dynamic_dims
from dynaxla.device.padded_buffers import BufferCopies
from dynaxla.device.registration import device_in_use
from dynaxla.device.shape_generic_key import OpRecompileWarnings
from dynaxla.device.storage import storage_of
from dynaxla.observe.recorder import Recorder
from dynaxla.programs.program_cache import ProgramCache
from dynaxla.runtime.transfers import download, upload_readonly
from tests.device.junk import junk_in_padding
from tests.same_layout import telling_strides
from tests.tolerances import assert_close

DEVICE = "dynaxla"
SIZES = (5, 6, 7, 11, 16, 17, 23, 32, 33)
WEIGHT, BIAS = torch.randn(6, 4), torch.randn(4)


class Made:
    """The kinds that got graphs, and those that were refused one."""

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self.refused: dict[str, str] = {}


@contextmanager
def seen() -> Iterator[Made]:
    found = Made()
    make, refuse = DynamicOpGraphs._make_graph, DynamicOpGraphs._refuse

    def made(*args: Any) -> Any:
        graph = make(*args)
        found.graphs += [args[1].known.name] if graph is not None else []
        return graph

    def refused(*args: Any) -> None:
        found.refused[args[1].known.name] = args[3]
        refuse(*args)

    with (
        mock.patch.object(DynamicOpGraphs, "_make_graph", made),
        mock.patch.object(DynamicOpGraphs, "_refuse", refused),
    ):
        yield found


@pytest.fixture(autouse=True)
def _junk() -> Iterator[None]:
    with junk_in_padding():
        yield


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of calls before, and three programs make a graph."""
    monkeypatch.setattr(dynamic_op_graphs, "MANY", 3)
    eager = device_in_use().eager
    monkeypatch.setattr(eager, "_varying", DynamicOpGraphs(eager._builder.shared))
    monkeypatch.setattr(eager, "_programs", ProgramCache(4096, eager._recorder))


def on(device: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def compared(function: Callable[..., Any], makes: Callable[[int], tuple[Any, ...]], size: int) -> None:
    torch.manual_seed(size)
    args = makes(size)
    copies = [on(DEVICE, arg.clone() if isinstance(arg, Tensor) else arg) for arg in args]
    expected, actual = function(*args), function(*copies)
    mine, eager = (list(each) if isinstance(each, (tuple, list)) else [each] for each in (actual, expected))
    changed = [(copy, arg) for copy, arg in zip(copies, args, strict=True) if isinstance(arg, Tensor)]
    for one, other in [*zip(mine, eager, strict=True), *changed]:
        assert_close(one.cpu(), other.cpu())
        assert telling_strides(one) == telling_strides(other), (one.stride(), other.stride())


def floats(*shape: Any) -> Callable[[int], tuple[Any, ...]]:
    """One tensor, of which dims are None where the size stands."""
    return lambda n: (torch.randn([n if size is None else size for size in shape]),)


def pair(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, n, 6), torch.randn(2, n, 6)


def whole(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-9, 9, (n, 3)), torch.randint(1, 9, (n, 3))


def masked(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(2, n), torch.rand(2, n) > 0.5


def heads(n: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, 4, 1, 8), torch.randn(1, n, 32), torch.randn(1, n, 32)


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (each.view(1, -1, 4, 8).transpose(1, 2) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value)


def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    key, value = (each.view(1, -1, 4, 8).transpose(1, 2) for each in (key, value))
    scores = query @ key.transpose(2, 3) * 0.3
    mask = torch.arange(key.shape[2], device=key.device) < 3
    return torch.softmax(scores.masked_fill(mask, -1e9), -1) @ value


def in_place(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y).mul_(2)
    x.clamp_(min=-0.5)
    return x.sum(1)


def through_view(x: Tensor, y: Tensor) -> Tensor:
    x.transpose(1, 2).add_(y.transpose(1, 2))
    return x + 1


def into_part(x: Tensor, y: Tensor) -> Tensor:
    x[:, 1:3] = y[:, :2]
    return x * 2


def given_out(x: Tensor, y: Tensor) -> Tensor:
    return torch.add(x, y, out=torch.empty_like(x))


def made_here(x: Tensor) -> tuple[Tensor, ...]:
    n = x.shape[1]
    places = torch.arange(n, device=x.device)
    grid = places[:, None] >= places[None, :]
    return grid, torch.zeros(2, n, device=x.device) + x, torch.full((n,), 3, device=x.device) + places


CASES: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]]]] = {
    "sum": (lambda x: x.sum(1), floats(2, None, 6)),
    "mean of all": (lambda x: x.mean(), floats(2, None)),
    "maximum": (lambda x: x.max(1), floats(2, None)),
    "argmin": (lambda x: x.argmin(0), floats(None, 3)),
    "variance": (lambda x: x.var(1), floats(2, None)),
    "product": (lambda x: x.prod(0), floats(None)),
    "cumulated": (lambda x: x.cumsum(1), floats(2, None)),
    "logsumexp": (lambda x: x.logsumexp(1), floats(3, None)),
    "softmax": (lambda x: x.softmax(1), floats(2, None, 6)),
    "sorted": (lambda x: x.sort(1), floats(2, None)),
    "largest": (lambda x: x.topk(3), floats(2, None)),
    "any": (lambda x: (x > 1).any(1), floats(2, None)),
    "of whole numbers": (lambda x, y: (x // y, x % y, x.sum(), x.amax(0)), whole),
    "sum of two": (lambda x, y: x + y * 3, pair),
    "transposed": (lambda x, y: x.transpose(1, 2) @ y, pair),
    "flattened": (lambda x: F.linear(x, on(x.device.type, WEIGHT.T), on(x.device.type, BIAS)), floats(2, None, 6)),
    "joined": (lambda x, y: torch.cat([x, y[:, :1], x], 1), pair),
    "stacked": (lambda x, y: torch.stack([x, y]), pair),
    "first and last": (lambda x: x[:, 0] + x[:, -1], floats(2, None, 6)),
    "shifted": (lambda x: x[:, 1:] - x[:, :-1], floats(2, None, 6)),
    "third of three": (lambda x: [part * 2 for part in x.split(x.shape[1] // 3, 1)][:3], floats(2, None)),
    "every second": (lambda x: x[:, ::2] * 2, floats(2, None)),
    "halves": (lambda x: x.chunk(2, -1)[1] * x.chunk(2, -1)[0], floats(2, None, 6)),
    "repeated": (lambda x: x[:, :, None].expand(2, -1, 3, 6).reshape(2, -1, 18) + 1, floats(2, None, 6)),
    "flipped": (lambda x: x.flip(1), floats(2, None)),
    "rolled": (lambda x: x.roll(1, 1), floats(2, None)),
    "padded": (lambda x: F.pad(x, (1, 2)), floats(2, None)),
    "normed": (lambda x: F.layer_norm(x, (6,)), floats(2, None, 6)),
    "normed along": (lambda x: F.layer_norm(x, x.shape[1:]), floats(2, None)),
    "convolved": (lambda x: F.conv1d(x, on(x.device.type, WEIGHT.view(4, 2, 3))), floats(1, 2, None)),
    "pooled": (lambda x: F.max_pool1d(x, 2), floats(1, 2, None)),
    "masked": (lambda x, mask: x.masked_fill(mask, 7.0).sum(1), masked),
    "chosen": (lambda x, mask: torch.where(mask, x, x * 2), masked),
    "looked up": (lambda n: F.embedding(n % 6, on(n.device.type, WEIGHT)), lambda n: (torch.arange(n),)),
    "gathered": (lambda x: x.gather(1, x.argsort(1)), floats(2, None)),
    "indexed": (lambda x: x[:, torch.tensor([0, 2], device=x.device)], floats(2, None)),
    "triangle": (lambda x: x.tril(), floats(None, None)),
    "diagonal": (lambda x: x.diagonal().sum() + x.trace(), floats(None, None)),
    "square": (lambda x: x @ x.T, floats(None, 6)),
    "outer": (lambda x: x[:, None] * x[None, :], floats(None)),
    "attention": (attention, heads),
    "attention by hand": (by_hand, heads),
    "made here": (made_here, floats(2, None)),
    "in place": (in_place, pair),
    "in place through a view": (through_view, pair),
    "into a part": (into_part, pair),
    "given out": (given_out, pair),
    "converted": (lambda x: x.to(torch.bfloat16).float() + x.half().float(), floats(2, None)),
    "complex": (lambda x: torch.view_as_real(torch.fft.fft(x, dim=0)).sum(2), floats(4, None)),
    "compared": (lambda x, y: (x == y) | (x < y), whole),
}


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize("name", CASES)
def test_eager_s_numbers_in_buckets(name: str) -> None:
    function, makes = CASES[name]
    with seen() as made:
        for size in SIZES:
            compared(function, makes, size)
    assert made.graphs, made.refused


@pytest.mark.usefixtures("anew")
def test_what_cannot_be_padded_has_programs_of_its_own() -> None:
    with seen() as made:
        for size in SIZES:
            compared(lambda x: torch.linalg.lu(x), floats(2, None), size)
    assert "no rule for padded values" in made.refused["aten.linalg_lu.default"]


@pytest.mark.usefixtures("anew")
def test_the_report_says_why_an_op_has_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaxla.device.shape_generic_key.EXPECTED", 5)
    monkeypatch.setattr(device_in_use().eager, "_sizes", OpRecompileWarnings())
    before = dynaxla.read_metrics().many_programs
    for size in range(5, 12):
        torch.linalg.lu(torch.ones(2, size, device=DEVICE))
        torch.ones(2, size, device=DEVICE).sinc()
    (line,) = dynaxla.read_metrics().many_programs[len(before) :]
    assert line.startswith("aten.linalg_lu.default has 6 programs")
    assert "cannot be padded (aten.linalg_lu.default cannot run on padded values" in line


@pytest.mark.usefixtures("anew")
@pytest.mark.parametrize(
    "draw",
    [
        lambda n, g: torch.rand(2, n, device=DEVICE, generator=g),
        lambda n, g: torch.empty(2, n, device=DEVICE).normal_(generator=g),
        lambda n, g: F.dropout(torch.ones(2, n, device=DEVICE), 0.4, True),
        lambda n, g: torch.randint(9, (n,), device=DEVICE, generator=g),
    ],
    ids=["uniform", "normal in place", "dropout", "whole numbers"],
)
def test_what_is_drawn_does_not_depend_on_buckets(draw: Callable[..., Tensor]) -> None:
    def drawn(n: int) -> list[Tensor]:
        torch.manual_seed(n)
        generator = torch.Generator(DEVICE).manual_seed(n)
        return [draw(n, generator).cpu(), draw(n, generator).cpu()]

    with seen() as made:
        exact = {size: drawn(size) for size in (5, 6)}
        for size in SIZES:
            first, second = drawn(size)
            assert not torch.equal(first, second)
            with mock.patch.object(DynamicOpGraphs, "find", return_value=None):
                device_in_use().eager._programs = ProgramCache(4096)
                exact[size] = drawn(size)
            assert torch.equal(first, exact[size][0])
            assert torch.equal(second, exact[size][1])
            device_in_use().eager._programs = ProgramCache(4096)
    assert made.graphs, made.refused


@pytest.mark.usefixtures("anew")
def test_two_sizes_that_vary_independently(monkeypatch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    monkeypatch.setattr(dynamic_op_graphs, "MANY_APART", 6)
    shapes = [(5, 9), (6, 12), (7, 5), (9, 7), (8, 6), (11, 23), (12, 21), (10, 18)]
    with seen() as made:
        for one, other in shapes:
            x = torch.randn(one, other)
            assert_close((x.to(DEVICE).log1p().sum(1)).cpu(), x.log1p().sum(1))
    assert "aten.log1p.default" in made.graphs
    x = torch.randn(11, 19)
    with recorder.expect(compiles=0):
        assert_close(x.to(DEVICE).log1p().cpu(), x.log1p())


def grown(cache: Tensor, new: Tensor, query: Tensor, steps: int) -> Tensor:
    """A decoder's attention, without its network."""
    results = []
    for _ in range(steps):
        cache = torch.cat([cache, new], 2)
        scores = torch.softmax(query @ cache.transpose(2, 3) * 0.25, -1)
        results.append(scores @ cache)
    return torch.cat(results)


@pytest.mark.usefixtures("anew")
def test_a_growing_cache_has_a_bounded_number_of_programs(recorder: Recorder) -> None:
    torch.manual_seed(0)
    cache, new, query = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    away = [each.to(DEVICE) for each in (cache, new, query)]
    before = dynaxla.read_metrics().compiles
    assert_close(grown(*away, 36).cpu(), grown(cache, new, query, 36))
    made = dynaxla.read_metrics().compiles - before
    assert made <= 5 * (3 + 4) + 3, made  # of five ops three exact programs and those of four buckets; and the last cat
    longer = torch.randn(1, 2, 41, 8)
    with recorder.expect(compiles=1):  # the results together: six of them, and not 36
        assert_close(grown(longer.to(DEVICE), *away[1:], 6).cpu(), grown(longer, new, query, 6))


@pytest.mark.usefixtures("anew")
def test_deterministic_algorithms_are_programs_of_fixed_sizes() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with seen() as made:
            for size in SIZES:
                compared(lambda x: x.softmax(1), floats(2, None, 6), size)
        assert made.graphs == []
    finally:
        torch.use_deterministic_algorithms(False)
    with seen() as made:
        for size in SIZES:
            compared(lambda x: x.softmax(1), floats(2, None, 6), size)
    assert made.graphs == ["aten._softmax.default"]


@pytest.mark.usefixtures("anew")
def test_windows_begin_anywhere() -> None:
    """Also where one begins as far from the front as it is long, as all windows of the kind did so far."""
    with seen() as made:
        for size in (5, 6, 7, 9):
            x = torch.randn(40, device=DEVICE)
            assert_close((x[size : 2 * size] * 2).cpu(), x.cpu()[size : 2 * size] * 2)
        for start in (0, 3, 31):
            assert_close((x[start : start + 9] * 2).cpu(), x.cpu()[start : start + 9] * 2)
    assert made.graphs == ["aten.mul.Tensor"]


@pytest.mark.usefixtures("anew")
def test_what_a_bucket_gives_lies_in_a_corner() -> None:
    for size in (5, 6, 7, 9):
        result = torch.ones(2, size, device=DEVICE).sinh()
    corner = storage_of(result).corner
    assert corner is not None
    assert corner.sizes == (2, 16)
    assert result.stride() == (9, 1)


@pytest.mark.usefixtures("anew")
def test_layers_of_other_sizes_have_programs_of_their_own_in_the_end(recorder: Recorder) -> None:
    """Weights lie in no corners: to pad them at every call would cost more than what is saved."""
    weights = [torch.randn(size).to(DEVICE) for size in (5, 6, 7, 9, 10)]
    for _ in range(MOST_COPIED):
        for weight in weights:
            weight.cosh()
    before = len(device_in_use().eager._programs)
    with recorder.expect(compiles=3):
        for weight in weights:
            assert_close(weight.cosh().cpu(), weight.cpu().cosh())
    assert len(device_in_use().eager._programs) == before
    with recorder.expect(compiles=0):
        for weight in weights:
            assert storage_of(weight.cosh()).corner is None
        for weight in weights:
            assert_close(weight.cpu().to(DEVICE).cosh().cpu(), weight.cpu().cosh())


@pytest.mark.usefixtures("anew")
def test_a_write_is_seen_by_views_and_not_by_what_was_read_before() -> None:
    for size in (5, 6, 7, 11):
        x, host = torch.ones(2, size, device=DEVICE), torch.ones(2, size)
        for each in (x, host):
            view, copy = each[:, 1:], each.clone()
            each.add_(1)
            view.mul_(3)
            each.sub_(copy)
        assert_close(x.cpu(), host)


@pytest.mark.usefixtures("anew")
def test_gradients_through_ops_whose_sizes_vary() -> None:
    weight = torch.randn(6, 6)
    for size in (5, 6, 7, 8, 9, 13):
        x = torch.randn(3, size, 6)
        grads = []
        for device in ("cpu", DEVICE):
            own = weight.to(device, copy=True).requires_grad_()
            loss = (F.gelu(x.to(device) @ own).softmax(1) * x.to(device)).sum()
            loss.backward()
            assert own.grad is not None
            grads.append(own.grad.cpu())
        assert_close(grads[1], grads[0])


@pytest.mark.usefixtures("anew")
def test_threads_grow_side_by_side() -> None:
    torch.manual_seed(0)
    starts = [torch.randn(1, 2, size, 8) for size in (3, 4, 9)]
    new, query = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    found: dict[int, Tensor] = {}

    def run(place: int) -> None:
        found[place] = grown(starts[place].to(DEVICE), new.to(DEVICE), query.to(DEVICE), 16).cpu()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, start in enumerate(starts):
        assert_close(found[place], grown(start, new, query, 16))


def test_a_pattern_is_one_size_or_sizes_that_move_together() -> None:
    seen = [(2, n, n - 1, 2 * 8) for n in range(5, 5 + dynamic_op_graphs.MANY - 1)]
    found = find_dynamic_dims(seen, (2, 40, 39, 16))
    assert found is not None
    assert found.classes == (-1, 0, 1, -1)
    assert found.takes((2, 90, 12, 16))
    assert not found.takes((2, 90, 1, 16))
    assert not found.takes((3, 90, 12, 16))
    assert find_dynamic_dims(seen[1:], (2, 40, 39, 16)) is None
    apart = [(n, n * n % 37 + 4, 3) for n in range(10, 10 + dynamic_op_graphs.MANY_APART - 1)]
    assert find_dynamic_dims(apart[:-1], (60, 6, 3)) is None
    assert find_dynamic_dims(apart, (60, 6, 3)) is not None


def test_corners_by_programs_are_those_of_the_host() -> None:
    client = device_in_use().client
    for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
        array = (torch.randn(5, 7) * 3).to(dtype)
        buffer = upload_readonly(client, array)
        for sizes in ((8, 16), (5, 7), (3, 2), (8, 4), (2, 9)):
            made = [BufferCopies(client, by_programs=by).put(buffer, sizes) for by in (False, True)]
            both = slice(0, min(5, sizes[0])), slice(0, min(7, sizes[1]))
            for each in made:
                assert tuple(each.shape) == sizes
                assert torch.equal(download(client, each)[both], array[both])
