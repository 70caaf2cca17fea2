"""Rules of recurrent layers, forward and backward."""

from __future__ import annotations

from dynaxla.bucketing.argument_roles import takes
from dynaxla.bucketing.pad_rules.alignment import move_elements
from dynaxla.bucketing.pad_rules.contiguous import move_to_front
from dynaxla.bucketing.padded_value import PaddedValue, Results, Unpaddable
from dynaxla.bucketing.rule_context import RuleContext


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
