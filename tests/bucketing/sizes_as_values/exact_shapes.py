"""Which expressions of the tables are not padded, and why: docs/exact_shapes.md, which this reads and writes.

python -m tests.bucketing.sizes_as_values.exact_shapes
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.bucketing.sizes_as_values import FAMILIES
from tests.bucketing.sizes_as_values.checking import Dynamic, Finding, examine, groups
from tests.bucketing.sizes_as_values.expression import Family

PAGE = Path(__file__).parents[3] / "docs" / "exact_shapes.md"
MODES: tuple[Dynamic, ...] = (True, None)
TOGETHER = 14
"""How many expressions are compiled as one function: Dynamo's time, most of all that there is, is theirs together."""
ALONE = " (dynamic={} alone)"
_LINE = re.compile(r"^- `(.*)`: (.*?)(?: \(dynamic=(True|None) alone\))?$")


@dataclass(frozen=True)
class Listed:
    """Attributes:
    reasons: for each mode, for each expression that is not padded then, the reason.
    """

    reasons: Mapping[Dynamic, Mapping[str, str]]

    @classmethod
    def read(cls) -> Listed:
        reasons: dict[Dynamic, dict[str, str]] = {mode: {} for mode in MODES}
        for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
            if found := _LINE.match(line):
                text, reason, alone = found.groups()
                for mode in MODES:
                    if alone in (None, str(mode)):
                        reasons[mode][text] = reason
        return cls(reasons)

    def of(self, family: Family, dynamic: Dynamic) -> list[str]:
        return [text for text in family.texts if text in self.reasons[dynamic]]

    def padded(self, family: Family, dynamic: Dynamic) -> Iterator[list[str]]:
        """The expressions that are padded, as many together as one function has."""
        known = self.reasons[dynamic]
        return groups(family, [text for text in family.texts if text not in known], TOGETHER)


def findings(family: Family, dynamic: Dynamic, known: Listed) -> Iterator[Finding]:
    for texts in known.padded(family, dynamic):
        yield from examine(family, texts, dynamic)
    for text in known.of(family, dynamic):
        yield from examine(family, [text], dynamic)


def write(families: Sequence[Family], modes: Sequence[Dynamic]) -> int:
    """Runs expressions, writes the page as it goes, and gives how many are wrong or fail, which it prints."""
    bad = 0
    for mode in modes:
        for family in families:
            known = Listed.read()
            found: dict[str, str] = {}
            for finding in findings(family, mode, known):
                if finding.kind in ("exact", "eager", "captured"):
                    found.setdefault(finding.text, _shown(finding))
                else:
                    bad += 1
                    print(finding, flush=True)
            _page({**known.reasons, mode: {**_without(known.reasons[mode], family), **found}})
            print(
                f"{family.name}, dynamic={mode}: {len(found)} of {len(family.texts)}, {time.process_time():.0f} s",
                flush=True,
            )
    return bad


def _without(reasons: Mapping[str, str], family: Family) -> dict[str, str]:
    return {text: reason for text, reason in reasons.items() if text not in family.texts}


def _page(reasons: Mapping[Dynamic, Mapping[str, str]]) -> None:
    sections = []
    for family in FAMILIES:
        lines = list(_lines(family, reasons))
        sections.append(
            "\n".join([f"## {family.name.capitalize()} ({len(lines)} of {len(family.texts)})", "", *lines, ""])
        )
    total, exact = (
        sum(len(family.texts) for family in FAMILIES),
        len({text for of in reasons.values() for text in of}),
    )
    PAGE.write_text("\n".join([_HEAD.format(total=total, exact=exact), *sections]).rstrip() + "\n")


def _lines(family: Family, reasons: Mapping[Dynamic, Mapping[str, str]]) -> Iterator[str]:
    for text in family.texts:
        modes = [mode for mode in MODES if text in reasons[mode]]
        if modes:
            yield f"- `{text}`: {reasons[modes[0]][text]}" + (ALONE.format(modes[0]) if len(modes) == 1 else "")


def _shown(finding: Finding) -> str:
    said = finding.detail.replace(" cannot run on padded values, so its part is compiled per exact shape", "")
    said = re.sub(r"^(?!aten|torch|dynaxla)\w+: ", "", said)
    return re.sub(r"\bs\d+\b", "s", said)


_HEAD = """# Expressions that are not padded

Of {total} expressions in which sizes are used as values (tests/bucketing/sizes_as_values), the {exact} below are not
padded to buckets. Each was run at seven sizes, under `dynamic=True` and by default, forward and backward. The
listed ones give eager's numbers too, but are compiled per exact shape, or have an op that runs in eager; the line names
the op and the reason. All others are padded. Written by `python -m tests.bucketing.sizes_as_values.exact_shapes`; tests
marked slow compare the page with new runs.
A few entries depend on which expressions are compiled together.
"""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--dynamic", choices=[str(mode) for mode in MODES])
    wanted = parser.parse_args()
    families = [f for f in FAMILIES if not wanted.words or any(word in f.name for word in wanted.words)]
    modes = [mode for mode in MODES if wanted.dynamic in (None, str(mode))]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return write(families, modes)


if __name__ == "__main__":
    sys.exit(main() > 0)
