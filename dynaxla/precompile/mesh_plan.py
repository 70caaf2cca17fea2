"""How the tensors of a program for a mesh are sharded: arguments and weights by rules, the rest as programs give them.

    --mesh data=2,model=2
    --shard '*.q_proj.weight=model; *.o_proj.weight=-,model; input_ids=data'

A rule is a pattern of names (of parameters and buffers, and of arguments as `--bucket` names them) and a spec: for each dim an
axis of the mesh, several joined by "+", or "-" for none; dims left out are not split. The first rule that matches counts, and
what none matches is on every device. In the place of a spec, a style of transformers' plans ("colwise") is for the weights of
a module of that name, and `tp_plan` alone stands for all rules of the model's own plan. `fully_shard=AXIS` splits every
parameter over an axis besides, as `dynaxla.fully_shard` does. Rules are separated by ";" or stand on lines of their own, also
in a file; what follows "#" is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynaxla.device.sharding import ShardingPlan, split_largest
from dynaxla.errors import OptionError, ShardingError
from dynaxla.fx.permutations import find_row_major_order
from dynaxla.mesh import Mesh, Sharding, Spec, replicate
from dynaxla.passes.parameter_shardings import InputPlacement
from dynaxla.torch_api.fakes import memory_of

Rules = Mapping[str, Spec | str]

OWN_PLAN = "tp_plan"
"""Stands for the rules of a transformers model's own plan."""

FULLY = "fully_shard"
"""Stands for all parameters, each split along its largest dim and gathered for its use."""

_HINT = "write PATTERN=SPEC, for instance '*.q_proj.weight=model,-' or 'input_ids=data'"


def parse_mesh(text: str) -> Mesh:
    """The mesh that `data=2,model=4` says.

    Raises:
        OptionError: it is of another form.
        ShardingError: an axis has no size or name of its own.
    """
    axes = [each.partition("=") for each in text.split(",")]
    if not all(size.strip().isdecimal() for _, _, size in axes):
        raise OptionError(f"the mesh {text!r} is not of the form AXIS=SIZE[,...]", "for instance data=2,model=4")
    return Mesh(tuple(int(size) for _, _, size in axes), tuple(axis.strip() for axis, _, _ in axes))


def parse_rules(text: str, mesh: Mesh, function: Callable[..., Any]) -> dict[str, Spec | str]:
    """The rules in a text, or in the file that it names.

    Args:
        function: the model, for its own plan.

    Raises:
        OptionError: a rule is of another form, or the model has no plan of its own.
    """
    path = Path(text)
    if "=" not in text and text.strip() != OWN_PLAN and path.is_file():
        text = path.read_text()
    found: dict[str, Spec | str] = {}
    lines = [line.partition("#")[0] for line in text.splitlines()]
    for rule in (piece.strip() for line in lines for piece in line.split(";")):
        if rule == OWN_PLAN:
            found.update(_own_plan(function))
        elif rule:
            pattern, equals, spec = rule.rpartition("=")
            if not equals or not pattern.strip() or not spec.strip():
                raise OptionError(f"{rule!r} is no rule of a sharding, and no file", _HINT)
            found[pattern.strip()] = _parse_spec(spec.strip(), mesh)
            if pattern.strip() == FULLY and spec.strip() not in mesh.axes:
                raise OptionError(f"{rule!r} names no axis of the mesh", f"one of {', '.join(mesh.axes)}")
    if not found:
        raise OptionError(f"{text!r} has no rule of a sharding", _HINT)
    return found


def _own_plan(function: Callable[..., Any]) -> Rules:
    plan = getattr(function, OWN_PLAN, None)
    if not isinstance(plan, Mapping) or not plan:
        raise OptionError(
            f"a {type(function).__name__} has no plan of its own ({OWN_PLAN})", "give rules for its weights"
        )
    return plan


def _parse_spec(text: str, mesh: Mesh) -> Spec | str:
    dims = [dim.strip() for dim in text.split(",")]
    if len(dims) == 1 and dims[0] != "-" and "+" not in text and dims[0] not in mesh.axes:
        return dims[0]  # a style, or an axis that the mesh does not have, which is an error of its own
    split = [None if dim == "-" else tuple(dim.split("+")) for dim in dims]
    return tuple(axes[0] if axes is not None and len(axes) == 1 else axes for axes in split)


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """The mesh of a compilation, and how its tensors are sharded.

    Attributes:
        rules: of the user's.
        fully: the axis over which all parameters are split besides; None: there is none.
        chosen: what rules split, by the names of the tensors.
    """

    mesh: Mesh
    rules: ShardingPlan
    fully: str | None = None
    chosen: dict[str, Sharding] = field(default_factory=dict)
    _placed: dict[int, tuple[torch.Tensor, Sharding]] = field(default_factory=dict)
    _gathered: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, mesh: Mesh, rules: Rules) -> MeshPlan:
        others = {pattern: spec for pattern, spec in rules.items() if pattern != FULLY}
        fully = rules.get(FULLY)
        axis = fully if fully is None or isinstance(fully, str) else str(fully[0])
        return cls(mesh, ShardingPlan(mesh, others, mesh.axes[-1], set()), axis)

    def place_module(self, module: nn.Module) -> None:
        """Shards the parameters and buffers of a module as the rules say.

        Raises:
            ShardingError: a spec does not fit a tensor.
        """
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self.put(tensor, replicate(self.mesh, tensor.dim()))
            self._place(name, tensor)
        names = [name for name, _ in module.named_modules()]
        self.rules.matched.update(self.rules.find_matches(names))

    def place_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Shards the tensors among arguments, by their names, as the rules say.

        Raises:
            ShardingError: a spec does not fit a tensor, or a rule has matched nothing.
        """
        for name, tensor in name_tensors(arguments):
            self._place(name, tensor)
        for pattern in self.rules.plan:
            if pattern not in self.rules.matched:
                raise ShardingError(
                    f"{pattern!r} matches no parameter, no module and no argument",
                    "arguments have the names that --bucket gives them, weights those of model.named_parameters()",
                )

    def find_placement(self, inputs: Sequence[object]) -> InputPlacement:
        """Which inputs of a graph are on the mesh: weights, and arguments that rules split."""
        memories = [memory_of(x) if isinstance(x, torch.Tensor) else None for x in inputs]
        placed = (memory in self._placed and x.requires_grad for x, memory in zip(inputs, memories, strict=True))  # type: ignore[attr-defined]
        gathered = {
            place: self.fully for place, memory in enumerate(memories) if self.fully and memory in self._gathered
        }
        return InputPlacement(tuple(placed), gathered)

    def put(self, tensor: torch.Tensor, sharding: Sharding) -> None:
        """Notes how a tensor is sharded, by its memory."""
        self._placed[memory_of(tensor)] = tensor, sharding

    def find(self, tensor: torch.Tensor, order: Sequence[int] | None, shape: Sequence[int]) -> Sharding:
        """The sharding of a program's argument of this shape, which is a tensor with its dims in an order.

        Raises:
            ShardingError: an axis does not divide a dim of the argument, which may be padded to a bucket.
        """
        known, sharding = self._placed.get(memory_of(tensor), (tensor, replicate(self.mesh, tensor.dim())))
        if (known.shape, known.stride()) != (tensor.shape, tensor.stride()):  # another view of the memory
            order = find_row_major_order(known)
        if order is not None:
            sharding = sharding.permute(order)
        if len(sharding.dims) != len(shape):
            return replicate(self.mesh, len(shape))
        if not sharding.divides(shape):
            raise ShardingError(
                f"an argument of shape {tuple(shape)} is not divided by its sharding {sharding}",
                "declare buckets that are multiples of the axes' sizes",
            )
        return sharding

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        split = {name: each.spec for name, each in self.chosen.items()}
        return {"mesh": dict(zip(self.mesh.axes, self.mesh.shape, strict=True)), "shardings": split}

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        sharding = self.rules.choose(name, tensor)
        if self.fully is not None and isinstance(tensor, nn.Parameter):
            sharding = split_largest(sharding, tensor.shape, self.fully)
            self._gathered.add(memory_of(tensor))
        if not sharding.is_replicated:  # else it may be sharded by another of its names
            self.chosen[name] = sharding
            self.put(tensor, sharding)


def name_tensors(value: Any, above: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors within arguments, with their names: those of mappings, sequences and plain objects, such as a cache."""
    if isinstance(value, torch.Tensor):
        yield above, value
        return
    if isinstance(value, Mapping):
        pieces = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str):
        pieces = [(str(place), each) for place, each in enumerate(value)]
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        pieces = list(vars(value).items())
    else:
        return
    for name, each in pieces:
        yield from name_tensors(each, f"{above}.{name}" if above else name)
