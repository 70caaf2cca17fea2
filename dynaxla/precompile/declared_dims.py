"""Which dims of a model's arguments vary, and through which buckets, as the command line says it.

    --bucket input_ids:1,attention_mask:1=8,16,32     dims that always have one size, and their buckets
    --bucket pixels:0=2..64                           the default policy's buckets of these sizes, both included

An argument is named as the model names it, or by its place among the positional ones; what lies within one follows behind dots
(`batch.tokens`, `0.1`). A dim may be counted from the end (`tokens:-1`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dynaxla.bucket_policy import DEFAULT, Bounded, Explicit
from dynaxla.bucket_policy.declared import declared_buckets
from dynaxla.bucketing.marked_dims import MarkedDims
from dynaxla.errors import OptionError

_HINT = "write ARGUMENT:DIM=SIZES, for instance tokens:1=8,16,32 or tokens:1,mask:1=8..256"


@dataclass(frozen=True, slots=True)
class DeclaredDims:
    """Dims that vary together.

    Attributes:
        dims: of each its argument and its number.
        policy: from their size to the bucket; it has a largest.
    """

    dims: tuple[tuple[str, int], ...]
    policy: Bounded

    @classmethod
    def parse(cls, text: str) -> DeclaredDims:
        """What stands behind --bucket.

        Raises:
            OptionError: it is of another form, or the range of sizes is empty.
        """
        named, equals, sizes = text.partition("=")
        if not equals or not sizes.strip():
            raise OptionError(f"the bucket {text!r} has no sizes", _HINT)
        return cls(tuple(_dim(text, piece) for piece in named.split(",")), _policy(text, sizes))

    @property
    def name(self) -> str:
        """Of the first dim: "tokens:1"."""
        argument, dim = self.dims[0]
        return f"{argument}:{dim}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The buckets."""
        buckets = declared_buckets(self.policy)
        assert buckets is not None
        return buckets


def mark_dims(declared: Sequence[DeclaredDims], arguments: Mapping[str, Any], marks: MarkedDims) -> dict[int, str]:
    """Marks the dims on the example's tensors; gives for each example's size that varies the name of its dim.

    Args:
        arguments: of the example, by name; see `named_arguments`.

    Raises:
        OptionError: there is no such argument or dim, a dim is declared twice, dims of one declaration have two sizes, those of
            two declarations have one, or a size is none of the sizes that are declared.
    """
    names: dict[int, str] = {}
    seen: set[tuple[int, int]] = set()
    for each in declared:
        tensors = [(_tensor(argument, arguments), argument, dim) for argument, dim in each.dims]
        for tensor, argument, dim in tensors:
            marks.add(tensor, dim, each.policy)
            place = (id(tensor), dim % tensor.dim())
            if place in seen:
                raise OptionError(f"dim {dim} of {argument} is declared twice", "name every dim once")
            seen.add(place)
        sizes = {f"{argument}:{dim}": tensor.shape[dim] for tensor, argument, dim in tensors}
        if len(set(sizes.values())) > 1:
            raise OptionError(
                f"dims that vary together have one size, but the example's are {sizes}",
                "declare dims of different sizes by a --bucket each",
            )
        size = next(iter(sizes.values()))
        if size in names:
            raise OptionError(
                f"{names[size]} and {each.name} have the same size in the example, {size}",
                "give the example different sizes, so that they can be told apart, or declare both in one --bucket",
            )
        names[size] = each.name
    return names


def named_arguments(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the function's own names, and the positional ones by their place too ("0").

    Raises:
        OptionError: the function does not take them.
    """
    places = {str(place): value for place, value in enumerate(args)}
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # a built-in function does not say what it takes
        return {**kwargs, **places}
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise OptionError(f"the model cannot be called with the factory's arguments: {error}") from None
    spread = [name for name, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
    return {**{name: value for name, value in bound.arguments.items() if name not in spread}, **kwargs, **places}


def _dim(text: str, piece: str) -> tuple[str, int]:
    argument, _, dim = piece.strip().rpartition(":")
    if not argument or not dim.removeprefix("-").isdecimal():
        raise OptionError(f"{piece.strip()!r} in the bucket {text!r} names no dim of an argument", _HINT)
    return argument, int(dim)


def _policy(text: str, sizes: str) -> Bounded:
    first, dots, last = sizes.partition("..")
    pieces = [first, last] if dots else sizes.split(",")
    if not all(piece.strip().isdecimal() for piece in pieces):
        raise OptionError(f"the sizes {sizes!r} of the bucket {text!r} are no whole numbers", _HINT)
    numbers = tuple(int(piece) for piece in pieces)
    if dots:
        return Bounded(DEFAULT, numbers[0], numbers[1])
    # A bucket of one element is for that size alone, so it has to be said that it comes.
    return Bounded(Explicit(numbers), 1 if numbers[0] == 1 else None, numbers[-1])


def _tensor(argument: str, arguments: Mapping[str, Any]) -> torch.Tensor:
    value: Any = arguments
    for step in argument.split("."):
        value = _within(value, step)
    if not isinstance(value, torch.Tensor):
        names: dict[int, str] = {}
        for name, tensor in _tensors(arguments):
            names.setdefault(id(tensor), f"{name} {tuple(tensor.shape)}")  # its first name is the model's own
        known = ", ".join(names.values()) or "none"
        raise OptionError(f"the model has no tensor {argument!r} among its arguments", f"there are: {known}")
    return value


def _within(value: Any, step: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(step)
    if isinstance(value, Sequence) and not isinstance(value, str) and step.isdecimal() and int(step) < len(value):
        return value[int(step)]
    return None


def _tensors(arguments: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield f"{above}{name}", value
        elif isinstance(value, Mapping):
            yield from _tensors({str(key): each for key, each in value.items()}, f"{above}{name}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from _tensors({str(place): each for place, each in enumerate(value)}, f"{above}{name}.")
