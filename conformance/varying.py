"""Calls the zoo's architectures at sizes that vary: finds dims of inputs that share a size, and resizes inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.zoo.architecture import Built

Labels = tuple[str | None, ...]
Sizes = Mapping[str, int]

_TOKENS: Labels = ("batch", "length")
_IMAGE: Labels = ("batch", None, "height", "width")

BY_KEYWORD: Mapping[str, Labels] = {
    "input_ids": _TOKENS,
    "attention_mask": _TOKENS,
    "decoder_input_ids": ("batch", "target"),
    "pixel_values": _IMAGE,
    "input_values": ("batch", "samples"),
    "input_features": ("batch", None, "frames"),
    "sample": _IMAGE,
    "hidden_states": _IMAGE,
    "timestep": ("batch",),
    "class_labels": ("batch",),
    "encoder_hidden_states": ("batch", "length", None),
    "encoder_attention_mask": _TOKENS,
    "pooled_projections": ("batch", None),
}
"""The size that each dim of an input has: its name, or None where it does not vary."""

_SERIES: Labels = ("batch", "length", None)
BY_ARCHITECTURE: Mapping[str, tuple[Labels, ...] | Mapping[str, Labels]] = {
    "audio-spectrogram-transformer": {"input_values": ("batch", "samples", None)},
    "flux": {
        **BY_KEYWORD,
        "hidden_states": ("batch", "tokens", None),
        "img_ids": ("tokens", None),
        "txt_ids": ("length", None),
    },
    "wan-video": {**BY_KEYWORD, "hidden_states": ("batch", None, "frames", "height", "width")},
    "autoencoder-kl-decoder": (_IMAGE,),
    "autoencoder-kl-encoder": (_IMAGE,),
    "mlp": (("batch", None),),
    "lstm": (_SERIES,),
    "gru": (_SERIES,),
    "lstm-cell": (_SERIES,),
    "gru-cell": (_SERIES,),
    "recommender": (("items",), ("batch",), ("batch", None)),
    "graph-network": (("nodes", None), ("edges",), ("edges",)),
    "fourier-mixer": (_SERIES,),
    "temporal-convolution": (("batch", None, "length"),),
    "volume-network": (("batch", None, "frames", "height", "width"),),
    "image-generator": (_IMAGE,),
    "classic-convolutional": (_IMAGE,),
    "super-resolution": (_IMAGE,),
    "variational-autoencoder": (_IMAGE,),
    "transformer-encoder": (_SERIES,),
    "transformer-seq2seq": (_SERIES, ("batch", "target", None)),
    "multihead-attention": (_SERIES, _TOKENS),
    "ranker": (("batch", None),),
}

_STEPS: Mapping[str, tuple[int, ...]] = {
    "batch": (3, 5, 4),
    "length": (0, 2, 5),
    "target": (2, 0, 5),
    "tokens": (1, 4, 9),
    "items": (0, 1, 4),
    "nodes": (0, 2, 5),
    "edges": (3, 0, 6),
    "samples": (40, 0, 160),
    "frames": (4, 0, 12),
}
"""How much larger each size is in each trial: two trials in one bucket, one in another."""


@dataclass(frozen=True)
class Varying:
    """An architecture's call, and its dims that vary.

    Attributes:
        built: the call at the zoo's sizes.
        labels: for each input, positional or by keyword, the names of its dims.
        sizes: for each trial the size behind each name.
    """

    built: Built
    labels: Mapping[int | str, Labels]
    trials: tuple[Sizes, ...]

    def inputs(self, trial: Sizes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New arguments at the sizes of a trial."""
        _, args, kwargs = copy.deepcopy(self.built)
        resized = {key: _resized(value, self.labels.get(key), trial) for key, value in _named(args, kwargs)}
        return tuple(resized[i] for i in range(len(args))), {name: resized[name] for name in kwargs}


def find_varying(name: str, built: Built) -> Varying:
    """The call with every dim that eager takes at other sizes; no trials where there is none."""
    labels = _labels(name, built)
    base = _base_sizes(labels, built)
    trials: list[dict[str, int]] = [{}, {}, {}]
    for group in _groups(base):
        for sizes in _candidates(base, group):
            wanted = [{**base, **trial, **more} for trial, more in zip(trials, sizes, strict=True)]
            if _eager_takes(Varying(built, labels, tuple(wanted))):
                trials = [{**trial, **more} for trial, more in zip(trials, sizes, strict=True)]
                break
    return Varying(built, labels, tuple(trials) if trials[0] else ())


def _labels(name: str, built: Built) -> Mapping[int | str, Labels]:
    _, args, kwargs = built
    given = BY_ARCHITECTURE.get(name, BY_KEYWORD)
    table: Mapping[Any, Labels] = given if isinstance(given, Mapping) else dict(enumerate(given))
    tensors = {key for key, value in _named(args, kwargs) if isinstance(value, torch.Tensor)}
    return {key: labels for key, labels in table.items() if key in tensors}


def _named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[int | str, Any]]:
    yield from enumerate(args)
    yield from kwargs.items()


def _base_sizes(labels: Mapping[int | str, Labels], built: Built) -> dict[str, int]:
    values = dict(_named(built[1], built[2]))
    return {
        name: size
        for key, dims in labels.items()
        for name, size in zip(dims, values[key].shape, strict=True)
        if name is not None
    }


def _groups(base: Sizes) -> list[tuple[str, ...]]:
    """Names that vary together: an image's sides do."""
    sides = tuple(name for name in ("height", "width") if name in base)
    others = [(name,) for name in base if name not in sides]
    return [*others, sides] if sides else others


def _candidates(base: Sizes, names: tuple[str, ...]) -> Iterator[list[dict[str, int]]]:
    if names == ("height", "width"):
        for part in (4, 2, 1):
            step = max(base["height"] // part, 1)
            grown = [base["height"] + i * step for i in (1, 2, 3)]
            yield [{"height": h, "width": w} for h, w in zip(grown, reversed(grown), strict=True)]
            yield [{"height": size, "width": size} for size in grown]
        return
    (name,) = names
    yield [{name: base[name] + step} for step in _STEPS[name]]


@torch.no_grad()
def _eager_takes(varying: Varying) -> bool:
    for trial in varying.trials:
        args, kwargs = varying.inputs(trial)
        try:
            varying.built[0](*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
            return False
    return True


def _resized(value: Any, labels: Labels | None, trial: Sizes) -> Any:
    """Longer by a repetition of what came last, and still sorted if it was."""
    if labels is None:
        return value
    result = value
    for dim, name in enumerate(labels):
        if name is None or name not in trial:
            continue
        size, last = trial[name], result.shape[dim] - 1
        places = [i if i <= last else last - (i - last - 1) % min(last + 1, 5) for i in range(size)]
        result = result.index_select(dim, torch.tensor(places))
    was_sorted = value.dim() == 1 and bool((value == value.sort()[0]).all())
    return result.sort()[0] if was_sorted else result
