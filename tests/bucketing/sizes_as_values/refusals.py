"""Which expressions of the tables are not padded, and why: docs/exact_shapes.md, which this reads and writes.

python -m tests.bucketing.sizes_as_values.refusals
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
class Refusals:
    """Attributes:
    reasons: for each mode, for each expression that is not padded then, the reason.
    """

    reasons: Mapping[Dynamic, Mapping[str, str]]

    @classmethod
    def read(cls) -> Refusals:
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


def findings(family: Family, dynamic: Dynamic, known: Refusals) -> Iterator[Finding]:
    for texts in known.padded(family, dynamic):
        yield from examine(family, texts, dynamic)
    for text in known.of(family, dynamic):
        yield from examine(family, [text], dynamic)


def write() -> None:
    """Runs all expressions and writes the page.

    Raises:
        AssertionError: one is wrong, or fails.
    """
    known = Refusals.read()
    sections, refused = [], 0
    for family in FAMILIES:
        found: dict[Dynamic, dict[str, str]] = {mode: {} for mode in MODES}
        for mode in MODES:
            for finding in findings(family, mode, known):
                print(finding, flush=True)
                assert finding.kind in ("exact", "eager"), finding
                found[mode].setdefault(finding.text, _shown(finding))
        lines = list(_lines(family, found))
        refused += len(lines)
        sections.append("\n".join([f"## {family.name.capitalize()} ({len(family.texts)})", "", *lines, ""]))
    total = sum(len(family.texts) for family in FAMILIES)
    PAGE.write_text("\n".join([_HEAD.format(total=total, refused=refused), *sections]).rstrip() + "\n")


def _lines(family: Family, found: Mapping[Dynamic, Mapping[str, str]]) -> Iterator[str]:
    for text in family.texts:
        modes = [mode for mode in MODES if text in found[mode]]
        if modes:
            yield f"- `{text}`: {found[modes[0]][text]}" + (ALONE.format(modes[0]) if len(modes) == 1 else "")


def _shown(finding: Finding) -> str:
    said = finding.detail.replace(" cannot run on padded values, so its part is compiled per exact shape", "")
    said = re.sub(r"^(?!aten|torch|dynaxla)\w+: ", "", said)
    return re.sub(r"\bs\d+\b", "s", said)


_HEAD = """# Expressions that are not padded

Of {total} expressions in which sizes are used as values (tests/bucketing/sizes_as_values), run at seven sizes, under
`dynamic=True` and by default, forward and backward, these {refused} give eager's numbers at the exact shape, or with an op in
eager: the op and the reason. All others are padded. Written by `python -m tests.bucketing.sizes_as_values.refusals`; a test
fails where this list is not what is.
"""


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    write()
