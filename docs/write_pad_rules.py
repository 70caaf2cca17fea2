"""Writes the table of pad rules at the end of docs/bucketing.md: `python docs/write_pad_rules.py`."""

from __future__ import annotations

from pathlib import Path

from dynaxla.bucketing.argument_roles import BUCKET_SIZE, TRUE_SIZE, PadRule, Takes
from dynaxla.ops.table import core_table


def write_pad_rules() -> str:
    """A Markdown table: one row per rule, with the overloads that follow it."""
    lines = ["| rule | what it does to padding | true sizes | bucket sizes | overloads |", "|---|---|---|---|---|"]
    pads = core_table().pads
    for rule in sorted(set(pads.values()), key=lambda rule: rule.name):
        targets = sorted(str(target).removesuffix(".default") for target, found in pads.items() if found is rule)
        sizes = " | ".join(_arguments(rule, kind) for kind in (TRUE_SIZE, BUCKET_SIZE))
        lines.append(f"| {rule.name} | {rule.summary} | {sizes} | {', '.join(f'`{target}`' for target in targets)} |")
    return "\n".join(lines)


def _arguments(rule: PadRule, kind: Takes) -> str:
    """The numbers that the rule takes for this."""
    if rule.others is kind:
        return "every number"
    return ", ".join(f"`{name}`" for name, found in rule.numbers.items() if found is kind)


def main() -> None:
    page = Path(__file__).with_name("bucketing.md")
    above = page.read_text(encoding="utf-8").partition("| rule | what it does to padding |")[0]
    page.write_text(f"{above}{write_pad_rules()}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
