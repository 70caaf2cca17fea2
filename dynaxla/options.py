"""The options of `torch.compile(..., options={...})`: one frozen value, checked before anything is compiled."""

from __future__ import annotations

import difflib
import math
import os
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from dynaxla.bucket_policy import BucketPolicy, JointPolicy
from dynaxla.errors import OptionError

DEBUG_VARIABLE = "DYNAXLA_DEBUG"
STAGES = ("passes", "fx", "torch", "stablehlo", "hlo")
Dims = tuple[int | tuple[int, ...], ...]
"""The dim of each size of a plan, or the dims that share one bucket."""

BucketsByDim = Mapping[int | Dims, BucketPolicy | JointPolicy]
Buckets = BucketPolicy | BucketsByDim | Literal["learned", "fixed"]
DEVICE_MODES = ("eager", "fused")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True, slots=True)
class DebugOptions:
    """The parsed value of DYNAXLA_DEBUG: "dump=DIR,stages=passes+fx+torch+stablehlo+hlo".

    Attributes:
        dump: folder for the dumps of the stages; None writes nothing.
        stages: the stages to dump.
    """

    dump: Path | None = None
    stages: frozenset[str] = frozenset(STAGES)

    @classmethod
    def parse(cls, text: str) -> DebugOptions:
        """Parses the variable's value.

        Raises:
            OptionError: an unknown setting or stage, or stages without a folder.
        """
        settings = {}
        for piece in filter(None, text.split(",")):
            name, _, value = piece.partition("=")
            require_member(name.strip(), ("dump", "stages"), f"{DEBUG_VARIABLE} setting")
            settings[name.strip()] = value.strip()
        stages = frozenset(filter(None, settings.get("stages", "+".join(STAGES)).split("+")))
        if not stages:
            raise OptionError(f"{DEBUG_VARIABLE}={text!r} names no stage", f"write stages={'+'.join(STAGES)}, or fewer")
        for stage in stages:
            require_member(stage, STAGES, f"{DEBUG_VARIABLE} stage")
        if text.strip() and not settings.get("dump"):
            raise OptionError(f"{DEBUG_VARIABLE}={text!r} names no folder", "write dump=DIR, for instance dump=ir")
        return cls(Path(settings["dump"]) if settings.get("dump") else None, stages)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a native compiler for one program.

    Attributes:
        seconds: maximum time.
        memory_bytes: maximum mapped memory, beyond that of the compiler's process at its start.
    """

    seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Options:
    """The backend's options.

    Attributes:
        fallback: "eager" runs ops and graphs that cannot be compiled in eager PyTorch, with a logged reason; "error" raises.
        executor: "pjrt" compiles; "eager" runs the captured ATen graph op by op in eager PyTorch, which
            tells whether a wrong number comes from capture or from compilation.
        target: "cpu", "cuda", "cuda:1", "tpu", JAX's name of a PJRT plugin ("rocm") or the path of its file; None computes on
            the tensors' device. See docs/targets.md.
        matmul_precision: precision of float32 products: "torch" follows torch.get_float32_matmul_precision();
            "default", "high" and "highest" are XLA's.
        fold_parameters: compute values that depend on weights alone once per weight version; also packs many small weights.
        nested_regions: "calls" lowers a `nested_compile_region` once, and XLA compiles every call of it; "loop" turns calls
            for successive layers into a loop over a second, stacked copy of their weights: XLA compiles one layer.
        lowering_timeout_s: maximum time of torch-mlir for one graph, in seconds.
        compile_timeout_s: maximum time of XLA's CPU compiler for one program, in seconds.
        compiler_memory_bytes: maximum memory that torch-mlir or XLA's CPU compiler may map for one program.
        bucketing: "auto" pads dynamic sizes to buckets if that cannot change a result, and compiles other parts per exact
            shape, with a logged reason; "require" raises for those; "off" compiles every exact shape.
        buckets: the buckets of dynamic sizes, unless a marked dim has its own: one policy for every size, or policies by the
            dim of the inputs, `{0: PowersOfTwo(), 1: Multiples(64)}`, and plans of several dims together, `{(0, 1): plan}`;
            if several dims share the bucket of the largest, as the sides of images may, `{(0, (2, 3)): plan}`. "learned"
            starts with the default, or with the buckets of an earlier process, and plans buckets from the observed sizes.
            By default, on the CPU, they are planned once padding has cost the time of the compiles; with "fixed", never.
        compile: "now" compiles in the call that needs a program; "behind" runs such a call at once, in a larger bucket if
            that is cheaper than eager, else in eager, while child processes compile: docs/async_compile.md.
        cache: store executables on disk and load stored ones; docs/cache.md says where, and which files it trusts.
        captures: store captures in AOTAutograd's cache too, if `cache` is on; docs/cache.md says what that costs and saves.
        package: what `aot_compile` saves beside a graph: its "programs", or its "captures" alone, so that the programs are
            looked up in the cache, or compiled, at the first calls: docs/packages.md.
        max_executables: maximum number of loaded executables per compiled part; the least recently used are evicted first.
        rng: "compiled" draws random numbers in the executables, from one seed per call of a graph, drawn from torch's
            generator; "eager" draws the same numbers as eager PyTorch, between executables.
        value_checks: whether calls raise where eager does because of values: an index out of range, a whole number divided by
            zero. None: on the CPU alone, as the call then waits for its results. docs/ops.md lists the ops.
        verify: fraction of the calls of each graph whose results are compared with eager's, from 0 to 1: docs/observe.md.
        verify_action: "warn" logs a difference that `verify` finds; "raise" raises `DivergenceError` in the call.
        call_metrics: count the calls of each part by bucket, and their seconds: docs/observe.md says what that costs.
        debug: settings of dumps, from the environment.
    """

    fallback: Literal["eager", "error"] = "eager"
    executor: Literal["pjrt", "eager"] = "pjrt"
    target: str | None = None
    matmul_precision: Literal["torch", "default", "high", "highest"] = "torch"
    fold_parameters: bool = True
    nested_regions: Literal["calls", "loop"] = "calls"
    lowering_timeout_s: float = 120.0
    compile_timeout_s: float = 600.0
    compiler_memory_bytes: int = 16 << 30
    bucketing: Literal["auto", "require", "off"] = "auto"
    buckets: Buckets | None = None
    compile: Literal["now", "behind"] = "now"
    cache: bool = True
    captures: bool = True
    package: Literal["programs", "captures"] = "programs"
    max_executables: int = 64
    rng: Literal["compiled", "eager"] = "compiled"
    value_checks: bool | None = None
    verify: float = 0.0
    verify_action: Literal["warn", "raise"] = "warn"
    call_metrics: bool = False
    debug: DebugOptions = field(default_factory=DebugOptions)

    def __post_init__(self) -> None:
        _check_buckets(self.buckets)
        if self.bucketing == "off" and self.buckets is not None:
            raise OptionError("bucketing='off' and buckets contradict each other", "leave one of them out")
        if self.compile == "behind" and self.bucketing == "require":
            hint = "leave one of them out: sizes that cannot be padded are found in the background, where no call can raise"
            raise OptionError("compile='behind' and bucketing='require' contradict each other", hint)
        if self.nested_regions == "loop" and not self.fold_parameters:
            hint = "leave one of them out"
            raise OptionError("nested_regions='loop' stacks weights, which fold_parameters=False forbids", hint)
        if self.executor == "eager":
            self._check_eager()
        if not 0 <= self.verify <= 1:  # written so that NaN fails too
            raise OptionError(f"verify={self.verify} is no fraction of calls", "give 0.01 for one call in a hundred")
        if self.max_executables < 1:
            raise OptionError(f"max_executables={self.max_executables} keeps no executable", "give at least 1")
        for name in ("lowering_timeout_s", "compile_timeout_s"):
            if not 0 < getattr(self, name) < math.inf:  # written so that NaN fails too
                raise OptionError(f"{name}={getattr(self, name)} is not a time limit", "give seconds, above 0")
        if self.compiler_memory_bytes < 1:
            raise OptionError(f"compiler_memory_bytes={self.compiler_memory_bytes} is no memory", "give bytes, above 0")

    def _check_eager(self) -> None:
        if self.target is not None:
            raise OptionError(
                f"executor='eager' and target={self.target!r} contradict each other: eager runs where the tensors are",
                "leave one of them out",
            )
        if self.verify:
            raise OptionError("executor='eager' compiles nothing that verify could compare", "leave one of them out")

    @property
    def lowering_limits(self) -> Limits:
        return Limits(self.lowering_timeout_s, self.compiler_memory_bytes)

    @property
    def compile_limits(self) -> Limits:
        return Limits(self.compile_timeout_s, self.compiler_memory_bytes)

    @property
    def precision(self) -> str | None:
        """XLA's precision of float32 products; that of torch.get_float32_matmul_precision() unless the options say else."""
        import torch  # not in the process that compiles, which has options, and no torch

        wanted: str = self.matmul_precision
        if wanted == "torch":
            wanted = {"highest": "highest", "high": "high", "medium": "default"}[torch.get_float32_matmul_precision()]
        return None if wanted == "default" else wanted.upper()

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object] | None, environ: Mapping[str, str] | None = None) -> Options:
        """Makes options from the user's mapping and the environment.

        Raises:
            OptionError: an unknown name (the message has the nearest valid one), a wrong type, a value that is not one of
                the choices, or values that contradict each other.
        """
        hints = typing.get_type_hints(cls)
        names = [f.name for f in fields(cls) if f.name != "debug"]
        for name, value in (mapping or {}).items():
            require_member(name, names, "option")
            if name != "buckets":  # checked by `_check_buckets`
                _check_value(name, value, hints[name])
        debug = DebugOptions.parse((os.environ if environ is None else environ).get(DEBUG_VARIABLE, ""))
        return cls(**typing.cast(dict[str, Any], dict(mapping or {})), debug=debug)


def check_mode(mode: object) -> None:
    """Checks torch.compile's `mode`. The names are Inductor's; some libraries always pass one; none has an effect here.

    Raises:
        OptionError: it is not one of torch's names; the message has the nearest.
    """
    if mode is not None:
        require_member(mode, MODES, "mode")


def check_device_mode(mode: object) -> None:
    """Checks the mode in which ops of the device run.

    Raises:
        OptionError: the mode does not exist; the message has the nearest.
    """
    require_member(mode, DEVICE_MODES, "device mode")


def _check_value(name: str, value: object, hint: Any) -> None:
    if typing.get_origin(hint) is Literal:
        require_member(value, typing.get_args(hint), f"value of option {name!r}:")
        return
    allowed: tuple[Any, ...] = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    exact = type(value) in allowed or (float in allowed and type(value) is int)
    if not exact:
        expected = " or ".join("None" if a is type(None) else a.__name__ for a in allowed)
        raise OptionError(
            f"option {name!r} takes {expected}, not {type(value).__name__}: {value!r}",
            f"give a value of type {expected}",
        )


def _check_buckets(buckets: object) -> None:
    if buckets is None or buckets == "learned" or buckets == "fixed" or isinstance(buckets, BucketPolicy):
        return
    by_dim = "{0: dynaxla.PowersOfTwo(), 1: dynaxla.Multiples(64)}, or {(0, 1): plan}"
    hint = f'write a policy, "learned", "fixed", or for instance {by_dim}'
    if not isinstance(buckets, Mapping):
        raise OptionError(f"option 'buckets' takes a policy or policies by dim, not {buckets!r}", hint)
    for dims, policy in buckets.items():
        single = type(dims) is int and dims >= 0 and isinstance(policy, BucketPolicy)
        if not single and not (_are_dims(dims) and isinstance(policy, JointPolicy)):
            raise OptionError(f"option 'buckets' holds {dims!r}: {policy!r}", hint)


def _are_dims(dims: object) -> bool:
    """Whether these are dims of a plan: at least two, some of which may share a bucket."""
    if not isinstance(dims, tuple) or not all(isinstance(dim, (int, tuple)) for dim in dims):
        return False
    flat = [each for dim in dims for each in (dim if isinstance(dim, tuple) else (dim,))]
    return len(flat) > 1 and all(type(dim) is int and dim >= 0 for dim in flat) and () not in dims


def require_member(given: object, valid: Iterable[str], what: str) -> None:
    """Checks a name that a user gives.

    Raises:
        OptionError: it is none of the valid ones; the message has the nearest.
    """
    choices = list(valid)
    if given in choices:
        return
    near = difflib.get_close_matches(str(given), choices, n=1, cutoff=0.0)
    raise OptionError(f"unknown {what} {given!r}", f"did you mean {near[0]!r}? Valid: {', '.join(choices)}")
