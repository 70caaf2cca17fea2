"""Write dynaxla/ops/tables/torch_mlir.py from the record of benchmarks/mlir_sweep.py.

python benchmarks/write_lowered_table.py [--record FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
VERSION = "20261001"
LINE = 120
LEAST_CALLS = 6  # of float32, or of int64 for ops that have no float32 calls
LEAST_CALLS_OF_A_DTYPE = 2
OURS = (  # our rules of these were chosen for speed, for NaN at bad indices, or for results that are never read
    "aten._native_batch_norm",
    "aten._scaled_dot",
    "aten.convolution.",
    "aten.embedding.",
    "aten.max_pool2d_with_indices",
    "aten.max_pool3d_with_indices",
    "aten.native_",
)
FOLDED = (  # torch-mlir folds x == x to True, which it is not for NaN
    "aten.eq.Tensor",
    "aten.ge.Tensor",
    "aten.gt.Tensor",
    "aten.le.Tensor",
    "aten.lt.Tensor",
    "aten.ne.Tensor",
)
BY_LUCK = (  # other formulas than torch's, which the samples do not tell apart: integers through floats, and the like
    "aten.addbmm.",
    "aten.arange.",
    "aten.div.Tensor_mode",
    "aten.floor_divide.",
    "aten.pow.",
    "aten.rad2deg.",
)
CONSTANTS = (  # torch-mlir folds ops on constants, and some folds are wrong: frac(full_like(x, 3)) becomes 6
    "aten.fill.",
    "aten.full",
    "aten.new_",
    "aten.ones",
    "aten.scalar_tensor",
    "aten.zeros",
)
CASTS = ("aten._to_copy.", "aten.copy.")  # negative floats to uint8 become 0, and reals to complex end the process
ROUNDED = {"bfloat16", "float16"}  # XLA drops the roundings between torch-mlir's steps; our rules round once, as torch
LIKE = {  # dtypes with few calls, and the dtype with more of them that has to be right too
    "float64": "float32",
    "float16": "bfloat16",
    "complex64": "float32",
    "int32": "int64",
    "uint8": "int64",
}
NAMED_SETS = {
    "_FLOATS": ("float32", "float64"),
    "_INTEGERS": ("int32", "int64", "uint8"),
    "_SIGNED": ("int32", "int64"),
}
HEADER = f'''"""Which overloads torch-mlir itself lowers right, and in which dtypes.

Written by benchmarks/write_lowered_table.py from the record of benchmarks/mlir_sweep.py (torch-mlir {VERSION}), which
lowers, runs and compares calls collected from PyTorch's own samples. A dtype is listed when every call filed under it
(that of the call's first tensor) was right. No 16-bit floats: XLA may drop the roundings between torch-mlir's steps.
Do not edit; write it again:

    python benchmarks/mlir_sweep.py && python benchmarks/write_lowered_table.py
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
'''


def dtypes_to_list(name: str, record: Mapping[str, Any]) -> frozenset[str]:
    """The dtypes in which torch-mlir's lowering of one overload is to be used: none if there is too little evidence."""
    if (
        not name.startswith("aten.")
        or name.startswith(OURS + FOLDED + BY_LUCK + CONSTANTS + CASTS)
        or _fails_on_a_shape(record)
    ):
        return frozenset()
    counts = record["calls_by_dtype"]
    main = "float32" if "float32" in counts else "int64"
    enough = {d for d in record["right_dtypes"] if counts[d] >= LEAST_CALLS_OF_A_DTYPE}
    right = {d for d in enough if d not in LIKE or LIKE[d] in enough} - ROUNDED
    return frozenset(right) if main in right and counts[main] >= LEAST_CALLS else frozenset()


def _fails_on_a_shape(record: Mapping[str, Any]) -> bool:
    """Whether a call failed for its shape, in whatever dtype: the calls of other dtypes may have missed that shape."""
    return bool(record["died"]) or any("inferred type(s)" in failure for failure in record["failures"])


def expression(dtypes: Iterable[str]) -> str:
    """The set of dtypes, in terms of the named sets."""
    left, parts = set(dtypes), []
    for name, members in NAMED_SETS.items():
        if left >= set(members):
            parts.append(name)
            left -= set(members)
    if left:
        alone = ", ".join(f"torch.{dtype}" for dtype in sorted(left))
        parts.append(f"{{{alone}}}" if parts else f"frozenset({{{alone}}})")
    return " | ".join(parts)


def module_text(groups: Mapping[frozenset[str], list[str]]) -> str:
    """The source of the table's module."""
    return "\n".join((HEADER, *_sets(groups), "", *_groups(groups), "", *_mapping())) + "\n"


def _sets(groups: Mapping[frozenset[str], list[str]]) -> Iterator[str]:
    used = " ".join(expression(dtypes) for dtypes in groups)
    for name, members in NAMED_SETS.items():
        if name in used:
            yield f"{name} = frozenset({{{', '.join(f'torch.{m}' for m in members)}}})"


def _groups(groups: Mapping[frozenset[str], list[str]]) -> Iterator[str]:
    yield "_GROUPS: tuple[tuple[frozenset[torch.dtype], tuple[OpOverload, ...]], ...] = ("
    for dtypes in sorted(groups, key=lambda dtypes: (-len(groups[dtypes]), sorted(dtypes))):
        yield f"    ({expression(dtypes)}, ("
        names = " ".join(f"{name}," for name in sorted(groups[dtypes]))
        yield textwrap.fill(names, LINE, initial_indent=" " * 8, subsequent_indent=" " * 8, break_long_words=False)
        yield "    )),"
    yield ")  # fmt: skip"


def _mapping() -> Iterator[str]:
    yield "LOWERED: Mapping[OpOverload, frozenset[torch.dtype]] = MappingProxyType("
    yield "    {target: dtypes for dtypes, targets in _GROUPS for target in targets}"
    yield ")"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", type=Path, default=ROOT / "benchmarks" / "results" / "mlir_sweep.json")
    parser.add_argument("--out", type=Path, default=ROOT / "dynaxla" / "ops" / "tables" / "torch_mlir.py")
    options = parser.parse_args()
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    for name, record in json.loads(options.record.read_text()).items():
        if "died" in record and (dtypes := dtypes_to_list(name, record)):  # without: of an older, shorter sweep
            groups[dtypes].append(name)
    options.out.write_text(module_text(groups))
    print(f"{sum(map(len, groups.values()))} overloads in {len(groups)} groups")


if __name__ == "__main__":
    main()
