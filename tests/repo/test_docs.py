"""What is written from the code is what the code says today."""

from __future__ import annotations

import runpy
from pathlib import Path

from dynaxla.ops.table import core_table

DOCS = Path(__file__).parents[2] / "docs"
WRITTEN = (DOCS / "ops.md").read_text(encoding="utf-8")


def test_ops_page_is_what_the_op_table_says() -> None:
    write_ops = runpy.run_path(str(DOCS / "write_ops.py"))["write_ops"]
    assert write_ops() == WRITTEN, "python -m docs.write_ops > docs/ops.md"


def test_ops_page_has_every_op_once() -> None:
    lines = WRITTEN.splitlines()
    assert sorted(line.split("`")[1] for line in lines if line.startswith("| `")) == sorted(
        map(str, core_table().records)
    )


def test_bucketing_page_has_the_rules_of_today() -> None:
    written = runpy.run_path(str(DOCS / "write_pad_rules.py"))["write_pad_rules"]()
    page = (DOCS / "bucketing.md").read_text(encoding="utf-8")
    assert written in page, "python docs/write_pad_rules.py"
