"""Calls for which eager PyTorch raises by their dtypes and numbers alone raise in its words: compiled, and on the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dynaxla
from dynaxla.diagnostics import ReasonId
from dynaxla.observe.recorder import Recorder
from dynaxla.ops.eager_errors import overflows

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def _first_of(write: Callable[..., object], written: list[Tensor], *others: object) -> Tensor:
    """The first tensor of a list that an op writes to."""
    write(written, *others)
    return written[0]


HALF, WHOLE, MASK = torch.zeros(3, dtype=torch.float16), torch.tensor([2, 0, 3]), torch.tensor([True, False, True])
FIRST = torch.tensor([0])
RAISING: dict[str, Function] = {
    "masked_fill": lambda h, i, m: h.masked_fill(m, -1e9),
    "masked_fill NaN": lambda h, i, m: i.masked_fill(m, math.nan),
    "fill_": lambda h, i, m: h.clone().fill_(1e6),
    "fill_ bytes": lambda h, i, m: i.to(torch.uint8).fill_(300),
    "fill_ float32": lambda h, i, m: h.float().fill_(1e39),
    "full": lambda h, i, m: torch.full((2,), 1e6, dtype=torch.float16, device=h.device),
    "full_like": lambda h, i, m: torch.full_like(i, math.inf),
    "new_full": lambda h, i, m: h.new_full((2,), 1e6),
    "clamp": lambda h, i, m: i.to(torch.uint8).clamp(min=-300),
    "clamp_min": lambda h, i, m: h.clamp_min(1e6),
    "clamp complex": lambda h, i, m: (i + 1j).clamp(min=1),
    "hardtanh": lambda h, i, m: F.hardtanh(h, -1e6, 1e6),
    "threshold": lambda h, i, m: F.threshold(h, 0.0, 1e6),
    "pad": lambda h, i, m: F.pad(h, (1, 1), value=1e6),
    "index_fill": lambda h, i, m: i.to(torch.uint8).index_fill(0, FIRST.to(i.device), 300),
    "scatter": lambda h, i, m: h.scatter(0, FIRST.to(i.device), 1e6),
    "index_add": lambda h, i, m: h.view(3, 1).expand(3, 2).index_add(0, i[1:2], h[:1].view(1, 1)),
    "index_add dtype": lambda h, i, m: h.index_add(0, FIRST.to(i.device), h.float()[:1]),
    "index_copy dtype": lambda h, i, m: h.index_copy(0, FIRST.to(i.device), h.float()[:1]),
    "index_put dtype": lambda h, i, m: h.index_put((FIRST.to(i.device),), h.float()[:1]),
    "labels": lambda h, i, m: F.cross_entropy(h.float().view(1, 3), FIRST.to(i.device).int()),
    "mm of whole numbers": lambda h, i, m: i.view(1, 3) @ h.float().view(3, 1),
    "rsub bool": lambda h, i, m: 1 - m,
    "sub bool": lambda h, i, m: m - 1,
    "bool from float": lambda h, i, m: h - m,
    "pow": lambda h, i, m: i.to(torch.uint8) ** 300,
    "negative pow": lambda h, i, m: i**-1,
    "order of complex": lambda h, i, m: i < 1j,
    "floor_divide": lambda h, i, m: i // 0,
    "remainder": lambda h, i, m: i % 0,
    "fmod": lambda h, i, m: i.fmod(0),
    "lerp": lambda h, i, m: torch.lerp(i, i, 0.5),
    "lerp, complex": lambda h, i, m: torch.lerp(h, h, 3 + 4j),
    "foreach lerp, complex": lambda h, i, m: torch._foreach_lerp([h], [h], 3 + 4j)[0],
    "foreach addcmul, one complex": lambda h, i, m: torch._foreach_addcmul([h, h], [h, h], [h, h], [2.0, 1j])[1],
    "foreach addcdiv, one complex": lambda h, i, m: torch._foreach_addcdiv([h, h], [h, h], [h, h], [1.0, 1j])[1],
    "mm": lambda h, i, m: h.view(1, 3) @ h.float().view(3, 1),
    "bmm": lambda h, i, m: h.view(1, 1, 3) @ h.float().view(1, 3, 1),
    "linear": lambda h, i, m: F.linear(h.view(1, 3), h.float().view(1, 3)),
    "addmm": lambda h, i, m: torch.addmm(h.float()[:1], h.view(1, 3), h.view(3, 1)),
    "layer_norm": lambda h, i, m: F.layer_norm(h.double(), [3], h),
    "layer_norm, half weights": lambda h, i, m: F.layer_norm(h.float(), [3], h),
    "group_norm": lambda h, i, m: F.group_norm(h.float().view(1, 3, 1).repeat(1, 1, 2), 3, None, h),
    "batch_norm": lambda h, i, m: F.batch_norm(h.float().view(1, 3, 1), h.double(), h.double()),
    "batch_norm in training": lambda h, i, m: F.batch_norm(h.float().view(3, 1), None, None, h[:1], None, True),
    "softmax's gradient": lambda h, i, m: torch.ops.aten._softmax_backward_data(h.float(), h, 0, torch.float32),
    "conv": lambda h, i, m: F.conv1d(h.view(1, 1, 3), h.float().view(1, 1, 3)),
    "conv_transpose, output padding": lambda h, i, m: F.conv_transpose1d(
        h.float().view(1, 1, 3), h.float().view(1, 1, 3), output_padding=3
    ),
    "sort": lambda h, i, m: h.sort(1)[0],
    "stable sort": lambda h, i, m: h.sort(dim=-2, stable=True)[0],
    "argsort": lambda h, i, m: h.argsort(1),
    "stable argsort": lambda h, i, m: h.argsort(dim=1, stable=True),
    "softmax": lambda h, i, m: h.softmax(1),
    "select_scatter": lambda h, i, m: h.select_scatter(h[0], 0, 3),
    "heaviside": lambda h, i, m: torch.heaviside(h, h.float()),
    "round": lambda h, i, m: i.round(decimals=2),
    "celu": lambda h, i, m: F.celu(h.float(), 0.0),
    "smooth_l1_loss": lambda h, i, m: F.smooth_l1_loss(h, h, beta=-1.0),
    "mvlgamma": lambda h, i, m: torch.mvlgamma(h.float() + 1, 0),
    "leaky_relu in place": lambda h, i, m: torch.ops.aten.leaky_relu_backward(h, h, -0.5, True),
    "elu in place": lambda h, i, m: torch.ops.aten.elu_backward(h, -0.5, 1, 1, True, h),
    "celu in place": lambda h, i, m: torch.ops.aten.elu_backward(h, -0.5, 1, -2, True, h),
    "rrelu in place": lambda h, i, m: torch.ops.aten.rrelu_with_noise_backward(h, h, h, -0.5, 0.2, False, True),
}
RAISING |= {
    **{f"{n} alpha": lambda h, i, m, n=n: getattr(torch, n)(i, i, alpha=1.1) for n in ("add", "sub", "rsub")},
    **{f"{n} number alpha": lambda h, i, m, n=n: getattr(torch, n)(i, 2, alpha=1.1) for n in ("add", "sub", "rsub")},
    **{f"{n} bool alpha": lambda h, i, m, n=n: getattr(torch, n)(i, i, alpha=True) for n in ("add", "sub", "rsub")},
    "add large alpha": lambda h, i, m: i.to(torch.int8).add(i.to(torch.int8), alpha=300),
    "foreach add alpha": lambda h, i, m: torch._foreach_add([i], [i], alpha=1.1)[0],
    "addr alpha": lambda h, i, m: torch.addr(i.view(1, 3), i[:1], i, alpha=1.1),
    "mul_ of whole by real numbers": lambda h, i, m: i.clone().mul_(h.float()),
    "mul_ of whole numbers by one": lambda h, i, m: i.clone().mul_(0.5),
    "mul_ of bools": lambda h, i, m: m.clone().mul_(i),
    "add_ of complex to real": lambda h, i, m: h.clone().add_(i + 1j),
    "sub_ of a complex number": lambda h, i, m: h.clone().sub_(1j),
    "addcmul_ of real to whole": lambda h, i, m: i.clone().addcmul_(h, h),
    "addcdiv_ of real to whole": lambda h, i, m: i.clone().addcdiv_(h.float(), h.float()),
    "ldexp_ of whole numbers": lambda h, i, m: i.clone().ldexp_(i),
    "logit_ of whole numbers": lambda h, i, m: i.clone().logit_(),
    "abs_ of complex numbers": lambda h, i, m: (i + 1j).abs_(),
    "ldexp by a bool": lambda h, i, m: torch.ldexp(h, m),
    "foreach abs_ of complex numbers": lambda h, i, m: _first_of(torch._foreach_abs_, [i + 1j]),
    "foreach add_ of complex to real": lambda h, i, m: _first_of(torch._foreach_add_, [h.clone()], [i + 1j]),
    "foreach mul_ of whole by real": lambda h, i, m: _first_of(torch._foreach_mul_, [i.clone()], [h]),
    "foreach add_ of a complex number": lambda h, i, m: _first_of(torch._foreach_add_, [h.clone()], [1j]),
    "foreach addcmul_ of real to whole": lambda h, i, m: _first_of(torch._foreach_addcmul_, [i.clone()], [h], [h]),
    "nll_loss": lambda h, i, m: F.nll_loss(h.float().view(3, 1), i * 0, h.double()[:1]),
    "multi_margin_loss": lambda h, i, m: F.multi_margin_loss(h.view(1, 3), i[:1]),
    "multi_margin_loss of whole numbers": lambda h, i, m: F.multi_margin_loss(i.view(1, 3), i[:1]),
    "multi_margin_loss, labels": lambda h, i, m: F.multi_margin_loss(h.float().view(1, 3), i[:1].int()),
    "multi_margin_loss, weights": lambda h, i, m: F.multi_margin_loss(h.float().view(1, 3), i[:1], weight=h.double()),
    "multilabel_margin_loss": lambda h, i, m: F.multilabel_margin_loss(h.bfloat16().view(1, 3), i.view(1, 3)),
    "multilabel_margin_loss, labels": lambda h, i, m: F.multilabel_margin_loss(h.float(), i.int()),
    "embedding_renorm_": lambda h, i, m: torch.embedding_renorm_(i.clone().view(3, 1), i % 2, 1.0, 2.0),
    "embedding_renorm_ of an embedding": lambda h, i, m: F.embedding(i % 2, i.clone().view(3, 1), max_norm=1.0),
    "clamp of bools": lambda h, i, m: m.clamp(False, True),
    "clamp of bools, least": lambda h, i, m: m.clamp(min=True),
    "clamp of bools by bools": lambda h, i, m: m.clamp(m, m),
    "clamp_max of bools": lambda h, i, m: m.clamp_max(False),
    "rounded quotients": lambda h, i, m: torch.div(i + 1j, i + 2j, rounding_mode="trunc"),
    "rounded quotients by a number": lambda h, i, m: torch.div(h.float(), 1j, rounding_mode="trunc"),
    "cross": lambda h, i, m: torch.linalg.cross(h, h.float()),
    "cdist": lambda h, i, m: torch.cdist(h.float().view(3, 1), h.double().view(3, 1)),
    "linspace": lambda h, i, m: torch.linspace(i[0] + 1j, i[1], 4, dtype=torch.float32, device=h.device),
    "logspace": lambda h, i, m: torch.logspace(i[0], i[1] + 1j, 4, dtype=torch.float32, device=h.device),
    "binary_cross_entropy": lambda h, i, m: F.binary_cross_entropy(h.float(), h.double()),
    "max_unpool of whole numbers": lambda h, i, m: F.max_unpool2d(i.view(1, 1, 3), i.view(1, 1, 3), (1, 1)),
    "max_unpool of complex numbers": lambda h, i, m: F.max_unpool3d((i + 1j).view(1, 1, 1, 3), i.view(1, 1, 1, 3), 1),
    "normal, whole means": lambda h, i, m: torch.normal(i, h.float() + 1),
    "normal, whole deviations": lambda h, i, m: torch.normal(1.0, i),
    "normal, complex deviations": lambda h, i, m: torch.normal(h.float(), i + 1j),
    "reflections of bools": lambda h, i, m: F.pad(m.view(1, 3), (1, 1), mode="reflect"),
    "replicas of bools": lambda h, i, m: F.pad(m.view(1, 1, 1, 3), (1, 1, 1, 1), mode="replicate"),
    "adaptive_max_pool of whole numbers": lambda h, i, m: F.adaptive_max_pool2d(i.view(1, 1, 3), 2),
    "grid_sample of whole numbers": lambda h, i, m: F.grid_sample(
        i.view(1, 3, 1, 1), i.new_zeros(1, 1, 1, 2), align_corners=False
    ),
    "unfold of whole numbers": lambda h, i, m: F.unfold(i.view(1, 1, 3), (1, 2)),
    "fold of whole numbers": lambda h, i, m: F.fold(i.view(1, 1, 3), (1, 3), (1, 1)),
    "group_norm of complex numbers": lambda h, i, m: F.group_norm((h.float() + 1j).view(1, 3, 1), 1),
    "batch_norm of complex numbers": lambda h, i, m: F.instance_norm((h.float() + 1j).view(1, 1, 3)),
    "cumsum_ in another dtype": lambda h, i, m: h.double().cumsum_(0, dtype=torch.float32),
    "cumprod_ in another dtype": lambda h, i, m: i.clone().cumprod_(0, dtype=torch.float32),
    "nll_loss of no elements": lambda h, i, m: F.nll_loss(h.new_zeros(0, 3), i[:0], h.double()),
    "addcmul large value": lambda h, i, m: torch.addcmul(*[i.to(torch.int8)] * 3, value=300),
}
RAISING |= {
    "a crop of more than there is": lambda h, i, m: F.pad(h, (5, -9)),
    "another crop of more than there is": lambda h, i, m: F.pad(h, (0, 0, -9, 9)),
    "means of no pixels": lambda h, i, m: F.adaptive_avg_pool1d(h[None, :, :0], 3),
    "means of no voxels": lambda h, i, m: F.adaptive_avg_pool3d(h.new_zeros(2, 3, 4, 0, 4), 3),
    "max of no elements": lambda h, i, m: h[:0].max(),
    "min of no elements": lambda h, i, m: i[:0].min(),
    "max along no elements": lambda h, i, m: h.new_zeros(3, 0).max(1)[0],
    "min along no elements": lambda h, i, m: h.new_zeros(0, 3).min(0)[0],
    "mode along no elements": lambda h, i, m: h.new_zeros(3, 0).mode(-1)[0],
    "index of no places": lambda h, i, m: h.new_zeros(0, 3)[i],
    "index of no places of a dim": lambda h, i, m: h.new_zeros(3, 0)[:, i],
    "index_select of no places": lambda h, i, m: h.new_zeros(0, 3).index_select(0, i),
    "embedding without rows": lambda h, i, m: F.embedding(i, h.new_zeros(0, 3)),
    "embedding_bag without rows": lambda h, i, m: F.embedding_bag(i.view(1, 3), h.float().new_zeros(0, 3)),
    "index_put of a number": lambda h, i, m: h[0].index_put((i,), h),
    "embedding_renorm_ of a row": lambda h, i, m: torch.embedding_renorm_(h.float(), i, 1.0, 2.0),
    "complex of two dtypes": lambda h, i, m: torch.complex(h.float(), h.double()),
    "sub of a bool": lambda h, i, m: h - True,
    "rsub of a bool": lambda h, i, m: torch.rsub(i, True),
    "foreach sub of a bool": lambda h, i, m: torch._foreach_sub([h, h], [1, True])[1],
    "select_scatter, sizes": lambda h, i, m: h.view(1, 3).select_scatter(h[:1], 0, 0),
    "select_scatter of a number": lambda h, i, m: h[0].select_scatter(h[0], 0, 0),
    "slice_scatter, sizes": lambda h, i, m: h.slice_scatter(h, 0, 0, 2),
    "slice_scatter, dim": lambda h, i, m: h.slice_scatter(h, 1),
    "slice_scatter, steps back": lambda h, i, m: h.slice_scatter(h, 0, 0, 3, -1),
    "diagonal_scatter, sizes": lambda h, i, m: h.expand(3, 3).diagonal_scatter(h[:1]),
    "diagonal_scatter of a row": lambda h, i, m: h.diagonal_scatter(h),
    "diagonal_scatter of one dim": lambda h, i, m: h.expand(3, 3).diagonal_scatter(h, 0, 1, -1),
}
FITS: dict[str, Function] = {
    "max along other dims": lambda h, i, m: h.new_zeros(3, 0).max(0)[0] + i.new_zeros(0, 3).mode(1)[0],
    "index of no places, by none": lambda h, i, m: h.new_zeros(0, 3)[i[:0]] + F.embedding(i[:0], h.new_zeros(0, 3)),
    "complex": lambda h, i, m: torch.complex(h.double(), h.double().view(3, 1)),
    "writes to slices": lambda h, i, m: (
        h.expand(3, 3).slice_scatter(h.view(1, 3), -2, 1, 9, 2).select_scatter(h, -1, -1)
    ),
    "writes to diagonals": lambda h, i, m: h.expand(4, 3).diagonal_scatter(h.double()[1:] + 1, 1),
    "multi_margin_loss": lambda h, i, m: F.multi_margin_loss(h.double().view(1, 3), i[:1], weight=h.double()),
    "binary_cross_entropy, weights": lambda h, i, m: F.binary_cross_entropy(h.float(), h.float(), h.double() + 1),
    "binary_cross_entropy, whole weights": lambda h, i, m: F.binary_cross_entropy(h.float(), h.float(), i),
    "max_unpool": lambda h, i, m: F.max_unpool2d(h.float().view(1, 1, 3) + 1, i.view(1, 1, 3) % 3, (1, 1)),
    "embedding_renorm_": lambda h, i, m: torch.embedding_renorm_(h.float().view(3, 1) + 1j, i % 2, 1.0, 2.0),
    "clamp of a bool": lambda h, i, m: m.clamp(min=m) | m.clamp_max(m),
    "clamp of bools by whole numbers": lambda h, i, m: m.clamp(0, 1),
    "exact quotients": lambda h, i, m: torch.div(i + 1j, i + 2j, rounding_mode=None),
    "linspace": lambda h, i, m: torch.linspace(i[0] + 1j, i[1], 4, device=h.device),
    "cumsum_": lambda h, i, m: i.int().cumsum_(0) + i.clone().cumsum_(0, dtype=torch.int64),
    "layer_norm, float weights": lambda h, i, m: F.layer_norm(h, [3], h.float() + 1, h.float()),
    "softmax's gradient, another dtype": lambda h, i, m: torch.ops.aten._softmax_backward_data(
        h.double(), h.double(), 0, torch.float32
    ),
    "addcmul": lambda h, i, m: torch.addcmul(i, i, i, value=1.5),
    "foreach addcmul": lambda h, i, m: torch._foreach_addcmul([i], [i], [i], value=1.5)[0],
    "foreach addcmul list": lambda h, i, m: torch._foreach_addcmul([i], [i], [i], [1.5])[0],
    "addcdiv": lambda h, i, m: torch.addcdiv(i, i, i.float() + 1, value=1.5),
    "addmm": lambda h, i, m: torch.addmm(i[:1], i.view(1, 3), i.view(3, 1), alpha=1.5, beta=2.5),
    "add alpha": lambda h, i, m: torch.add(i, 2.5, alpha=1.5) + torch.add(h, i, alpha=1.5),
    "threshold_backward": lambda h, i, m: torch.ops.aten.threshold_backward(i, h.float(), 0.5),
    "leaky_relu": lambda h, i, m: torch.ops.aten.leaky_relu_backward(h, h, -0.5, False),
    "leaky_relu in place": lambda h, i, m: torch.ops.aten.leaky_relu_backward(h, h, 0.5, True),
    "rrelu in place, drawn": lambda h, i, m: torch.ops.aten.rrelu_with_noise_backward(h, h, h, -0.5, 0.2, True, True),
    "conv_transpose, output padding": lambda h, i, m: F.conv_transpose1d(
        h.float().view(1, 1, 3), h.float().view(1, 1, 3), stride=2, output_padding=1
    ),
    "a number's softmax": lambda h, i, m: h[0].softmax(-1) + h[0].sort(0)[0],
    "mse_loss_backward": lambda h, i, m: torch.ops.aten.mse_loss_backward(h.double(), h.float(), h.float(), 1),
    "vmap": lambda h, i, m: torch.vmap(torch.mul, in_dims=(0, None))(i, 3.14),
    "vmap comparison": lambda h, i, m: torch.vmap(torch.gt, in_dims=(0, None))(h, 3.14),
    "mul_": lambda h, i, m: h.clone().mul_(i).add_(m).addcmul_(h.double(), i).sub_(1.5),
    "eq_ of complex numbers": lambda h, i, m: (i + 1j).eq_(h + 2 + 1j),
    "foreach mul_": lambda h, i, m: _first_of(torch._foreach_mul_, [h.clone()], [i]),
    "masked_fill": lambda h, i, m: h.masked_fill(m, -math.inf),
    "fill_": lambda h, i, m: i.to(torch.uint8).fill_(-3),
    "bool": lambda h, i, m: m.clone().fill_(300),
    "clamp": lambda h, i, m: h.clamp(max=math.inf),
    "clamp to floats": lambda h, i, m: i.clamp(min=1.5),
    "where": lambda h, i, m: torch.where(m, h, 1e6),
    "add": lambda h, i, m: i.to(torch.uint8) + 300,
    "divide": lambda h, i, m: h // 0,
    "divide a float": lambda h, i, m: 0.5 // (i - i),
    "divide a float by truth values": lambda h, i, m: torch.div(1.5, m, rounding_mode="trunc"),
    "remainder of a float": lambda h, i, m: (1.5 % (i - i)).nan_to_num(7.0),
}


def _both(function: Function, device: str) -> tuple[object, object]:
    dynaxla.use("cpu")
    way = torch.compile(function, backend="dynaxla") if device == "cpu" else function
    found: list[object] = []
    for run, where in ((function, "cpu"), (way, device)):
        try:
            found.append(run(HALF.to(where), WHOLE.to(where), MASK.to(where)).cpu())
        except (RuntimeError, IndexError) as error:
            found.append(f"{type(error).__name__}: {error}".partition("\n")[0])
    return found[0], found[1]


@pytest.mark.parametrize("device", ["cpu", "dynaxla"])
@pytest.mark.parametrize("name", RAISING)
def test_what_eager_refuses_raises(name: str, device: str, recorder: Recorder) -> None:
    known = len(recorder.snapshot().fallbacks)
    expected, found = _both(RAISING[name], device)
    assert not any(ReasonId.INTERNAL_ERROR.value in line for line in recorder.snapshot().fallbacks[known:])
    assert isinstance(expected, str), "eager takes it"
    assert isinstance(found, str), f"eager: {expected}"
    if "Dynamo" not in found and "torch._dynamo" not in found:
        assert expected.partition(":")[2][:40] in found or device == "cpu"


@pytest.mark.parametrize("device", ["cpu", "dynaxla"])
@pytest.mark.parametrize("name", FITS)
def test_what_eager_takes_is_computed(name: str, device: str) -> None:
    expected, found = _both(FITS[name], device)
    assert isinstance(expected, Tensor)
    assert isinstance(found, Tensor), found
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", "dynaxla"])
def test_normal_numbers_have_the_dtype_of_their_means(device: str) -> None:
    dynaxla.use("cpu")
    way = torch.compile(torch.normal, backend="dynaxla") if device == "cpu" else torch.normal
    means = torch.tensor([[-4.0], [4.0]])
    for dtype, other in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
    ):
        mean, std = means.to(device, dtype), torch.full((2000,), 0.5, dtype=other, device=device)
        expected, found = torch.normal(mean.cpu(), std.cpu()), way(mean, std).cpu()
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(found.float().mean(1, keepdim=True), means, rtol=0, atol=0.06)
        torch.testing.assert_close(found.float().std(1), torch.full((2,), 0.5), rtol=0, atol=0.06)


NUMBERS = (0, 1, -1, -3, 127, 128, -128, -129, 255, 256, -255, -256, 65504, 65520, 2**31, -(2**31), 2**40, 2**63 - 1)
OTHERS = (
    0.5,
    255.5,
    256.5,
    1e5,
    1e10,
    3.4e38,
    1e39,
    1e308,
    -1e39,
    math.inf,
    -math.inf,
    math.nan,
    1j,
    2 + 0j,
    1e39 + 1j,
)
DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_a_dtype_does_not_hold(dtype: torch.dtype) -> None:
    wrong = []
    for number in (*NUMBERS, *OTHERS):
        try:
            torch.empty(2, dtype=dtype).fill_(number)  # of one element torch may not look
            raises = False
        except RuntimeError:
            raises = True
        if overflows(number, dtype) != raises:
            wrong.append((number, raises))
    assert not wrong


@pytest.mark.parametrize("device", ["cpu", "dynaxla"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_powers_of_whole_numbers_read_the_whole_exponent(dtype: torch.dtype, device: str) -> None:
    dynaxla.use("cpu")
    bases = torch.tensor([0, 1, 2, 3, 5, 7, 100, 127]).to(dtype)
    bases = bases if dtype is torch.uint8 else torch.cat([bases, -bases])
    exponents = torch.tensor([0, 1, 2, 31, 32, 62, 63, 64, 65, 100, 126, 127]).to(dtype)
    large = (
        exponents
        if dtype.itemsize < 4
        else torch.cat([exponents, torch.tensor([300, 1 << 20, (1 << 31) - 1], dtype=dtype)])
    )

    def powers(bases: Tensor, exponents: Tensor) -> tuple[Tensor, ...]:
        return bases[:, None] ** exponents, 2**exponents, bases**64, bases**100, bases**127

    way = torch.compile(powers, backend="dynaxla") if device == "cpu" else powers
    found = way(bases.to(device), large.to(device))
    for mine, theirs in zip(found, powers(bases, large), strict=True):
        assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("low", [0, 100, 200])
def test_extremes_of_bytes(low: int) -> None:
    x = torch.randint(low, low + 50, (4, 5), dtype=torch.uint8)
    for reduce in (torch.amax, torch.amin, lambda x, dim: x.max(dim)[0], lambda x, dim: x.min(dim)[0]):
        assert torch.equal(torch.compile(reduce, backend="dynaxla")(x, 1), reduce(x, 1))


DIMS_OF_IMAGES = {"nearest": 2, "nearest-exact": 2, "bilinear": 2, "bicubic": 2, "linear": 1, "trilinear": 3}


@pytest.mark.parametrize("mode", DIMS_OF_IMAGES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.complex64], ids=str)
def test_images_of_dtypes_that_eager_has_no_kernel_for(mode: str, dtype: torch.dtype) -> None:
    dynaxla.use("cpu")
    image = torch.ones((1, 3, *[8] * DIMS_OF_IMAGES[mode])).to(dtype)
    for there in (image, image.to("dynaxla")):
        with pytest.raises(NotImplementedError, match="not implemented for"):
            F.interpolate(there, scale_factor=0.5, mode=mode)
    with pytest.raises(NotImplementedError, match="not implemented for"):
        torch.compile(F.interpolate, backend="dynaxla")(image, scale_factor=0.5, mode=mode)
