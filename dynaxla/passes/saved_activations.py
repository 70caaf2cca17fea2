"""What the forward graph keeps for the backward: with its dims apart, so that a padded value is kept as it is.

A padded `[batch, length, width]` holds the real values as a view; `[batch * length, width]` of it does not, and
products want their operands so. The merged form is made again where the backward reads it, at no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from dynaxla.custom_ops import internal
from dynaxla.decompositions.assertions import CHECK_FACTORIZATION, find_assertions
from dynaxla.fx.edit import holds_tensors, insert_zeros, is_view
from dynaxla.fx.graph_utils import find_device, is_determined
from dynaxla.passes.parameter_shardings import InputPlacement
from dynaxla.passes.pooled_maxima import find_maxima_again
from dynaxla.passes.shared_seeds import share_seeds
from dynaxla.targets.target import Target
from dynaxla.torch_api.aot import (
    default_partition,
    is_backward,
    is_forward,
    is_recomputed,
    mark_backward,
    pair_replayed_draws,
)
from dynaxla.torch_api.fakes import mode_of
from dynaxla.torch_api.overloads import OpOverload, parameters
from dynaxla.types import SAVED, SOURCE

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_ATTENTION_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    internal.ATTENTION_BACKWARD,
)
_MASK = 4
"""The place of the mask of `internal.ATTENTION_BACKWARD`; torch's op takes it by name."""
_NORM, _IS_TRAINING, _NEW_STATISTICS = aten._native_batch_norm_legit_functional.default, 5, (3, 4)
_KEEP_NUMBERS = (aten.where.self, aten.expand.default, aten._to_copy.default, aten.clone.default)


def partition_saving_padded(
    joint: GraphModule,
    inputs: Any,
    *,
    num_fwd_outputs: int,
    placement: InputPlacement | None = None,
    remakes_masks: bool = False,
    find_target: Callable[[torch.device], Target] | None = None,
    **given: Any,
) -> tuple[GraphModule, GraphModule]:
    """AOTAutograd's `partition_fn`: a joint graph's forward and backward, as `default_partition` gives them.

    Values that the forward keeps for the backward alone have `meta[SAVED]`.

    Args:
        placement: which inputs are on a mesh.
        remakes_masks: whether the backward makes masks of attention again, as kernels have to know what they are made of.
        find_target: gives the target of tensors on a device; None: what is saved has torch's layouts.
    """
    if placement is not None:
        placement.rewrite_joint(joint.graph, num_fwd_outputs)
    share_seeds(joint.graph)
    _skip_detach(joint.graph)
    _normalize_apart(joint.graph)
    find_maxima_again(joint.graph)
    target = None if find_target is None else find_target(find_device(joint))
    _merge_in_the_backward(joint.graph, fixed=target is not None and target.fuses_short_of_reshapes)
    _remake_in_the_backward(joint.graph)
    if remakes_masks:
        _remake_masks(joint.graph)
    twins, has_checks = _hide_draws_of_nothing(joint.graph), _hide_checks(joint.graph)
    forward, backward = default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **given)
    for module in (forward, backward) if twins or has_checks else ():
        for node in module.graph.nodes:
            node.target = twins.get(node.target, node.target)
        _show_checks(module.graph)
        module.recompile()
    _describe_replays(forward.graph, backward.graph)
    _assert_once(backward)
    returned = forward.graph.output_node().args[0]
    assert isinstance(returned, (tuple, list))
    for item in set(returned[num_fwd_outputs:]) - set(returned[:num_fwd_outputs]):
        if isinstance(item, Node) and item.op == "call_function" and isinstance(item.meta.get("val"), torch.Tensor):
            item.meta[SAVED] = True
    if target is not None and target.channels_last:
        _save_channels_last(forward, backward)
    return forward, backward


def _skip_detach(graph: Graph) -> None:
    """What is computed of a detached value is computed of the value, which is the same in a graph: else both would be saved."""
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        node.replace_all_uses_with(node.args[0], lambda user: user.op == "call_function")
        if not node.users:
            graph.erase_node(node)


def _normalize_apart(graph: Graph) -> None:
    """A batch norm in a checkpoint, which the backward computes again, reads no running statistics there, but zeros: its result
    does not depend on them, and torch refuses a backward that reads what the forward has written to."""
    for node in graph.find_nodes(op="call_function", target=_NORM):
        new = {user: user.args[1] in _NEW_STATISTICS for user in node.users}
        values = [node.meta["val"][i] for i in _NEW_STATISTICS]
        is_fixed = all(isinstance(size, int) for value in values for size in value.shape)
        if not (node.args[_IS_TRAINING] and is_recomputed(node) and is_fixed and any(new.values())):
            continue
        zeros = [insert_zeros(node, value) for value in values]
        for each in zeros:
            each.meta = {**node.meta, "val": each.meta["val"]}  # they are recomputed, too
        with graph.inserting_before(node):
            made = graph.call_function(_NORM, (*node.args[:3], *zeros, *node.args[_IS_TRAINING:]))
        made.meta = dict(node.meta)
        for user in [user for user, is_new in new.items() if not is_new]:
            user.replace_input_with(node, made)


def _save_channels_last(forward: GraphModule, backward: GraphModule) -> None:
    """Images of the sizes that convolutions read or give are saved with channels last: else the forward would transpose each,
    and the backward transpose it again."""
    output = forward.graph.output_node()
    returned = list(output.args[0])  # type: ignore[arg-type]
    given = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    shapes = _image_shapes(forward.graph)
    for place, node in enumerate(returned):
        reader = given.get(node.name) if isinstance(node, Node) else None
        if reader is None or SAVED not in node.meta or not _is_image(node.meta["val"], shapes):
            continue
        with forward.graph.inserting_before(output):
            last = forward.graph.call_function(aten.clone.default, (node,), {"memory_format": torch.channels_last})
        value = node.meta["val"]
        with mode_of(value):  # another mode may be active
            last.meta = {**node.meta, "val": value.contiguous(memory_format=torch.channels_last)}
        reader.meta["val"] = last.meta["val"]
        returned[place] = last
        node.meta.pop(SAVED)
    output.args = (tuple(returned),)
    forward.recompile()


def _image_shapes(graph: Graph) -> set[tuple[int, ...]]:
    """The fixed sizes [n, c, h, w] of what convolutions read or give."""
    convolutions = graph.find_nodes(op="call_function", target=aten.convolution.default)
    images = (each.meta["val"] for node in convolutions for each in (node, node.args[0]))
    return {tuple(image.shape) for image in images if all(isinstance(size, int) for size in image.shape)}


def _is_image(value: torch.Tensor, shapes: Collection[tuple[int, ...]]) -> bool:
    """Whether a value is row-major, has one of these shapes, and is another one with channels last."""
    if value.dim() != 4 or not all(isinstance(size, int) for size in value.shape) or tuple(value.shape) not in shapes:
        return False
    return value.is_contiguous() and not value.is_contiguous(memory_format=torch.channels_last)


def saved_outputs(forward: Graph) -> frozenset[int]:
    """Which outputs of a forward graph, or of one without a backward, are kept for the backward alone."""
    returned = forward.output_node().args[0]
    if not isinstance(returned, (tuple, list)):
        return frozenset()
    return frozenset(i for i, item in enumerate(returned) if isinstance(item, Node) and SAVED in item.meta)


def _hide_draws_of_nothing(graph: Graph) -> dict[Any, OpOverload]:
    """Puts a function in the place of every op that may draw random numbers but does not, as attention without dropout.

    Where a checkpoint computes it again, torch would have it put the generator's state back, by a call that runs in eager.

    Returns:
        The op of each function.
    """
    twins: dict[Any, OpOverload] = {}
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and _draws_nothing(node, node.target):
            twin = _twin(node.target)
            twins[twin] = node.target
            node.target = twin
    return twins


def _draws_nothing(node: Node, op: OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = {parameter.name: parameter.default_value for parameter in parameters(op)}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    return given.get("dropout_p") == 0.0


def _twin(op: OpOverload) -> Any:
    def twin(*args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    return twin


def _hide_checks(graph: Graph) -> bool:
    """Makes checks of factorizations look like assertions, and returns whether there are any: torch would save what other ops
    with an effect return, which is nothing, and refuses checkpoints of such."""
    found = graph.find_nodes(op="call_function", target=CHECK_FACTORIZATION)
    for node in found:
        node.target = aten._assert_async.msg
    return bool(found)


def _show_checks(graph: Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten._assert_async.msg):
        if "is_matrix" in node.kwargs:
            node.target = CHECK_FACTORIZATION


def _assert_once(backward: GraphModule) -> None:
    """What the forward asserted holds: torch puts its assertions into the backward, too, and what they read."""
    for node in find_assertions(backward.graph):
        if is_forward(node):
            backward.graph.erase_node(node)
    backward.graph.eliminate_dead_code()


def _describe_replays(forward: Graph, backward: Graph) -> None:
    """Fake values of the calls by which torch draws again in the backward what a checkpoint drew; it leaves them out."""
    for save, replay in pair_replayed_draws(forward, backward):
        picked = {user.args[1]: user.meta["val"] for user in save.users}
        save.meta["val"] = (picked[0], picked[1])
        save.meta |= {key: saved.meta[key] for saved in save.users for key in SOURCE if key in saved.meta}
        replay.meta["val"], replay.meta["stack_trace"] = picked[1], save.meta.get("stack_trace")


def _merge_in_the_backward(graph: Graph, *, fixed: bool) -> None:
    """Views of forward values that merge dims and that the backward reads: it makes its own.

    Args:
        fixed: views that merge fixed sizes as well, which are copies on a TPU.
    """
    for node in list(graph.nodes):
        readers = [user for user in node.users if is_backward(user)]
        if not readers or is_backward(node) or not _merges(node, fixed):
            continue
        shape = [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]
        with graph.inserting_before(min(readers)):
            made = graph.call_function(node.target, (node.args[0], shape))  # type: ignore[arg-type]
        made.meta = dict(node.meta)
        mark_backward(made)
        for reader in readers:
            reader.replace_input_with(node, made)


def _remake_in_the_backward(graph: Graph) -> None:
    """Views of a forward value that the backward reads as well, views of inputs, and tensors of one number that follow from
    plain numbers: the backward makes its own of what it reads of them.

    An input that is saved is the caller's tensor; a view of it, as of each transposed weight, would be a copy. vmap makes a
    tensor, on the host, of every number beside a batched one; a graph of the device would save it there.
    """
    for node in list(graph.nodes):
        readers = [user for user in node.users if is_backward(user)]
        sources = _sources_in_both(node) if readers and is_forward(node) else None
        if sources is None:
            continue
        with graph.inserting_before(min(readers)):
            made = _copy(graph, node, {source: source for source in sources})
        for reader in readers:
            reader.replace_input_with(node, made)


def _sources_in_both(node: Node) -> tuple[Node, ...] | None:
    """What the backward has anyway, and of which it can make a forward's value; None for a value that is saved as it is."""
    if _is_number(node):
        return ()
    source = _viewed(node)
    is_there = source is not None and (source.op == "placeholder" or any(map(is_backward, source.users)))
    return (source,) if source is not None and is_there else None


def _is_number(node: Node) -> bool:
    """Whether a node is a tensor of no dims, made of plain numbers alone."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dim() or not is_determined(node):
        return False
    return all(map(_is_number, node.all_input_nodes))


def _viewed(node: Node) -> Node | None:
    """The input or the forward's value that a forward node is a view of, made by views alone; None for what is no view."""
    source = node
    while is_view(source) and isinstance(source.args[0], Node):
        source = source.args[0]
    if source is node or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    return source if source.op == "placeholder" or is_forward(source) else None


def _remake_masks(graph: Graph) -> None:
    """Masks of attention, of queries by keys, that the backward reads: it makes its own where they follow from integers."""
    masks = {
        node: _mask(node) for op in _ATTENTION_BACKWARD for node in graph.find_nodes(op="call_function", target=op)
    }
    made = {node: mask for node, mask in masks.items() if mask is not None and _follows_from_integers(mask)}
    if made:
        copies: dict[Node, Node] = {}
        with graph.inserting_before(min(made)):
            for reader, mask in made.items():
                reader.replace_input_with(mask, _copy(graph, mask, copies))


def _mask(reader: Node) -> Node | None:
    """The mask of a gradient of attention, if the forward has it."""
    mask = reader.args[_MASK] if reader.target is internal.ATTENTION_BACKWARD else reader.kwargs.get("attn_mask")
    return mask if isinstance(mask, Node) and is_forward(mask) else None


def _copy(graph: Graph, node: Node, copies: dict[Node, Node]) -> Node:
    """A node of the backward that computes what one of the forward does, and all that it needs, but for inputs and sizes."""
    if node.op != "call_function" or not holds_tensors(node):
        return node
    if node not in copies:
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: _copy(graph, each, copies))
        made = copies[node] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = dict(node.meta)
        mark_backward(made)
    return copies[node]


def _follows_from_integers(mask: Node) -> bool:
    """Whether inputs of integers and bools, and plain numbers, determine a mask, so that it costs little beside what it saves.
    A draw would be another one in the backward."""
    known, waiting = set[Node](), [mask]
    while waiting:
        node = waiting.pop()
        value = node.meta.get("val")
        if node in known or not isinstance(value, torch.Tensor):
            continue  # a size
        known.add(node)
        is_number = value.is_floating_point() and not value.dim()
        if value.is_floating_point() and not is_number and node.target not in _KEEP_NUMBERS:
            return False
        if node.op == "call_function":
            if not is_determined(node):
                return False
            waiting += node.all_input_nodes
        elif is_number:
            return False
    return True


def _merges(node: Node, fixed: bool) -> bool:
    """Whether a node is a view of which one size varies, of a value of which several do, or has fewer dims than the value."""
    if node.target not in _VIEWS:
        return False
    source = node.args[0]
    assert isinstance(source, Node)
    if fixed and node.meta["val"].dim() < source.meta["val"].dim():
        return True
    return _varying(node) == 1 and _varying(source) > 1


def _varying(node: Node) -> int:
    return sum(not isinstance(size, int) for size in node.meta["val"].shape)
