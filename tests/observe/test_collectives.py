"""Collectives are read from HLO's text, in the forms that XLA's compilers write."""

from __future__ import annotations

import pytest

from dynaxla.observe.collectives import Collective, count_sent_bytes, list_collectives

LINES = {
    "%all-reduce.1 = f32[16,8]{1,0} all-reduce(%dot), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add": Collective(
        "all-reduce", "f32[16,8]", 512, ((0, 1, 2, 3), (4, 5, 6, 7))
    ),
    "ROOT %r = (f32[8]{0}, bf16[4,2]{1,0}) all-reduce(%a, %b), replica_groups={{0,1},{2,3}}, to_apply=%add": Collective(
        "all-reduce", "f32[8], bf16[4,2]", 48, ((0, 1), (2, 3))
    ),
    "%g = s64[8]{0} all-gather(%p), channel_id=3, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}": Collective(
        "all-gather", "s64[8]", 64, ((0, 4), (1, 5), (2, 6), (3, 7))
    ),
    "%s = (f32[2]{0}, f32[8]{0:T(8)}) all-gather-start(%p), replica_groups={}, dimensions={0}": Collective(
        "all-gather", "f32[8]", 32, ()
    ),
    "%d = f32[8]{0} all-gather-done(%s)": None,
    "%x = pred[2,2]{1,0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}, to_apply=%or": Collective(
        "reduce-scatter", "pred[2,2]", 4, ((0, 1),)
    ),
    "%c = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}": Collective(
        "collective-permute", "f32[4]", 16, ((0, 1), (1, 0))
    ),
    "%m = f32[16]{0} all-gather(%p), replica_groups=mesh['a'=2,'b'=1,'c'=4] {'a'}, dimensions={0}": Collective(
        "all-gather", "f32[16]", 64, ((0, 4), (1, 5), (2, 6), (3, 7))
    ),
    "%n = f32[16]{0} all-reduce(%p), replica_groups=mesh['a'=2,'c'=4] {'c':(1)2}, to_apply=%add": Collective(
        "all-reduce", "f32[16]", 64, ((0, 2), (1, 3), (4, 6), (5, 7))
    ),
    "%t = (f32[2]{0}, f32[2]{0}) all-to-all(%a, %b), replica_groups={{0,1}}": Collective(
        "all-to-all", "f32[2], f32[2]", 16, ((0, 1),)
    ),
    '%v = f32[16]{0} add(%all-reduce.1, %g), metadata={op_name="all-reduce(x)"}': None,
}


@pytest.mark.parametrize("line", LINES)
def test_a_line(line: str) -> None:
    expected = LINES[line]
    assert list_collectives(line) == (() if expected is None else (expected,))


LOOPS = """HloModule jit_f, entry_computation_layout={()->f32[4]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %c = f32[] add(%a, %b)
}

%inner.1 (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %all-reduce.1 = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
}

%outer (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g = f32[8]{0} all-gather(%x), replica_groups={{0,1}}, dimensions={0}
  %w = (s32[], f32[4]{0}) while(%t), condition=%c, body=%inner.1, backend_config={"known_trip_count":{"n":"5"}}
}

%unknown (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %m = f32[4]{0} all-to-all(%x), replica_groups={{0,1}}
}

ENTRY %main.9 () -> f32[4] {
  %w = (s32[], f32[4]{0}) while(%t), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"3"},"x":{}}
  %v = (s32[], f32[4]{0}) while(%t), condition=%c, body=%unknown
  %q = f32[4]{0} call(%u), to_apply=%inner.1
  ROOT %r = f32[4]{0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
}
"""


def test_one_in_a_loop_counts_as_often_as_it_runs() -> None:
    """Also in a loop within a loop; of a second module no computation is that of the first one's name."""
    other = "HloModule g\n\nENTRY %inner.1 () -> f32[4] {\n  %a = f32[4]{0} all-gather(%y), replica_groups={{0,1}}\n}\n"
    found = list_collectives(LOOPS + other)
    assert [(each.kind, each.runs) for each in found] == [
        ("all-reduce", 16),
        ("all-gather", 3),
        ("all-to-all", 1),
        ("all-reduce", 1),
        ("all-gather", 1),
    ]
    assert count_sent_bytes(found[0], 2) == 16 * 16.0
