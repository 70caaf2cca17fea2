"""Default buckets of several sizes that vary together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from dynaxla.bucket_policy import BucketPolicy, Default, JointPolicy, PowersOfTwo
from dynaxla.bucketing.size_expressions import Size, is_fixed

SMALL_WORK = 256  # elements


@dataclass(frozen=True, slots=True)
class DimUsage:
    """In which dims of a graph's tensors each size occurs, and what it is the size of.

    `cached`, `prompts`, `masks` and `chunks` hold indices of sizes.

    Attributes:
        exponents: per size, the maximum number of dims of one tensor that have it.
        elements: the maximum number of elements of such a tensor's other dims.
        most_varying: the maximum number of symbolic dims of one tensor.
        cached: lengths of key-value caches: sizes that several four-dim inputs have after their first dim, or that new caches
            have in common with a three-dim input (an encoder's output).
        prompts: lengths of prompts: sizes of new caches (several four-dim results, fixed otherwise), and sizes that only
            two-dim inputs have beside caches of fixed sizes, into which the prompt is written.
        masks: lengths of cache masks: sizes that only two-dim inputs have beside caches; a mask is as long as the extended
            cache.
        chunks: numbers of tokens by which caches are extended in one call (drafts to verify, a user's next message). Beside
            caches also sizes that no input has: for how many tokens logits are computed.
    """

    exponents: tuple[int, ...]
    elements: int = 1
    most_varying: int = 2
    cached: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    masks: tuple[int, ...] = ()
    chunks: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        symbols: Sequence[sympy.Symbol],
        shapes: Sequence[Sequence[Size]],
        results: Sequence[Sequence[Size]] = (),
    ) -> DimUsage:
        """Classifies the symbols by the shapes of a graph's inputs and results."""
        begun = [shape for shape in results if len(shape) == 4 and sum(not is_fixed(size) for size in shape[1:]) == 1]
        begins = [place for place, s in enumerate(symbols) if sum(s in shape[1:] for shape in begun) > 1]
        cached, prompts, masks, chunks = _roles(symbols, shapes, results, begins)
        shapes = [*shapes, *begun] if begins else shapes
        varying = [shape for shape in shapes if any(not is_fixed(size) for size in shape)]
        most = [max([1, *(sum(_depends(size, s) for size in shape) for shape in varying)]) for s in symbols]
        fixed = [math.prod(size if is_fixed(size) else size.as_coeff_Mul()[0] for size in shape) for shape in varying]
        together = [sum(any(_depends(size, s) for s in symbols) for size in shape) for shape in varying]
        return cls(tuple(most), max([1, *map(int, fixed)]), max(together, default=0), cached, prompts, masks, chunks)

    def work(self, sizes: Sequence[int]) -> int:
        """Approximate number of elements of the largest tensor at these sizes."""
        work = self.elements
        for size, exponent in zip(sizes, self.exponents, strict=True):
            work *= size**exponent
        return work


@dataclass(frozen=True, slots=True)
class JointPolicies:
    """The policies of a joint default. They are coarser than the default of a single size, because programs multiply.

    Attributes:
        smallest: the smallest bucket of sizes >= 2.
        cache: cache lengths. Beside a cache most of a call's work is on the weights; caches pass through many lengths, and an
            encoder's and a decoder's multiply.
        prompt: prompt lengths.
        smallest_prompt: the smallest bucket of prompts, whose work hardly depends on small lengths.
        chunk: the smallest buckets of tokens after a cache: a step takes about as long for several tokens as for one.
        once: sizes of one dim of tensors with at most two symbolic dims.
        more_often: sizes of several dims, or of tensors with more symbolic dims (a batch of images and its sides), because
            their padding multiplies.
    """

    smallest: int = 4
    cache: BucketPolicy = PowersOfTwo(min=64)  # noqa: RUF009 (a frozen value)
    prompt: BucketPolicy = Default(exact_up_to=1, multiple_of=64)  # noqa: RUF009
    smallest_prompt: int = 64
    chunk: tuple[int, ...] = (4, 16, 64)
    once: BucketPolicy = Default(exact_up_to=1, multiple_of=32)  # noqa: RUF009
    more_often: BucketPolicy = Default(exact_up_to=1, multiple_of=16)  # noqa: RUF009

    def of(self, filling: DimUsage) -> JointPolicy:
        return JointDefault(self, filling)


@dataclass(frozen=True, slots=True)
class JointDefault(JointPolicy):
    """Buckets every size by its own policy, and raises the largest one where the largest tensor is small.

    Below 256 elements the largest size is raised to a power of two that reaches them: small programs cost a call's overhead,
    whatever they compute.

    Measured on requests of batch 1 to 8 and log-normal length (mu = ln 60, sigma = 0.9, cut to 4..512), five draws of 200:
    20 to 25 programs, those of batch 1 included, and 1.54 to 1.63 padded elements per true element; square images of side
    16 to 96 (mu = ln 40): 15 programs and 1.50 to 1.59.
    """

    policies: JointPolicies
    filling: DimUsage

    def bucket(self, *sizes: int) -> tuple[int, ...]:
        buckets = [self._one(place, size) for place, size in enumerate(sizes)]
        varying = [i for i, size in enumerate(sizes) if size > 1]
        if not varying or self.filling.prompts or not 0 < self.filling.work(buckets) < SMALL_WORK:
            return tuple(buckets)
        largest = max(varying, key=lambda i: (buckets[i], i))
        buckets[largest] = 1 << (buckets[largest] - 1).bit_length()
        while self.filling.work(buckets) < SMALL_WORK:
            buckets[largest] *= 2
        return tuple(buckets)

    def _one(self, place: int, size: int) -> int:
        if size <= 1:
            return size
        if place in self.filling.cached:
            return self.policies.cache.bucket(size)
        if place in self.filling.prompts:
            return max(self.policies.smallest_prompt, self.policies.prompt.bucket(size))
        if place in self.filling.chunks:
            return min((few for few in self.policies.chunk if few >= size), default=self.policies.prompt.bucket(size))
        if place in self.filling.masks:  # one longer than the cache: the token that is added
            return self.policies.cache.bucket(size - 1) + 1
        once = self.filling.exponents[place] == 1 and self.filling.most_varying <= 2
        policy = self.policies.once if once else self.policies.more_often
        return max(self.policies.smallest, policy.bucket(size))


@dataclass(frozen=True, slots=True)
class SharedBuckets(JointPolicy):
    """A joint policy in which neighbouring sizes share the bucket of the largest of them.

    Attributes:
        policy: maps one size per group of neighbours to buckets.
        runs: the number of sizes of each group.
    """

    policy: JointPolicy
    runs: tuple[int, ...]

    def bucket(self, *sizes: int) -> tuple[int, ...]:
        rest = iter(sizes)
        largest = [max(itertools.islice(rest, count)) for count in self.runs]
        buckets = self.policy.bucket(*largest)
        spread = [bucket for bucket, count in zip(buckets, self.runs, strict=True) for _ in range(count)]
        return tuple(size if size <= 1 else bucket for size, bucket in zip(sizes, spread, strict=True))


def _roles(
    symbols: Sequence[sympy.Symbol],
    shapes: Sequence[Sequence[Size]],
    results: Sequence[Sequence[Size]],
    begins: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The indices of sizes that are lengths of caches, prompts, masks and chunks, as in `DimUsage`.

    Args:
        begins: indices of sizes of new caches among the results.
    """
    encoded = {place for place in begins if any(len(s) == 3 and symbols[place] == s[1] for s in shapes)}
    caches = [sum(len(shape) == 4 and s in shape[1:] for shape in shapes) for s in symbols]
    cached = tuple(place for place, count in enumerate(caches) if count > 1 or place in encoded)
    flat = [place for place, s in enumerate(symbols) if all(len(x) == 2 and x[1] == s for x in shapes if s in x)]
    written = flat if not cached and not begins and _has_fixed_caches([*shapes, *results]) else []
    prompts = tuple(place for place in (*begins, *written) if place not in encoded)
    beside = [place for place in flat if cached and place not in (*cached, *begins)]
    grown = {size for shape in results if len(shape) == 4 for size in shape[1:] if not is_fixed(size)}
    chunks = tuple(
        place
        for place in beside
        if any(symbols[place] + symbols[other] in grown for other in cached)
        or not any(symbols[place] in shape for shape in shapes)
    )
    return cached, prompts, tuple(place for place in beside if place not in chunks), chunks


def _has_fixed_caches(shapes: Sequence[Sequence[Size]]) -> bool:
    """Whether several tensors share one fixed four-dim shape whose first dim is that of the two-dim inputs of
    symbolic length."""
    batches = {shape[0] for shape in shapes if len(shape) == 2 and not is_fixed(shape[1])}
    fixed = [tuple(shape) for shape in shapes if len(shape) == 4 and all(map(is_fixed, shape)) and shape[0] in batches]
    return len(fixed) > len(set(fixed))


def _depends(size: Size, symbol: sympy.Symbol) -> bool:
    return not is_fixed(size) and symbol in size.free_symbols


JOINT = JointPolicies()
# dynamic=True makes every dim symbolic, whether it varies or not: small ones, such as three coordinates, mostly do not.
JOINT_UNKNOWN = JointPolicies(
    smallest=0,
    cache=Default(multiple_of=32),
    prompt=Default(multiple_of=32),
    smallest_prompt=0,
    chunk=(),
    once=Default(multiple_of=32),
    more_often=Default(),
)
