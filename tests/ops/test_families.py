"""Every family of ops is compared with eager by one test, and pointwise ops on the samples of OpInfo that bear their names."""

from __future__ import annotations

import inspect
import itertools
from collections import Counter

import pytest
from torch.testing._internal.common_methods_invocations import op_db

from dynaxla.ops.table import families
from tests.ops.rule_check import FAMILIES, check_opinfo, targets_of

POINTWISE = targets_of("pointwise")
NAMES = {target._schema.name.rpartition("::")[2].lstrip("_") for target in POINTWISE}
OPINFO_NAMES = sorted({info.name for info in op_db if info.aten_name in NAMES})


def test_every_family_is_in_one_test() -> None:
    named = Counter(family for names in FAMILIES.values() for family in names.split())
    assert named == Counter(module.__name__.rpartition(".")[2] for module, _ in families())


def test_bodies_take_every_keyword_of_their_schema() -> None:
    """A parameter must not bear the name of a keyword that the body ignores, "layout" say."""
    for record in itertools.chain.from_iterable(records for _, records in families()):
        given = record.target._schema.arguments
        keywords = {each.name: None for each in given if each.kwarg_only}
        inspect.signature(record.body).bind(*(None for each in given if not each.kwarg_only), **keywords)


@pytest.mark.long
@pytest.mark.parametrize("name", OPINFO_NAMES)
def test_bodies_of_pointwise_ops_agree_with_eager_on_opinfo_samples(name: str, full: bool) -> None:
    check_opinfo(name, POINTWISE, full)
