"""The table of long tests names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.times import read_times

ROOT = Path(__file__).parents[2]


def test_the_tests_of_the_table_are_there() -> None:
    names = {node_id.split("[")[0] for node_id in read_times()}
    files = {file: (ROOT / file).read_text(encoding="utf-8") for file in {name.split("::")[0] for name in names}}
    gone = [
        name for name in sorted(names) if not re.search(rf"def {name.split('::')[-1]}\(", files[name.split("::")[0]])
    ]
    assert gone == [], "tests/times.tsv lists tests that are no longer there: take their lines out"
