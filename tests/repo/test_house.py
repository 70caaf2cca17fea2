"""The package's names and rooms: what conformance/house.py reads, beside the strict tables of what is still to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import house as measures
from conformance.house import House, circles, is_opaque, longest_chain, write_table
from tests.repo import names_to_do

ROOT = Path(__file__).parents[2]
MEASURED = {
    "FUNCTIONS": measures.opaque_functions,
    "CLASSES": measures.repeated_classes,
    "MODULES": measures.repeated_modules,
    "OLD_WORDS": measures.old_words,
    "CRUMBS": measures.crumbs,
    "CIRCLES": lambda house: circles(house.room_imports),
}


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


@pytest.mark.parametrize("table", MEASURED)
def test_names_and_rooms_are_as_they_should_be(house: House, table: str) -> None:
    """Fails for a new name of the kind, and for one in names_to_do.py that is no longer there: such a table only shrinks."""
    found, allowed = MEASURED[table](house), getattr(names_to_do, table)
    new = [each for each in found if each not in allowed or (isinstance(found, dict) and found[each] != allowed[each])]
    gone = [each for each in allowed if each not in found]
    assert found == allowed, (
        f"{table}: new: {new}: name or place them otherwise; no longer there: {gone}: "
        "python -m conformance.house --to-do > tests/repo/names_to_do.py"
    )


def test_the_command_counts(tmp_path: Path) -> None:
    package = tmp_path / "dynaxla"
    sources = {
        "__init__": "",
        "high/__init__": "",
        "high/main": "from dynaxla.high.crumb import kept\nfrom dynaxla.low import base\nclass CompiledPart:\n    x: int\n",
        "high/crumb": "from dynaxla.low.base import Twice\ndef kept(): ...\ndef keep(): ...\n",
        "low/__init__": "",
        "low/base": "class Twice: ...\n",
        "low/other": "class Twice: ...\nPASS = 1\n",
    }
    for name, source in sources.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (tmp_path / "pyproject.toml").write_text('[[tool.importlinter.contracts]]\nlayers = ["high", "low"]\n')
    made = House(tmp_path)
    assert measures.crumbs(made) == ["high.crumb"]
    assert measures.opaque_functions(made) == {"high.crumb": ["kept"]}
    assert measures.repeated_classes(made) == {"Twice": ["low.base", "low.other"]}
    assert (longest_chain(made.room_imports), longest_chain(made.imports)) == (2, 3)
    assert measures.fields_of(made, "CompiledPart") == 1
    assert "| bands of the import contract | 2 |" in write_table({"made": made})


def test_circles_are_one_floor_and_are_found() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert longest_chain(imports) == 3
    assert circles(imports) == [["b", "c"]]


@pytest.mark.parametrize("name", ["made", "kept_as", "of_part", "drawing", "around", "told_by"])
def test_names_without_a_verb(name: str) -> None:
    assert is_opaque(name)


@pytest.mark.parametrize("name", ["make", "feed", "padding", "padded_shape", "find_program", "to_dict", "offer"])
def test_names_with_one(name: str) -> None:
    assert not is_opaque(name)


def test_the_documentation_has_the_table(house: House) -> None:
    """Only its rows: the numbers are those of the day it was written."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("<!-- house -->\n")[2].partition("<!-- end of house -->")[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert rows == list(measures.MEASURES)


def test_the_glossary_is_short_and_has_homes() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = [
        line.split("|") for line in page.partition("| word | meaning | home |")[2].partition("\n\n")[0].splitlines()
    ]
    words = [row for row in rows if len(row) == 5 and not row[1].startswith("---")]
    assert 0 < len(words) <= 40
    homes = [row[3].strip().strip("`") for row in words]
    assert [home for home in homes if not (ROOT / "dynaxla" / home).exists()] == []
