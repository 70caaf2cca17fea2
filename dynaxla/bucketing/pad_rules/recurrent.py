"""Rules of recurrent layers, forward and backward, and of loops over places."""

from __future__ import annotations

from collections.abc import Collection

from dynaxla.bucketing.argument_roles import TRUE_SIZE, PadRule, takes
from dynaxla.bucketing.pad_rules.alignment import move_elements
from dynaxla.bucketing.pad_rules.contiguous import move_to_front
from dynaxla.bucketing.padded_value import PaddedValue, Results, Unpaddable, is_full, single_factor
from dynaxla.bucketing.rule_context import RuleContext
from dynaxla.bucketing.size_expressions import is_varying


@takes()
def recurrence(call: RuleContext) -> PaddedValue:
    """Padded steps come last, so that no real step reads one; a row of the batch reads only itself."""
    sequences = _align(call)
    node = call.same(**sequences)
    return call.result(node, (*sequences["gates"].dims[:2], sequences["state"].dims[1]))


@takes()
def recurrence_backward(call: RuleContext) -> Results:
    """Padding is set to zero: padded steps and rows add zero to the gradients of weights, and padded steps to the state's."""
    aligned = _align(call)
    changed = {name: call.build.mask(value, range(len(value.dims) - 1), 0) for name, value in aligned.items()}
    weights: list[PaddedValue] = call["weights"]
    return call.results(call.same(**changed), [value.dims for value in (changed["gates"], changed["state"], *weights)])


def _align(call: RuleContext) -> dict[str, PaddedValue]:
    """The operands but weights, with real steps in front, and the batch's real rows where those of the gates are."""
    if not all(weight.is_full for weight in call["weights"]):
        raise Unpaddable("the size of a weight varies")
    found: dict[str, PaddedValue] = {n: call[n] for n in ("gates", "grad", "states") if n in call.given}
    aligned = {name: move_to_front(call, value, 0) for name, value in found.items()}
    rows = aligned["gates"].dims[1]
    for name, value in aligned.items():
        aligned[name] = move_elements(call, value, 1, rows)
    return {**aligned, "state": move_elements(call, call["state"], 0, rows)}


def loop_over_places(scanned: Collection[int], carried: int) -> PadRule:
    """The rule of `scan` and `map`.

    Args:
        scanned: which of the call's tensors are read one place at a time.
        carried: how many results come first that are carried from place to place; the others have a value of each place.
    """

    @takes(sizes=TRUE_SIZE)
    def loop(call: RuleContext) -> Results:
        """The loop ends behind the last real place."""
        given: list[PaddedValue] = call["tensors"]
        tensors = [move_to_front(call, x, 0) if index in scanned else x for index, x in enumerate(given)]
        fixed = all(is_full(dim) for index, x in enumerate(tensors) for dim in x.dims[index in scanned :])
        if not fixed or any(map(is_varying, call["sizes"])):
            raise Unpaddable("a size within its sub-graph varies")
        places = next(x.dims[0] for index, x in enumerate(tensors) if index in scanned)
        node = call.same(tensors=tensors, places=call.build.scalar(single_factor(places).size))
        found = [call.build.true_dims(value) for value in call.node.meta["val"]]
        return call.results(node, [*found[:carried], *((places, *dims[1:]) for dims in found[carried:])])

    return loop
