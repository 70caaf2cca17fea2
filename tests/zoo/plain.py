"""Models written in plain PyTorch: what users bring that no library has packaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.architecture import FLOAT32_ONLY, SEED, Architecture, Built, finish


class Recommender(nn.Module):
    """Bags of item ids and dense features to one score per user."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.EmbeddingBag(50, 16, mode="mean")
        self.dense = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(33, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, items: torch.Tensor, offsets: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        bags = self.items(items, offsets)
        dense = self.dense(features)
        interaction = (bags * dense).sum(dim=1, keepdim=True)
        return torch.sigmoid(self.top(torch.cat([bags, dense, interaction], dim=1)))


class GraphNetwork(nn.Module):
    """Message passing over an edge list: mean of the messages that arrive, largest message, and a residual."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.message = nn.Linear(2 * width, width)
        self.update = nn.Linear(3 * width, width)

    def forward(self, nodes: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        messages = F.silu(self.message(torch.cat([nodes[sources], nodes[targets]], dim=1)))
        total = torch.zeros_like(nodes).index_add(0, targets, messages)
        degree = torch.zeros(nodes.shape[0], dtype=nodes.dtype, device=nodes.device).scatter_add(
            0, targets, torch.ones(targets.shape[0], dtype=nodes.dtype, device=nodes.device)
        )
        index = targets[:, None].expand_as(messages)
        largest = torch.zeros_like(nodes).scatter_reduce(0, index, messages, "amax", include_self=True)
        mean = total / degree.clamp(min=1)[:, None]
        change: torch.Tensor = self.update(torch.cat([nodes, mean, largest], dim=1))
        return nodes + change


class FourierMixer(nn.Module):
    """Tokens mixed by a two-dimensional Fourier transform and a learned filter on half the spectrum."""

    def __init__(self, length: int = 12, width: int = 32) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(length // 2 + 1, width))
        self.norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mixed = torch.fft.fft2(tokens, dim=(-2, -1)).real
        filtered = torch.fft.irfft(torch.fft.rfft(tokens, dim=1) * self.gain, n=tokens.shape[1], dim=1)
        out: torch.Tensor = self.feed(self.norm(tokens + 0.1 * mixed + filtered))
        return out


class TemporalConvolution(nn.Module):
    """Causal dilated convolutions with residuals."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter = nn.Conv1d(5, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=2**depth) for depth in range(3))

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.enter(series)
        for depth, layer in enumerate(self.layers):
            hidden = hidden + F.gelu(layer(F.pad(hidden, (2 * 2**depth, 0))))
        return hidden.mean(dim=-1)


class SelfAttention(nn.Module):
    """nn.MultiheadAttention with a causal mask, a key padding mask, and the weights returned."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).triu(1)
        mixed, weights = self.attention(tokens, tokens, tokens, key_padding_mask=padding, attn_mask=causal)
        return mixed, weights


class Tagger(nn.Module):
    """A recurrent network of PyTorch between two linear layers, with its final state returned."""

    def __init__(self, recurrent: nn.Module, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(9, 12)
        self.recurrent = recurrent
        self.leave = nn.Linear(width, 5)

    def forward(self, series: torch.Tensor) -> tuple[torch.Tensor, Any]:
        hidden, state = self.recurrent(torch.tanh(self.enter(series)))
        return self.leave(hidden), state


class UnrolledRecurrence(nn.Module):
    """A cell of PyTorch stepped over time in Python, so that the graph holds every step."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell
        self.leave = nn.Linear(16, 5)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        state = None
        hidden = []
        for step in series.unbind(1):
            state = self.cell(step, state)
            hidden.append(state[0] if isinstance(state, tuple) else state)
        out: torch.Tensor = self.leave(torch.stack(hidden, dim=1))
        return out


class Ranker(nn.Module):
    """The best candidates of each query, in order: top-k, sort, gather and argmax."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(12, 16)
        self.candidates = nn.Parameter(torch.randn(20, 16))

    def forward(self, queries: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.query(queries) @ self.candidates.T
        best, index = scores.topk(5, dim=1)
        ordered, order = scores.sort(dim=1, descending=True, stable=True)
        return {"best": best, "index": index, "ordered": ordered, "order": order, "winner": scores.argmax(dim=1)}


class VariationalAutoencoder(nn.Module):
    """Strided convolutions in, transposed convolutions out, with the mean as the code."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
        )
        self.code = nn.Linear(16 * 7 * 7, 10)
        self.expand = nn.Linear(10, 16 * 7 * 7)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, stride=2, padding=1),
        )

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code = self.code(self.encoder(images).flatten(1))
        return torch.sigmoid(self.decoder(self.expand(code).unflatten(1, (16, 7, 7)))), code


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 5))


def _volume_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 4),
    )  # fmt: skip


def _image_generator() -> nn.Module:
    return nn.Sequential(
        nn.ConvTranspose2d(12, 24, 4), nn.BatchNorm2d(24), nn.ReLU(),
        nn.ConvTranspose2d(24, 16, 4, stride=2, padding=1), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(16, 3, 3, stride=2, padding=1, output_padding=1), nn.Tanh(),
    )  # fmt: skip


def _classic_convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 5, padding=2), nn.ReLU(), nn.LocalResponseNorm(3), nn.MaxPool2d(3, stride=2),
        nn.Conv2d(16, 24, 3, padding=1, groups=2), nn.ReLU6(), nn.AvgPool2d(2, ceil_mode=True),
        nn.GroupNorm(4, 24), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.5), nn.Linear(96, 10),
    )  # fmt: skip


def _super_resolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect"), nn.PReLU(16),
        nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2), nn.Upsample(scale_factor=2, mode="bilinear"),
    )  # fmt: skip


def _encoder_stack() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 48, activation="gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _sequence_to_sequence() -> nn.Module:
    return nn.Transformer(32, 4, 1, 1, 48, batch_first=True)


def _normal(*shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randn(shape),)


def _bags() -> tuple[Any, ...]:
    return torch.randint(0, 50, (14,)), torch.tensor([0, 3, 7, 12]), torch.randn(4, 6)


def _edges() -> tuple[Any, ...]:
    return torch.randn(9, 16), torch.randint(0, 9, (22,)), torch.randint(0, 9, (22,))


def _padded_tokens() -> tuple[Any, ...]:
    padding = torch.zeros(2, 11, dtype=torch.bool)
    padding[1, 8:] = True
    return torch.randn(2, 11, 32), padding


def _two_sequences() -> tuple[Any, ...]:
    return torch.randn(2, 11, 32), torch.randn(2, 7, 32)


def _plain(
    name: str, make: Callable[[], nn.Module], inputs: Callable[[], tuple[Any, ...]], **fields: Any
) -> Architecture:
    def build(dtype: torch.dtype) -> Built:
        torch.manual_seed(SEED)
        return finish(make(), inputs(), {}, dtype)

    return Architecture(name, build, "plain", **fields)


ARCHITECTURES: tuple[Architecture, ...] = (
    _plain("mlp", _mlp, _normal(6, 20)),
    _plain(
        "lstm",
        lambda: Tagger(nn.LSTM(12, 16, num_layers=2, batch_first=True, bidirectional=True), 32),
        _normal(2, 10, 9),
    ),
    _plain(
        "gru",
        lambda: Tagger(nn.GRU(12, 16, num_layers=2, batch_first=True), 16),
        _normal(2, 10, 9),
    ),
    _plain("lstm-cell", lambda: UnrolledRecurrence(nn.LSTMCell(9, 16)), _normal(2, 10, 9)),
    _plain("gru-cell", lambda: UnrolledRecurrence(nn.GRUCell(9, 16)), _normal(2, 10, 9)),
    _plain("recommender", Recommender, _bags),
    _plain("graph-network", GraphNetwork, _edges),
    _plain(
        "fourier-mixer",
        FourierMixer,
        _normal(2, 12, 32),
        dtypes=FLOAT32_ONLY,
        dtypes_reason="torch.fft takes no bfloat16",
    ),
    _plain("temporal-convolution", TemporalConvolution, _normal(2, 5, 17)),
    _plain("volume-network", _volume_network, _normal(2, 1, 8, 8, 8)),
    _plain("image-generator", _image_generator, _normal(2, 12, 1, 1)),
    _plain(
        "classic-convolutional",
        _classic_convolutional,
        _normal(2, 3, 32, 32),
        dtypes=FLOAT32_ONLY,
        dtypes_reason="nn.LocalResponseNorm takes no bfloat16 on CPU",
    ),
    _plain("super-resolution", _super_resolution, _normal(1, 3, 12, 12)),
    _plain("variational-autoencoder", VariationalAutoencoder, _normal(2, 1, 28, 28)),
    _plain("transformer-encoder", _encoder_stack, _normal(2, 11, 32)),
    _plain("transformer-seq2seq", _sequence_to_sequence, _two_sequences),
    _plain("multihead-attention", SelfAttention, _padded_tokens),
    _plain("ranker", Ranker, _normal(3, 12)),
)
