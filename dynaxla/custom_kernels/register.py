"""Registers kernels: JAX functions, Pallas kernels included, as the bodies of PyTorch operators."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import torch

from dynaxla.bucketing.argument_roles import PadRule
from dynaxla.bucketing.pad_rules.attention import attention
from dynaxla.bucketing.pad_rules.elementwise import elementwise
from dynaxla.bucketing.pad_rules.indexing import embedding
from dynaxla.bucketing.pad_rules.matmul import linear, product
from dynaxla.bucketing.pad_rules.normalization import layer_norm
from dynaxla.bucketing.pad_rules.reductions import softmax
from dynaxla.custom_kernels.jax_gradients import check_differentiable, define_backward, register_gradient
from dynaxla.errors import LinkError, OptionError
from dynaxla.ops.record import Body, Record
from dynaxla.runtime_state import process
from dynaxla.torch_api.overloads import OpOverload, aliases_arguments, changes_arguments, is_composite, results

if TYPE_CHECKING:
    import jax

Results: TypeAlias = "jax.Array | tuple[jax.Array, ...] | list[jax.Array]"
Gradients: TypeAlias = "jax.Array | tuple[jax.Array | None, ...] | list[jax.Array | None] | None"

# Pad rules that mask or move operands and then call the operator itself. Each of the others is written
# for one ATen op, and would compute that op instead of the operator.
_PAD_RULES: Mapping[str, PadRule] = MappingProxyType(
    {rule.name: rule for rule in (elementwise, softmax, layer_norm, linear, product, embedding, attention)}
)


def register_lowering(
    target: OpOverload,
    function: Callable[..., Results],
    *,
    pad_rule: str | None = None,
    backward: Callable[..., Gradients] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    replace: bool = False,
) -> None:
    """Makes a JAX function the body of an operator in every graph compiled from now on.

    Calls of `target` (a `torch.library` operator with a fake kernel; functional, so that it changes no argument) become
    part of the executable instead of running in eager between two. The function is traced by JAX once for every distinct
    call (shapes, dtypes, static arguments), with 64-bit types on only if a tensor argument has one; `jax.enable_x64` inside
    the function overrides that. It may call Pallas kernels; `jax.lax.platform_dependent` chooses by the platform.

    Args:
        target: the overload, such as `torch.ops.mylib.myop.default`.
        function: mirrors the operator's schema. Tensors arrive as JAX arrays of the same shapes and dtypes, everything else
            as plain Python values; missing arguments take the function's own defaults. It returns an array,
            or a tuple of arrays for an operator with several results, with the shapes and dtypes of the operator's fake kernel.
        pad_rule: what the operator does to padding: "elementwise" where every element of the result depends on the same
            element of the operands (which may broadcast), or another rule of docs/kernels.md. None: unknown, so a graph
            with dynamic sizes that reach the operator is compiled per exact shape, with a reason that names the operator.
        backward: `backward(cotangent, *args, **kwargs)`, another JAX function: given the result's cotangent (a tuple for
            several results, in which an unused or integer one may be None) and the operator's own arguments, it returns one
            cotangent for every tensor among them, in order, as a tuple (or bare, for one tensor); None stands for zeros.
            It is registered as the operator's autograd formula, and applies in eager as well. Without it the operator keeps
            the formula of `torch.library.register_autograd`, if any.
        dtypes: the tensor dtypes, of arguments and results, that the function supports; by default all of XLA's. A call
            with others runs in eager, with the reason `unsupported_dtype`.
        replace: replaces an existing lowering of `target`, even the package's own.

    Raises:
        OptionError: `target` is no overload, changes its arguments, is decomposed by torch before any backend sees it, or
            has a lowering already; there is no such pad rule; or `backward` is given and the operator has a formula.

    When a graph is compiled, a function that raises, or whose results differ from the fake kernel's, is a LinkError
    (DX310): the call runs in eager with the reason `link_failed`, or is an UnsupportedError under fallback="error".
    """
    _check_target(target)
    pad = _pad_rule(pad_rule)
    covered = None if dtypes is None else frozenset(dtypes)
    new = [Record(target, _with_named_errors(target, function), pad, dtypes=covered)]
    if backward is None:
        process().registered.add(new, replace=replace)
        return
    check_differentiable(target, replace)
    if target in process().registered.current.records and not replace:
        raise OptionError(f"{target} has a lowering already", "replace=True puts another in its place")
    formula = define_backward(target, backward)
    pad_of_gradient = elementwise if pad is elementwise else None
    new.append(
        Record(formula.target, _with_named_errors(formula.target, formula.body), pad_of_gradient, dtypes=covered)
    )
    process().registered.add(new, replace=replace)
    register_gradient(target, formula)


def _check_target(target: object) -> None:
    if not isinstance(target, OpOverload):
        hint = "name the overload: torch.ops.mylib.myop.default"
        raise OptionError(f"register_lowering takes an operator's overload, not {target!r}", hint)
    if changes_arguments(target) or aliases_arguments(target):
        raise OptionError(f"{target} changes or aliases its arguments", "make it functional: it gives new tensors")
    if is_composite(target):
        hint = "register its parts, or define it with torch.library.custom_op"
        raise OptionError(f"{target} is made of other operators, to which torch takes it before any backend", hint)


def _pad_rule(name: str | None) -> PadRule | None:
    if name is None or name in _PAD_RULES:
        return None if name is None else _PAD_RULES[name]
    nearest = difflib.get_close_matches(str(name), _PAD_RULES, 1, 0)[0]
    hint = f"did you mean {nearest!r}? Valid: {', '.join(_PAD_RULES)}"
    raise OptionError(f"there is no pad rule {name!r} for kernels", hint)


def _with_named_errors(target: OpOverload, function: Body) -> Body:
    """Wraps the function so that its errors name the operator."""
    name, count = str(target), len(results(target))

    def body(*args: object, **kwargs: object) -> Results:
        import jax

        try:
            # JAX's default if possible: with 64-bit types on, the TPU compiler rejects Pallas's index maps.
            with jax.enable_x64(any(_is_64_bit(x) for x in jax.tree.leaves((args, kwargs)))):
                produced: Results = function(*args, **kwargs)
        except Exception as error:  # the user's code may raise anything; the error is its cause
            message = f"the JAX function of {name} raised {type(error).__name__}: {error}"
            raise LinkError(message, "the call runs in eager PyTorch", op=name) from error
        given = len(produced) if isinstance(produced, (tuple, list)) else 1
        if count > 1 and given != count:
            raise LinkError(f"the JAX function of {name} gives {given} results, torch gives {count}", op=name)
        return produced

    return body


def _is_64_bit(value: object) -> bool:
    return str(getattr(value, "dtype", "")) in ("int64", "uint64", "float64", "complex128")
