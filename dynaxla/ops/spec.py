"""What is known about one ATen overload: the row type of the op table."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node


class Support(enum.Enum):
    """How an op reaches StableHLO."""

    LOWERED = "lowered"  # torch-mlir lowers it in the dtypes of the row's `lowered`, a JAX function in the others
    DECOMPOSED = "decomposed"  # rewritten to simpler ATen ops during capture
    JAX = "jax"  # a JAX function in lowering/jax_rules, linked into the same module
    FALLBACK = "fallback"  # runs in eager PyTorch, with a reason


class PadRule(enum.Enum):
    """What an op does to the padding of its operands; `dynaxla.bucketing.rules` has the code of each."""

    TRANSPARENT = "every element by itself; padding stays padding"
    VIEW = "dims merge and split along whole runs of elements"
    PERMUTE = "dims change places"
    UNSQUEEZE = "a new dim of one element"
    SQUEEZE = "dims of one element go"
    EXPAND = "copies along a dim of one element"
    SLICE = "from the front a prefix; from the end gathered at the true size"
    SELECT = "one position: from the front as it is, from the end at the true size"
    SPLIT = "every piece a slice"
    UNBIND = "along a dim without padding"
    REPEAT = "a dim in front of the repeated one"
    REDUCTION = "padding is set to the identity"
    MEAN = "the sum over the true count"
    VARIANCE = "squares of distances to the true mean, over the true count"
    CUMULATIVE = "elements in front decide; padding comes behind"
    SOFTMAX = "padding counts as minus infinity"
    SOFTMAX_BACKWARD = "padding along the dim is zero"
    SORT = "padding comes last; the sort must be stable"
    TOPK = "padding is below everything"
    KTH_VALUE = "padding comes last"
    MEDIAN = "padding comes last; the middle of the true count"
    SEARCH = "padding comes last; no position is behind the true end"
    PRODUCT = "padding along the contracted dim is zero on both sides"
    DISTANCES = "padding along the rows is zero on both sides"
    DISTANCES_BACKWARD = "what padded rows say of the others is nothing"
    SQUARE_MATRIX = "goes on with the identity"
    SOLVE = "the matrix goes on with the identity, the other side with zeros"
    CROSS = "vectors of three, each by itself"
    TRILINEAR = "padding along the dims that are summed up is zero in all three"
    LINEAR = "as a product"
    LAYER_NORM = "mean and variance of the real elements"
    BATCH_NORM = "with given statistics, every element by itself"
    BATCH_STATISTICS = "of the real elements"
    GROUP_NORM = "statistics of the real elements"
    LOSS = "element by element, then a sum over the true count"
    LOSS_BACKWARD = "element by element, over the true count"
    NLL_LOSS = "padding is ignored as the label that is to be ignored"
    NLL_LOSS_BACKWARD = "padding is ignored as in the loss"
    ATTENTION = "padded keys are masked, padded values zero"
    ATTENTION_BACKWARD = "as forward; padded queries have no weights"
    CONVOLUTION = "padding along the image is zero, transposed or not"
    KERNEL = "as permute"
    CONVOLUTION_BACKWARD = "padding of images and gradients is zero"
    MAX_POOL = "padding along the image is below everything; places are counted in the true image"
    MAX_POOL_BACKWARD = "places are counted in the true image; padded gradients are zero"
    AVG_POOL = "padding along the image is zero; true elements are counted"
    AVG_POOL_BACKWARD = "padded gradients are zero; true elements are counted"
    RESIZE = "where an output reads is computed from the true sizes"
    ADAPTIVE_POOL = "each part of the image goes from a true place to a true place"
    SAMPLE = "every position by itself, in an image of the true sizes"
    SAMPLE_BACKWARD = "gradients at padded positions are zero"
    UNFOLD = "windows that reach into padding come last"
    COLUMNS = "padding along the image is zero; windows that reach into it come last"
    ADAPTIVE_POOL_BACKWARD = "every element gets of the parts that it is in; padded parts give nothing"
    RESIZE_BACKWARD = "padded gradients are zero; where they go is computed from the true sizes"
    REPEATED_EDGES_BACKWARD = "the edges are the true ones; padded gradients are zero"
    UNFOLD_BACKWARD = "padded windows are zero"
    EMBEDDING = "one row per index"
    EMBEDDING_BACKWARD = "padded indices are behind the last row: nothing is added"
    GATHER = "positions, which count from the front, pick elements"
    INDEX_SELECT = "positions, which count from the front, pick slices"
    INDEX = "negative positions count from the true end"
    CONCATENATE = "pieces behind padding are moved to the true end"
    GLU = "halves of a dim without padding"
    GLU_BACKWARD = "two halves of a dim without padding"
    DIAGONAL = "rows and columns count from the front; a new last dim"
    DIAGONAL_BACKWARD = "places of zeros read the gradient, padded ones in padding"
    DIAGONAL_SCATTER = "places of the diagonal read the source, padded ones in padding"
    DIAG_EMBED = "as diagonal_backward"
    TRACE = "padding of rows and columns is zero"
    STACK = "a new dim without padding"
    ROLL = "positions count modulo the true size"
    SELECT_SCATTER = "one position is written"
    SLICE_SCATTER = "every place reads its own element, or the source's"
    SELECT_BACKWARD = "one position of zeros is written"
    SLICE_BACKWARD = "every place is zero, or reads the gradient's element"
    SCATTER = "padded positions are out of range: nothing is written"
    INDEX_PUT = "padded positions are out of range; negative ones count from the true end"
    PAD = "padding behind the end holds the value"
    REPEATED_EDGES = "the edges are the true ones"
    FLIP = "the last real element comes first"
    TURN = "as flip, and dims change places"
    TRIANGLE = "rows and columns count from the front"
    CREATION = "padding holds the value too"
    ARANGE = "counts on through the padding"
    LINSPACE = "a fixed number of steps between true sizes"
    DRAW = "an element is the one that a tensor of the true sizes has there"
    EYE = "ones where the row is the column"
    SCALAR = "a size as a value is the true size"
    AS_PAIRS = "a last dim of two"
    FROM_PAIRS = "a last dim of two goes"
    AS_STRIDED = "distances in the memory of a row-major tensor of the true sizes"
    FOURIER = "a product with the matrix of the true size along padded dims"
    FOURIER_OF_REAL = "as fourier; half of it is kept"
    FOURIER_TO_REAL = "as fourier, of a half"
    BAG = "padded items are in a bag behind the last"
    GROUPED_PRODUCT = "groups of rows end where real ones do"
    GROUP_PRODUCTS = "padded rows are in no group"
    HISTOGRAM = "padding is behind the range"


Check = Callable[[torch.fx.Node], str | None]


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One row of the op table, for one overload (never for an overload packet).

    Attributes:
        target: the overload this row speaks of.
        support: how it reaches StableHLO.
        check: looks at one call (arguments and `meta["val"]`); returns why this call cannot be lowered, or None.
        dtypes: tensor dtypes (of inputs and outputs) the row covers; None means every dtype XLA has.
        lowered: operand dtypes in which torch-mlir's own lowering was found right in every call of the sweep
            (`tables.torch_mlir`); calls in other dtypes take the row's JAX rule.
        limits: one line for docs/ops.md about what the row does not cover; the hint of the fallback reason.
    """

    target: OpOverload
    support: Support
    check: Check | None = None
    dtypes: frozenset[torch.dtype] | None = None
    limits: str = ""
    lowered: frozenset[torch.dtype] = frozenset()


_LONG = 4  # how a schema writes the dtype int64; no other dtype is the default of a parameter


def default_of(parameter: torch.Argument) -> Any:
    """What a call that leaves a parameter of its overload out passes for it."""
    default = parameter.default_value
    return torch.int64 if default == _LONG and "ScalarType" in str(parameter.real_type) else default


def arguments_of(call: Node) -> dict[str, Any]:
    """The arguments of an op's call by their names in its schema, defaults filled in."""
    assert isinstance(call.target, OpOverload)
    given: dict[str, Any] = {}
    positional = list(call.args)
    for parameter in call.target._schema.arguments:
        if positional and not parameter.kwarg_only:
            given[parameter.name] = positional.pop(0)
        else:
            given[parameter.name] = call.kwargs.get(parameter.name, default_of(parameter))
    return given
