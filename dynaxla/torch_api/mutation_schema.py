"""The parameters that ops write to, according to their schemas, and the functional variants of such ops."""

from __future__ import annotations

from typing import Literal

import torch

from dynaxla.torch_api.overloads import OpOverload


def find_functional_variant(op: OpOverload) -> OpOverload | None:
    """Returns the functional variant of an op that writes; None if there is none.

    `add_.Tensor` -> `add.Tensor`, `add.out` -> `add.Tensor`, `_foreach_add_.List` -> `_foreach_add.List`. Relies on the names
    of ATen's ops, and on the order of their parameters.
    """
    name, namespace = op._schema.name.partition("::")[2], getattr(torch.ops, op.namespace)
    base = _FUNCTIONAL_VARIANTS.get((name, op._overloadname)) or (name.removesuffix("_"), op._overloadname)
    packet = getattr(namespace, base[0], None)
    if packet is None:
        return None
    wanted = [(p.name, str(p.type)) for p in op._schema.arguments if not p.is_out]
    overloads = sorted(packet.overloads(), key=lambda overload: overload != base[1])
    for overload in overloads:
        found = getattr(packet, overload)
        if found._schema.is_mutable or found is op:
            continue
        given = [(p.name, str(p.type)) for p in found._schema.arguments]
        if given == wanted or (base in _FUNCTIONAL_VARIANTS.values() and overload == base[1]):
            return found  # type: ignore[no-any-return]
    return None


_FUNCTIONAL_VARIANTS = {
    ("normal_", "default"): ("normal_functional", "default"),
    ("bernoulli_", "float"): ("bernoulli", "p"),
    ("rrelu_with_noise", "default"): ("rrelu_with_noise_functional", "default"),
    ("_native_batch_norm_legit", "default"): ("_native_batch_norm_legit_functional", "default"),
    ("_batch_norm_with_update", "default"): ("_batch_norm_with_update_functional", "default"),
}


def count_out_parameters(op: OpOverload) -> int:
    """Returns the number of an op's out parameters, which are its last. Relies on `is_out` of parameters."""
    return sum(parameter.is_out for parameter in op._schema.arguments)


def find_returned_parameters(op: OpOverload) -> tuple[str | None, ...]:
    """Returns for each result of an op the parameter that it writes to and returns, or None. Relies on `alias_info`."""
    parameters, found = op._schema.arguments, list[str | None]()
    for result in op._schema.returns:
        aliased = set() if result.alias_info is None else result.alias_info.before_set
        sources = (p.name for p in parameters if p.alias_info is not None and p.alias_info.before_set & aliased)
        found.append(next(sources, None))
    return tuple(found)


def version_counter_of(op: OpOverload) -> Literal["torch", "parts", "nobody"]:
    """Who raises the versions of the tensors that an op writes to: torch, before any kernel; or the ops of which it is made.

    A kernel in the place of what is made of ops is to raise them itself. "nobody": kernels that write the host's memory, as of
    fused optimizers and of norms, leave them.

    Relies on the keys ADInplaceOrView, whose kernels raise them, and CompositeExplicitAutograd.
    """
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.ADInplaceOrView):
        return "torch"
    return "parts" if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeExplicitAutograd) else "nobody"


def may_write_to_lazy(op: OpOverload) -> bool:
    """Whether kernels of an op may get tensors that are conjugated or negated lazily: for any other op torch makes others of
    these, and copies back what was written. Relies on the keys Conjugate and Negative, whose kernels let them through."""
    keys = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)
    return any(map(op.has_kernel_for_dispatch_key, keys))


def find_written_parameters(op: OpOverload) -> tuple[str, ...]:
    """Returns the names of the parameters that an op writes to, in its order. Relies on `alias_info` of a schema's
    parameters."""
    found = op._schema.arguments
    return tuple(p.name for p in found if p.alias_info is not None and p.alias_info.is_write)
