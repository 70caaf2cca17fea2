"""Prints the table of pad rules for docs/bucketing.md: `python docs/write_pad_rules.py`."""

from __future__ import annotations

from dynaxla.ops.spec import PadRule
from dynaxla.ops.tables.padding import PAD_RULES


def write_pad_rules() -> str:
    """A Markdown table: one row per rule, with the overloads that follow it."""
    lines = ["| rule | what it does to padding | overloads |", "|---|---|---|"]
    for rule in PadRule:
        targets = sorted(str(target).removesuffix(".default") for target, found in PAD_RULES.items() if found is rule)
        lines.append(f"| {rule.name.lower()} | {rule.value} | {', '.join(f'`{target}`' for target in targets)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(write_pad_rules())
