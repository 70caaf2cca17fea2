"""What rules take the arguments of their ops for."""

from __future__ import annotations

import pytest
import sympy
import torch

from dynaxla.bucketing.arguments import (
    BUCKET_SIZE,
    CONSTANT,
    DATA,
    LAYOUT,
    TRUE_SIZE,
    Rule,
    check,
    refuse_unclaimed,
    takes,
)
from dynaxla.bucketing.rules.registry import RULES
from dynaxla.bucketing.values import Refusal
from dynaxla.ops.spec import PadRule
from dynaxla.ops.tables.padding import PAD_RULES
from tests.bucketing.poison import case, poison
from tests.bucketing.poison import check as check_case

aten = torch.ops.aten


def test_every_argument_of_every_ruled_op_is_something_to_its_rule() -> None:
    for target, name in PAD_RULES.items():
        arguments = RULES[name].arguments(target)
        assert None not in arguments.values(), target
    assert RULES[PadRule.SLICE].arguments(aten.slice.Tensor) == {
        "self": DATA, "dim": LAYOUT, "start": TRUE_SIZE, "end": TRUE_SIZE, "step": TRUE_SIZE,
    }  # fmt: skip
    assert RULES[PadRule.EXPAND].arguments(aten.expand.default) == {
        "self": DATA, "size": BUCKET_SIZE, "implicit": LAYOUT,
    }  # fmt: skip


def test_a_rule_that_does_not_know_an_argument_is_not_loaded() -> None:
    with pytest.raises(
        TypeError, match=r"the pad rule roll does not say what it takes dims, shifts of aten.roll.default"
    ):
        check({"roll": Rule(lambda call: None, {})}, {aten.roll.default: "roll"})


def test_a_rule_that_knows_an_argument_which_none_of_its_ops_has_is_not_loaded() -> None:
    rule = takes(dim=LAYOUT, axis=CONSTANT)(lambda call: None)
    with pytest.raises(TypeError, match="the pad rule flat names axis, which none of its ops takes"):
        check({"flat": rule}, {aten.unsqueeze.default: "flat"})


def test_a_size_where_the_rule_takes_none_is_refused_by_name() -> None:
    arguments = RULES[PadRule.REDUCTION].arguments(aten.linalg_vector_norm.default)
    size = sympy.Symbol("s0", positive=True, integer=True)
    refuse_unclaimed(arguments, {"dim": [0, 1], "ord": 2.0, "keepdim": False})
    with pytest.raises(Refusal, match="its ord is the size s0 - 1, and the rule takes no size there"):
        refuse_unclaimed(arguments, {"dim": [0, 1], "ord": size - 1})
    with pytest.raises(Refusal, match="its dim is the size s0"):
        refuse_unclaimed(arguments, {"dim": [0, size], "ord": 2.0})


def _write(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    written = z.clone()
    written[:, -x.shape[1] :] = x
    return written


_FROM_THE_END = [
    case(PadRule.SLICE, "a slice from minus a size", lambda x, y: y[:, -x.shape[1] :] + x,
         lambda s: torch.randn(3, s), lambda s: torch.randn(3, 2 * s)),
    case(PadRule.SLICE, "both dims", lambda x, t: t[-x.shape[0] :, -x.shape[0] :] + x,
         lambda s: torch.randn(s), lambda s: torch.randn(40, 40)),
    case(PadRule.SELECT, "one position", lambda x, y: y[-x.shape[0]] * x,
         lambda s: torch.randn(s), lambda s: torch.randn(3 * s)),
    case(PadRule.SLICE_SCATTER, "a write", _write, lambda s: torch.randn(3, 2 * s + 3), lambda s: torch.randn(3, s)),
]  # fmt: skip


@pytest.mark.parametrize("tested", _FROM_THE_END, ids=str)
def test_a_negative_size_counts_from_the_true_end(tested: object, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = poison(monkeypatch)
    check_case(tested)  # type: ignore[arg-type]
    assert tested.rule in rules.used  # type: ignore[attr-defined]
