"""Prints the table of pad rules for docs/bucketing.md: `python docs/write_pad_rules.py`."""

from __future__ import annotations

from dynaxla.bucketing.arguments import BUCKET_SIZE, TRUE_SIZE, Rule, Takes
from dynaxla.bucketing.rules.registry import RULES
from dynaxla.ops.spec import PadRule
from dynaxla.ops.tables.padding import PAD_RULES


def write_pad_rules() -> str:
    """A Markdown table: one row per rule, with the overloads that follow it."""
    lines = ["| rule | what it does to padding | true sizes | bucket sizes | overloads |", "|---|---|---|---|---|"]
    for rule in PadRule:
        targets = sorted(str(target).removesuffix(".default") for target, found in PAD_RULES.items() if found is rule)
        sizes = " | ".join(_arguments(RULES[rule], kind) for kind in (TRUE_SIZE, BUCKET_SIZE))
        lines.append(
            f"| {rule.name.lower()} | {rule.value} | {sizes} | {', '.join(f'`{target}`' for target in targets)} |"
        )
    return "\n".join(lines)


def _arguments(rule: Rule, kind: Takes) -> str:
    """The numbers that the rule takes for this."""
    if rule.others is kind:
        return "every number"
    return ", ".join(f"`{name}`" for name, found in rule.numbers.items() if found is kind)


if __name__ == "__main__":
    print(write_pad_rules())
