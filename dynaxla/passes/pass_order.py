"""The order of the passes: a graph's way from AOTAutograd to the partition, which cuts it into parts.

Every pass takes a functional graph of ATen ops with `meta["val"]` on every node and returns one with the same outputs, but
for those that `output_aliases` and `opaque_inputs` take out. A part is then split from its weight-only work
(programs/weight_folding.py) and, at each set of sizes, padded (bucketing/padded_graph.py) or specialized
(programs/specialize.py).
"""

from __future__ import annotations

from dynaxla.passes import (
    constant_lifting,
    decomposed_checks,
    donated_inputs,
    group_collectives,
    higher_order_calls,
    host_constants,
    in_place_writes,
    metadata_mutations,
    opaque_inputs,
    output_aliases,
    seed_inputs,
    shared_seeds,
    value_checks,
)
from dynaxla.passes.rewrites import REWRITES

FOR_ALL = (decomposed_checks.PASS, in_place_writes.PASS, metadata_mutations.PASS, shared_seeds.PASS)
"""Run on every captured graph: eager PyTorch too runs what they give."""

FOR_PARTS = (
    output_aliases.PASS,
    donated_inputs.PASS,
    host_constants.PASS,
    constant_lifting.PASS,
    group_collectives.PASS,
    higher_order_calls.PASS,
    seed_inputs.PASS,
    value_checks.PASS,
    *REWRITES,
    opaque_inputs.PASS,
)
"""Run on the copy of a graph that is cut into parts; eager PyTorch runs the graph without them."""

FOR_ONE_CALL = (constant_lifting.PASS, seed_inputs.PASS, *REWRITES)
"""Run on the graph of one op outside of compiled functions: its results share no memory, and what it writes is among them."""
