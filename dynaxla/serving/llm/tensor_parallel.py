"""Where an engine's model and its kv cache are: on one device, or split over the devices of a mesh by the model's own plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynaxla.custom_ops.constrain import constrain
from dynaxla.device.registration import use
from dynaxla.device.sharding import make_mesh, make_zeros, shard
from dynaxla.errors import OptionError
from dynaxla.mesh import Mesh, Sharding, replicate
from dynaxla.types import DEVICE_TYPE

AXIS = "model"


@dataclass(frozen=True, slots=True)
class ModelDevices:
    """The devices of an engine.

    Attributes:
        mesh: its one axis splits weights, and the heads of the kv cache; None: there is one device.
    """

    mesh: Mesh | None = None

    def send(self, tensor: Tensor) -> Tensor:
        """A tensor of the host, on every device."""
        return tensor.to(DEVICE_TYPE) if self.mesh is None else shard(tensor, self.mesh, ())

    def make_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros on every device."""
        if self.mesh is None:
            return torch.zeros(shape, dtype=dtype, device=DEVICE_TYPE)
        return make_zeros(shape, dtype, replicate(self.mesh, len(shape)))

    def make_cache(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros [slots, heads, ...]: on each device those of its heads, or all where the devices do not divide them."""
        if self.mesh is None or not self.splits_heads(shape[1]):
            return self.make_zeros(shape, dtype)
        return make_zeros(shape, dtype, Sharding(self.mesh, ((), (AXIS,), *((),) * (len(shape) - 2))))

    def splits_heads(self, heads: int) -> bool:
        """Whether each device has a part of a kv cache of so many heads."""
        return self.mesh is not None and heads % self.mesh.size == 0

    def count_bytes(self, cache: Sequence[Tensor]) -> int:
        """The bytes of a kv cache on one device."""
        parts = (self.mesh.size if self.mesh is not None and self.splits_heads(each.shape[1]) else 1 for each in cache)
        return sum(each.nbytes // count for each, count in zip(cache, parts, strict=True))

    def gather(self, value: Tensor) -> Tensor:
        """A value within a program, on every device."""
        return value if self.mesh is None else constrain(value, ())


def use_devices(count: int) -> None:
    """Has the process use the best platform that is here with so many devices; of the CPU it makes them.

    Raises:
        OptionError: the process uses another number of devices.
        TargetError: the platform has fewer.
    """
    use() if count == 1 else use(devices=count)


def split_model(model: PreTrainedModel, count: int) -> ModelDevices:
    """Splits a model over so many devices, by the plan that transformers has for it. It may be on the host, or on the device.

    What a vocabulary makes large is on every device if they do not divide it.

    Args:
        count: 1: the model stays where it is.

    Raises:
        OptionError: it has no plan, or the devices do not divide its attention heads.
        ShardingError: the process has fewer devices, or they do not divide a dim that the plan splits.
    """
    if count == 1:
        return ModelDevices()
    name, plan = type(model).__name__, getattr(model, "tp_plan", None)
    if not plan:
        raise OptionError(f"{name} has no plan for tensor parallelism (tp_plan)", "serve it with tensor_parallel=1")
    heads = model.config.get_text_config().num_attention_heads
    if heads % count:
        fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise OptionError(
            f"tensor_parallel={count}: so many devices do not divide the {heads} attention heads of {name}",
            f"write one of {fitting}",
        )
    mesh = make_mesh((count,), (AXIS,))
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    whole = {
        each: "replicate"
        for each, module in model.named_modules()
        if any(module is end for end in ends) and module.weight.shape[0] % count
    }
    shard(model, mesh, whole | {pattern: style for pattern, style in plan.items() if pattern not in whole})
    return ModelDevices(mesh)
