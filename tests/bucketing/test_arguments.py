"""What rules take the arguments of their ops for."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch

from dynaxla.bucketing.argument_roles import (
    BUCKET_SIZE,
    CONSTANT,
    DATA,
    LAYOUT,
    TRUE_SIZE,
    check_arguments,
    check_sizes_allowed,
    takes,
)
from dynaxla.bucketing.padded_value import Unpaddable
from dynaxla.ops.table import core_table
from tests.bucketing.poison import case, poison
from tests.bucketing.poison import check as check_case

aten = torch.ops.aten


def test_every_argument_of_every_ruled_op_is_something_to_its_rule() -> None:
    pads = core_table().pads
    for target, rule in pads.items():
        assert None not in rule.arguments(target).values(), target
    assert pads[aten.slice.Tensor].arguments(aten.slice.Tensor) == {
        "self": DATA, "dim": LAYOUT, "start": TRUE_SIZE, "end": TRUE_SIZE, "step": TRUE_SIZE,
    }  # fmt: skip
    assert pads[aten.expand.default].arguments(aten.expand.default) == {
        "self": DATA, "size": BUCKET_SIZE, "implicit": LAYOUT,
    }  # fmt: skip


def test_a_rule_that_does_not_know_an_argument_is_not_loaded() -> None:
    def roll(call: Any) -> None: ...

    with pytest.raises(
        TypeError, match=r"the pad rule roll does not say what it takes dims, shifts of aten.roll.default"
    ):
        check_arguments({aten.roll.default: takes()(roll)})


def test_a_rule_that_knows_an_argument_which_none_of_its_ops_has_is_not_loaded() -> None:
    def flat(call: Any) -> None: ...

    rule = takes(dim=LAYOUT, axis=CONSTANT)(flat)
    with pytest.raises(TypeError, match="the pad rule flat names axis, which none of its ops takes"):
        check_arguments({aten.unsqueeze.default: rule})


def test_two_rules_of_one_name_are_not_loaded() -> None:
    def roll(call: Any) -> None: ...

    rules = {aten.roll.default: takes(CONSTANT)(roll), aten.flip.default: takes(CONSTANT)(roll)}
    with pytest.raises(TypeError, match="two pad rules are called roll"):
        check_arguments(rules)


def test_a_size_where_the_rule_takes_none_is_named() -> None:
    arguments = core_table().pads[aten.linalg_vector_norm.default].arguments(aten.linalg_vector_norm.default)
    size = sympy.Symbol("s0", positive=True, integer=True)
    check_sizes_allowed(arguments, {"dim": [0, 1], "ord": 2.0, "keepdim": False})
    with pytest.raises(Unpaddable, match="its ord is the size s0 - 1, and the rule takes no size there"):
        check_sizes_allowed(arguments, {"dim": [0, 1], "ord": size - 1})
    with pytest.raises(Unpaddable, match="its dim is the size s0"):
        check_sizes_allowed(arguments, {"dim": [0, size], "ord": 2.0})


def _write(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    written = z.clone()
    written[:, -x.shape[1] :] = x
    return written


_FROM_THE_END = [
    case("slice", "a slice from minus a size", lambda x, y: y[:, -x.shape[1] :] + x,
         lambda s: torch.randn(3, s), lambda s: torch.randn(3, 2 * s)),
    case("slice", "both dims", lambda x, t: t[-x.shape[0] :, -x.shape[0] :] + x,
         lambda s: torch.randn(s), lambda s: torch.randn(40, 40)),
    case("select", "one position", lambda x, y: y[-x.shape[0]] * x,
         lambda s: torch.randn(s), lambda s: torch.randn(3 * s)),
    case("slice_scatter", "a write", _write, lambda s: torch.randn(3, 2 * s + 3), lambda s: torch.randn(3, s)),
]  # fmt: skip


@pytest.mark.parametrize("tested", _FROM_THE_END, ids=str)
def test_a_negative_size_counts_from_the_true_end(tested: object, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = poison(monkeypatch)
    check_case(tested)  # type: ignore[arg-type]
    assert tested.rule in rules.used  # type: ignore[attr-defined]
