"""What several sizes that vary together are padded to where the user gives no policy."""

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
class Filling:
    """How sizes fill the tensors of a graph.

    Attributes:
        exponents: for each size, how many dims of one tensor it fills, at most.
        elements: how many elements the other dims of such a tensor hold, at most.
        most_varying: how many dims of one tensor vary, at most.
        cached: places of the sizes of caches: sizes that several inputs of four dims have behind their first dim, or that
            caches which the graph begins have of an input of three dims, which an encoder made.
        prompts: places of the sizes of other caches that the graph begins: sizes that several results of four dims have
            behind their first dim, where their other dims do not vary; and of sizes that only inputs of two dims have,
            beside caches of fixed sizes: several inputs or results of one shape of four dims, in which they are written.
        masks: places of sizes that only inputs of two dims have, beside caches: that of the mask of a cache, which is as
            long as the cache will be.
        chunks: places of sizes by which caches grow: tokens that are read together behind others (drafts that are verified,
            what a user says next). Beside caches also of sizes that no input has: of how many tokens the logits are wanted.
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
    ) -> Filling:
        """How the symbols fill tensors of these shapes, inputs of a graph whose results have those."""
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
        """About how many elements the largest tensor has."""
        work = self.elements
        for size, exponent in zip(sizes, self.exponents, strict=True):
            work *= size**exponent
        return work


@dataclass(frozen=True, slots=True)
class JointPolicies:
    """The policies of which a joint default is made; coarser than that of one size, because programs multiply.

    Attributes:
        smallest: the smallest bucket of sizes from 2 on.
        cache: of the sizes of caches, beside which the work of a call is mostly that of the weights. They grow through many
            sizes, and an encoder's and a decoder's multiply.
        prompt: of prompts.
        smallest_prompt: their smallest bucket, as small sizes hardly change their work.
        chunk: the smallest buckets of tokens behind a cache, which are few or a prompt: a step takes about as long for several
            as for one.
        once: of sizes that fill one dim of a tensor, of which no more than two vary.
        more_often: of sizes that fill more, or tensors in which more dims vary (a batch of images and its sides), as their
            padding multiplies too.
    """

    smallest: int = 4
    cache: BucketPolicy = PowersOfTwo(min=64)  # noqa: RUF009 (a frozen value)
    prompt: BucketPolicy = Default(exact_up_to=1, multiple_of=64)  # noqa: RUF009
    smallest_prompt: int = 64
    chunk: tuple[int, ...] = (4, 16, 64)
    once: BucketPolicy = Default(exact_up_to=1, multiple_of=32)  # noqa: RUF009
    more_often: BucketPolicy = Default(exact_up_to=1, multiple_of=16)  # noqa: RUF009

    def of(self, filling: Filling) -> JointPolicy:
        return JointDefault(self, filling)


@dataclass(frozen=True, slots=True)
class JointDefault(JointPolicy):
    """Every size by its own policy; where the largest tensor stays small, the largest size grows.

    Below 256 elements it grows to a power of two that brings the tensor there: small programs cost a call's overhead
    whatever they compute.

    Measured on requests of batch 1 to 8 and log-normal length (mu = ln 60, sigma = 0.9, cut to 4..512), five draws of 200:
    20 to 25 programs, those of batch 1 included, and 1.54 to 1.63 padded elements per true element; square images of side
    16 to 96 (mu = ln 40): 15 programs and 1.50 to 1.59.
    """

    policies: JointPolicies
    filling: Filling

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
class Alike(JointPolicy):
    """Runs of neighbouring sizes take the bucket of their largest.

    Attributes:
        policy: from one size for each run to the buckets.
        runs: how many sizes each run has.
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
    """Which sizes are those of caches, of prompts, of masks and of chunks, as `Filling` says; `begins`: of caches among the
    results."""
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
    """Whether several tensors have one fixed shape of four dims, and the first dim of those of two dims that vary."""
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
