"""Operators and their schemas.

Relies on `OpOverload._schema` and `OpOverload._opname`, which TorchScript's schemas have filled since torch 1.x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["HigherOrderOperator", "OpOverload"]  # types without a public name in torch

REGIONS = "dynaxla_regions"
"""The namespace of operators made from control flow. An overload's name is a digest of its computation, or "default"."""


def parameters(op: OpOverload) -> Sequence[torch.Argument]:
    """Returns an operator's parameters, in order. Relies on `_schema.arguments`."""
    return op._schema.arguments


def takes_sizes(parameter: torch.Argument) -> bool:
    """Whether a parameter's type is `SymInt`, as that of sizes and indices. Relies on `real_type.str()`: `str` drops that."""
    return "SymInt" in parameter.real_type.str()  # type: ignore[attr-defined]


def results(op: OpOverload) -> Sequence[torch.Argument]:
    """Returns an operator's results. Relies on `_schema.returns`."""
    return op._schema.returns


def get_schema(op: OpOverload) -> str:
    """Returns an operator's schema as text: "aten::relu(Tensor self) -> Tensor". Relies on the format of `str(_schema)`."""
    return str(op._schema)


def family(op: OpOverload) -> str:
    """Returns the name shared by an operator's overloads, with its namespace: "aten::sum". Relies on `_schema.name`."""
    return op._schema.name


def namespace(target: object) -> str | None:
    """Returns the namespace of an operator, with or without its overload: "aten"; None for any other object.

    Relies on `OpOverloadPacket._qualified_op_name`, "aten::sum".
    """
    packet = target.overloadpacket if isinstance(target, OpOverload) else target
    return packet._qualified_op_name.partition("::")[0] if isinstance(packet, OpOverloadPacket) else None


def base_name(op: OpOverload) -> str:
    """Returns the name shared by an operator's overloads: "sum" of aten.sum.dim_IntList. Relies on `_opname`."""
    return op._opname


def full_name(op: OpOverload) -> str:
    """Returns an operator's name in torch's dispatcher: "aten::sum.dim_IntList", "aten::relu". Relies on
    `_schema.overload_name`."""
    return f"{op._schema.name}.{op._schema.overload_name}".removesuffix(".")


def is_named_by_digest(op: OpOverload) -> bool:
    """Whether an operator's name is a digest of its computation. Relies on `_overloadname`."""
    return namespace(op) == REGIONS and op._overloadname != "default"


def stable_name(op: OpOverload) -> str:
    """Returns an operator's name as in `str`, "aten.sum.dim_IntList"; the same in every process if it is named by a
    digest."""
    return f"{REGIONS}.{op._overloadname}" if is_named_by_digest(op) else str(op)


def changes_arguments(op: OpOverload) -> bool:
    """Whether an operator writes to one of its arguments. Relies on `_schema.is_mutable`."""
    return op._schema.is_mutable


def aliases_arguments(op: OpOverload) -> bool:
    """Whether a result may share an argument's memory. Relies on `alias_info`, the `(a)` of a schema's results."""
    return any(result.alias_info is not None for result in op._schema.returns)


def gives_view(op: OpOverload) -> bool:
    """Whether an operator's first result is a view of an argument that it does not write to. Relies on `alias_info`."""
    alias = op._schema.returns[0].alias_info if op._schema.returns else None
    return alias is not None and not alias.is_write


UNSAFE_VIEWS = (
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.unsafe_split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default,
)
"""Ops that give views which autograd takes for tensors of their own: of `x[None] @ y`, say. `kron` writes into one."""


def is_composite(op: OpOverload) -> bool:
    """Whether torch decomposes an operator before any backend sees it.

    Relies on `has_kernel_for_dispatch_key` and the key CompositeImplicitAutograd.
    """
    return op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


def is_defined(name: str) -> bool:
    """Whether an operator has a kernel, "quantized_decomposed::choose_qparams.tensor". The check defines nothing."""
    return torch._C._dispatch_has_kernel(name)


def overloads_named(prefix: str) -> Iterator[OpOverload]:
    """Yields the currently defined overloads whose name with namespace starts with `prefix`: "aten::_foreach_".

    Relies on `torch._C._dispatch_get_all_op_names`.
    """
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(prefix):
            namespace, _, rest = name.partition("::")
            packet, _, overload = rest.partition(".")
            yield getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def aten_ops() -> Mapping[str, OpOverload]:
    """Returns all overloads of ATen by name. Relies on `torch._C._dispatch_get_all_op_names`."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        if namespace == "aten":
            packet, _, overload = rest.partition(".")
            ops = getattr(torch.ops.aten, packet, None)
            op = getattr(ops, overload or "default", None)
            if op is not None:
                found[rest] = op
    return found
