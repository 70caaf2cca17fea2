"""Cases of images whose sizes vary: edges, windows, parts, and interpolation."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from tests.bucketing.plain_cases import floats, lengths, special
from tests.bucketing.poison import Case, case

aten = torch.ops.aten


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """Rows of 4, the last filled up with zeros."""
    whole = F.pad(x, (0, 0, 0, (4 - x.shape[1] % 4) % 4))
    return whole.reshape(x.shape[0], -1, 4, x.shape[2]).cumsum(2).sum(1)


def _shifted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As many zeros in front as the other has rows."""
    return F.pad(x, (0, 0, y.shape[0], 0)).cumsum(0)


EDGES = [
    case("edge_pad", "reflect", lambda x: F.pad(x, (1, 2), mode="reflect"), floats(2, 3, None), sizes=(5, 7, 9, 31)),
    case(
        "edge_pad",
        "reflect_image",
        lambda x: F.pad(x, (1, 0, 2, 1), mode="reflect"),
        floats(2, 3, None, 4),
        sizes=(5, 7, 9),
    ),
    case("edge_pad", "replicate", lambda x: F.pad(x, (3, 1), mode="replicate"), floats(2, 3, None)),
    case(
        "edge_pad",
        "replicate_image",
        lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate").sum(2),
        floats(2, 3, 4, None),
    ),
    case("edge_pad", "reflect_batch", lambda x: F.pad(x, (1, 1), mode="reflect"), floats(None, 3, 4)),
    case("pad", "pad_to_multiple", _chunks, floats(3, None, 2)),
    case("pad", "pad_by_size", _shifted, floats(None, 3), lengths("s+2", "2")),
    case("pad", "cut_off", lambda x: F.pad(x, (-1, 2), value=3).sum(0), floats(3, None)),
    case("pad", "cut_off_end", lambda x: F.pad(x, (1, -1)).cumsum(1), floats(3, None)),
    case("pad", "pad_merged", lambda x: F.pad(x.reshape(-1), (1, 1), value=2).cumsum(0), lengths("s", "s+1")),
]
NET = torch.nn.ConvTranspose2d(4, 3, 4, stride=2, padding=1)
LINE = torch.nn.ConvTranspose1d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2)


def _attend(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Every pixel of an image to all pixels of another."""
    queries, keys = (
        image.flatten(2).transpose(1, 2).unflatten(2, (2, 4)).transpose(1, 2).contiguous() for image in (x, y)
    )
    return F.scaled_dot_product_attention(queries, keys, keys)


def _attend_masked(x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """Every pixel to those that a mask of the image names."""
    pixels = x.flatten(2).transpose(1, 2).unflatten(2, (2, 4)).transpose(1, 2).contiguous()
    return F.scaled_dot_product_attention(pixels, pixels, pixels, attn_mask=m[:, None, None] > -1)


IMAGES = [
    case(
        "attention",
        "attention_to_some_pixels",
        _attend_masked,
        lengths("2", "8", "4", "s"),
        lengths("2", "4*s"),
        sizes=(9, 12),
    ),
    case("attention", "attention_of_pixels", _attend, *[lengths("2", "8", "s", "s+1")] * 2, sizes=(5, 7, 9)),
    case(
        "attention",
        "attention_to_pixels",
        _attend,
        lengths("2", "8", "3", "s"),
        lengths("2", "8", "s", "s+1"),
        sizes=(9, 12),
    ),
    case("convolution", "transposed", lambda x: NET(x), lengths("2", "4", "s", "s+2"), sizes=(5, 7, 9, 12)),
    case(
        "convolution",
        "transposed_twice",
        lambda x: NET(F.pad(NET(x), (0, 0, 0, 0, 0, 1))),
        floats(2, 4, None, 3),
        sizes=(5, 9),
    ),
    case("convolution", "transposed_line", lambda x: LINE(x).sum(2), floats(2, 4, None)),
    case("convolution", "transposed_batch", lambda x: NET(x).sum(0), floats(None, 4, 3, 2)),
    case(
        "convolution",
        "conv_merged",
        lambda x: F.conv1d(x.flatten(2), torch.ones(2, 3, 3)),
        lengths("2", "3", "s", "s+1"),
        sizes=(5, 7, 9),
    ),
    case(
        "max_pool",
        "max_pool_merged",
        lambda x: F.max_pool2d(x.flatten(2, 3), (2, 1)),
        lengths("2", "3", "s", "s+1", "2"),
        sizes=(5, 7, 9),
    ),
    case(
        "adaptive_pool",
        "adaptive_average",
        lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
        lengths("2", "3", "s", "s+1"),
        sizes=(5, 7, 9, 12),
    ),
    case("adaptive_pool", "adaptive_line", lambda x: F.adaptive_avg_pool1d(x, 3), floats(2, 3, None)),
    case("adaptive_pool", "adaptive_special", lambda x: F.adaptive_avg_pool1d(x, 3), special(2, 3, None)),
    case(
        "adaptive_pool",
        "adaptive_half",
        lambda x: F.adaptive_avg_pool2d(x, 2),
        floats(2, 3, None, 4, dtype=torch.bfloat16),
    ),
    case("adaptive_pool", "adaptive_largest", lambda x: F.adaptive_max_pool2d(x, (2, 3)), floats(2, 3, None, 4)),
    case(
        "adaptive_pool",
        "area",
        lambda x: F.interpolate(x, scale_factor=0.5, mode="area"),
        floats(2, 3, None, 4),
        sizes=(5, 7, 9),
    ),
    case("upsample", "nearest", lambda x: F.interpolate(x, scale_factor=2.0), floats(2, 3, None, 4)),
    case(
        "upsample", "nearest_size", lambda x, y: F.interpolate(x, size=y.shape[-1]), floats(2, 3, None), lengths("s+3")
    ),
    case("upsample", "bilinear", lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"), floats(2, 3, None, 4)),
    case(
        "upsample",
        "bilinear_part",
        lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
        floats(2, 3, None, 4),
    ),
    case(
        "upsample",
        "bilinear_corners",
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True),
        floats(2, 3, None, 4),
    ),
    case("upsample", "bicubic", lambda x: F.interpolate(x, scale_factor=2.0, mode="bicubic"), floats(2, 3, None, 4)),
    case(
        "upsample",
        "bilinear_size",
        lambda x, y: F.interpolate(x, size=y.shape[-2:], mode="bilinear"),
        floats(2, 3, None, 4),
        lengths("s+3", "6"),
    ),
    case(
        "upsample",
        "nearest_channels_last",
        lambda x: F.interpolate(x, scale_factor=2.0),
        lambda s: torch.randn(2, 6, s, 4).to(memory_format=torch.channels_last),
        sizes=(5, 7, 9, 70),
    ),
    case("upsample", "nearest_line", lambda x: F.interpolate(x, scale_factor=1.5), floats(2, 3, None)),
    case(
        "upsample",
        "nearest_exact",
        lambda x: F.interpolate(x, scale_factor=1.7, mode="nearest-exact"),
        floats(2, 3, None, 4),
    ),
    case(
        "upsample",
        "nearest_large",
        lambda x: F.interpolate(x, scale_factor=7.3),
        floats(1, 2, None, 4),
        sizes=(9, 17, 31),
    ),
    case(
        "upsample",
        "trilinear",
        lambda x: F.interpolate(x, scale_factor=2.0, mode="trilinear"),
        floats(1, 2, 3, None, 2),
    ),
    case(
        "upsample",
        "linear_half",
        lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"),
        floats(2, 3, None, dtype=torch.bfloat16),
    ),
    case(
        "upsample",
        "smaller",
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bilinear"),
        floats(2, 3, None, 4),
        sizes=(5, 7, 9),
    ),
    case("im2col", "windows", lambda x: F.unfold(x, (3, 1), padding=(1, 0)), floats(2, 3, None, 1)),
    case(
        "im2col",
        "windows_both",
        lambda x: F.unfold(x, 2, stride=2).sum(2),
        lengths("2", "3", "s", "s+1"),
        sizes=(5, 7, 9, 12),
    ),
]


def _pixels(x: torch.Tensor) -> torch.Tensor:
    return (x * 50 + 120).clamp(0, 255).to(torch.uint8)


def _with_infinity(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 2, torch.inf, x)


FILTERED = [
    *[
        case("antialias", f"antialias_{mode}_{kind}",
             lambda x, mode=mode, to=to: F.interpolate(to(x), size=(4, 9), mode=mode, antialias=True),
             lengths("2", "3", "2*s", "s+1"), sizes=(5, 7, 9, 12, 31))
        for kind, to in {"floats": _with_infinity, "doubles": torch.Tensor.double, "bytes": _pixels}.items()
        for mode in ("bilinear", "bicubic")
    ],
    case("antialias", "antialias_by_scale",
         lambda x: F.interpolate(x, scale_factor=(0.4, 2.5), mode="bilinear", antialias=True).sum(2),
         lengths("1", "3", "2*s", "s+1"), sizes=(5, 9, 12)),
    case("antialias", "antialias_with_corners",
         lambda x: F.interpolate(x, size=(6, 3), mode="bicubic", antialias=True, align_corners=True), floats(1, 2, None, 3)),
    case("antialias", "antialias_to_sizes", lambda x, y: F.interpolate(x, y.shape, mode="bilinear", antialias=True),
         lengths("1", "2", "s+1", "2*s"), lengths("s", "s+2"), sizes=(5, 7, 9, 12)),
    case("antialias", "antialias_lanczos",
         lambda x: aten._upsample_lanczos2d_aa(x, [4, 7], False, None, None), lengths("2", "3", "s", "2*s"),
         sizes=(5, 7, 9, 12)),
    *[
        case("upsample", f"bytes_{mode}", lambda x, mode=mode: F.interpolate(_pixels(x), scale_factor=1.7, mode=mode),
             lengths("2", "3", "s", "2*s"), sizes=(5, 9, 12))
        for mode in ("nearest", "nearest-exact")
    ],
]  # fmt: skip
GRADIENTS = [
    *[
        case("antialias_backward", f"antialias_{mode}_backward",
             lambda g, x, mode=mode: getattr(aten, f"_upsample_{mode}2d_aa_backward")(g, [4, 7], x.shape, False, None, None),
             floats(2, 3, 4, 7), lengths("2", "3", "s", "2*s"), sizes=(5, 7, 9, 12))
        for mode in ("bilinear", "lanczos")
    ],
    case("antialias_backward", "antialias_by_scale_backward",
         lambda g, x: aten._upsample_bilinear2d_aa_backward(
             g.repeat(1, 1, 2, 1), [2 * x.shape[2], 4], x.shape, False, 2.0, 1.0),
         floats(2, 3, None, 4), floats(2, 3, None, 4), sizes=(5, 7, 9)),
    case("antialias_backward", "antialias_batch_backward",
         lambda g: aten._upsample_bilinear2d_aa_backward(g, [4, 7], [g.shape[0], 3, 5, 6], False, None, None).sum(0),
         floats(None, 3, 4, 7), sizes=(5, 9)),
]  # fmt: skip
CASES: list[Case] = [*EDGES, *IMAGES, *FILTERED, *GRADIENTS]
