"""Measures the package's modules, functions, names and imports from its source alone, so that it can read other checkouts too.

python -m conformance.house [ROOT ...]            a table with one column per checkout
python -m conformance.house --write OLD_ROOT      writes the table, OLD_ROOT before this one, into docs/architecture.md
python -m conformance.house --to-do               prints tests/repo/names_to_do.py anew
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES_OF_A_CRUMB = 79
RECORDS = ("PASS", "OPS", "FAMILY")
"""A module that defines one of these is an entry of a list, as a pass, a family of ops or of targets is: it is no crumb."""

PREPOSITIONS = frozenset(
    "about above after along around at before behind below beside between beyond by for in into of off on onto out over since "
    "through till to toward under until up upon with within without".split()
)
IRREGULAR = frozenset(
    "begun bound brought built chosen done drawn fed felt forgotten found given gone grown held hidden kept known laid left "
    "lain lent lost made meant met paid put said seen sent shown spent spoken stood sworn taken taught thought told thrown "
    "understood woven written".split()
)
NOUNS_AND_VERBS = frozenset(
    "bring bucketing embed embedding exceed feed need padding pooling proceed ring seed setting sharding speed string succeed "
    "timing warning".split()
)
"""Words that end as participles do and are none."""

STANDARD = frozenset({"after_fork", "of", "out_of_memory", "put"})
"""Public functions whose names begin as prepositions or participles do and are standard terms: `put` is a verb."""

STANDARD_PREFIXES = ("on", "to")
"""Names of handlers (`on_call`) and of conversions (`to_tensor`)."""

OLD_WORDS = frozenset(
    """
    stages reasons process building freezing made facts graphs order support parts cuts boundary regions wants jobs shipping
    recalling costs learning making places outlines cells traffic sizing sizings values numbers part call arguments ruling
    crowding growing joint marking planning boundaries backwards ceiling draws edges grids groups image_places matrices orders
    pieces products runs chains editing fast_paths listing margins moved_inputs rewrite saved shared_heads recipe drawn tag
    identity sources rehearsal sealing lying corners forms capturing computed sized patterns bucketed bucketed_calls varying
    fusing traces pending recent experts using loading copying bodies offering choice resizing narrow calls kept keys contexts
    surroundings trust bundle ahead compiled mappings padded spent breaks compare reporting choosing taps moments ranges
    findings registering
    collecting declaring warming writing collection trees checks scans awaiting stepping running waiting texts trial
    asking answering streams lingering canonicalize
    """.split()
)
"""Names that modules had, of which none says what is in the module."""


@dataclass(frozen=True)
class Module:
    """One source file of the package.

    Attributes:
        name: dotted, without the package's own.
    """

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def stem(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def folder(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def room(self) -> str:
        """The folder at the top of the package, or the module that stands there."""
        return self.name.partition(".")[0]


class House:
    """The package of one checkout.

    Args:
        root: the checkout.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        package = root / "dynaxla"
        paths = sorted(package.rglob("*.py"))
        self.modules = {name: Module(name, path) for path in paths if (name := _dotted(path.relative_to(package)))}

    @cached_property
    def imports(self) -> Mapping[str, set[str]]:
        """By module, the modules of the package that it imports, also inside of functions, and names lazily."""
        return {name: set(self._imports(module)) for name, module in self.modules.items()}

    def _imports(self, module: Module) -> Iterator[str]:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dynaxla":
                inner = (node.module or "").partition(".")[2]
                for alias in node.names:
                    found = f"{inner}.{alias.name}".lstrip(".")
                    yield from (name for name in (found if found in self.modules else inner,) if name in self.modules)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("dynaxla."):
                name = node.value.removeprefix("dynaxla.")
                if name in self.modules and name != module.name:
                    yield name

    @cached_property
    def room_imports(self) -> Mapping[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for name, targets in self.imports.items():
            found[self.modules[name].room] |= {self.modules[target].room for target in targets}
        return {room: targets - {room} for room, targets in found.items()}

    def classes(self) -> Iterator[tuple[Module, ast.ClassDef]]:
        for module in self.modules.values():
            yield from ((module, node) for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def longest_chain(imports: Mapping[str, Collection[str]]) -> int:
    """The number of floors: the members of the longest chain of imports, circles counted as one floor."""
    of = _circle_of(imports)
    floors: dict[int, int] = {}

    def climb(circle: int) -> int:
        if circle not in floors:
            floors[circle] = 0
            inner = {of[t] for name, number in of.items() if number == circle for t in imports.get(name, ()) if t in of}
            floors[circle] = 1 + max((climb(other) for other in inner - {circle}), default=0)
        return floors[circle]

    return max(map(climb, set(of.values())), default=0)


def circles(imports: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Names that import each other, directly or through others."""
    members: dict[int, list[str]] = defaultdict(list)
    for name, number in _circle_of(imports).items():
        members[number].append(name)
    return sorted(sorted(names) for names in members.values() if len(names) > 1)


def _circle_of(imports: Mapping[str, Collection[str]]) -> dict[str, int]:
    """By name, a number that is the same for names which reach each other."""
    reach = {name: _reached(imports, name) for name in imports}
    of: dict[str, int] = {}
    for number, name in enumerate(imports):
        for other in (name, *reach[name]):
            if other in imports and (other == name or name in reach[other]):
                of.setdefault(other, number)
    return of


def _reached(imports: Mapping[str, Collection[str]], name: str) -> set[str]:
    found: set[str] = set()
    stack = list(imports[name])
    while stack:
        other = stack.pop()
        if other not in found:
            found.add(other)
            stack.extend(imports.get(other, ()))
    return found


def layers(house: House) -> int:
    """Bands of the import contract."""
    tool = tomllib.loads((house.root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return max(len(contract.get("layers", ())) for contract in tool["contracts"])


def fields_of(house: House, name: str) -> int:
    """Attributes that a class has: its annotated fields, and those that `__init__` sets."""
    for _, node in house.classes():
        if node.name == name:
            fields = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
            fields |= {
                x.attr
                for x in ast.walk(node)
                if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store) and _is_self(x.value)
            }
            return len(fields)
    return 0


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def functions(module: Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]]:
    """Functions of a module and methods of its classes, each method with its class; not functions inside of functions."""
    for node in module.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node, None
        elif isinstance(node, ast.ClassDef):
            yield from ((x, node) for x in node.body if isinstance(x, (ast.FunctionDef, ast.AsyncFunctionDef)))


def opaque_functions(house: House) -> dict[str, list[str]]:
    """By module, public functions whose name is a bare participle or begins with a preposition. Properties, class methods, and
    the ops and pad rules, which are named as ATen names them, are left out."""
    found: dict[str, list[str]] = {}
    for module in house.modules.values():
        if module.folder in ("ops", "bucketing.pad_rules", "bucketing.rules"):
            continue
        names = [
            node.name
            for node, _ in functions(module)
            if not node.name.startswith("_") and not _is_named_as_value(node) and is_opaque(node.name)
        ]
        if names:
            found[module.name] = sorted(set(names))
    return found


def is_opaque(name: str) -> bool:
    """Whether a function's name says no action: a participle, alone or with prepositions behind, or a preposition first."""
    first, *rest = name.split("_")
    if name in STANDARD or first in NOUNS_AND_VERBS or (first in STANDARD_PREFIXES and rest):
        return False
    if first in PREPOSITIONS:
        return True
    is_participle = first in IRREGULAR or re.fullmatch(r"[a-z]{2,}(ed|ing)", first) is not None
    return is_participle and (not rest or rest[0] in PREPOSITIONS | {"as"})


def _is_named_as_value(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = {ast.unparse(x).partition("(")[0].rpartition(".")[2] for x in node.decorator_list}
    return bool(decorators & {"property", "cached_property", "classmethod", "setter", "overload"})


def repeated_classes(house: House) -> dict[str, list[str]]:
    """Class names that several modules define, without the private ones."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, node in house.classes():
        if not node.name.startswith("_"):
            found[node.name].add(module.name)
    return {name: sorted(modules) for name, modules in sorted(found.items()) if len(modules) > 1}


def repeated_modules(house: House) -> dict[str, list[str]]:
    """Module names that stand in several folders. An op family, its pad rule and its decompositions share one."""
    found: dict[str, list[str]] = defaultdict(list)
    for module in house.modules.values():
        if "__" not in module.stem and module.path.name != "__init__.py":
            found[module.stem].append(module.name)
    families = ("ops", "bucketing.pad_rules", "decompositions", "custom_ops")
    return {
        stem: sorted(names)
        for stem, names in sorted(found.items())
        if len([name for name in names if house.modules[name].folder not in families]) + (len(names) > 1) > 1
        and not all(house.modules[name].folder in families for name in names)
    }


def old_words(house: House) -> list[str]:
    """Modules with a name of the old list."""
    return sorted(m.name for m in house.modules.values() if m.stem in OLD_WORDS and m.path.name != "__init__.py")


def crumbs(house: House) -> list[str]:
    """Modules under 80 lines with one importer, which stands in the same folder."""
    importers: dict[str, set[str]] = defaultdict(set)
    for name, targets in house.imports.items():
        for target in targets - {name}:
            importers[target].add(name)
    return sorted(
        name
        for name, module in house.modules.items()
        if module.lines <= MOST_LINES_OF_A_CRUMB
        and module.path.name not in ("__init__.py", "__main__.py")
        and not _has_record(module)
        and len(importers[name]) == 1
        and house.modules[next(iter(importers[name]))].folder == module.folder
    )


def _has_record(module: Module) -> bool:
    names = {t.id for x in module.tree.body if isinstance(x, ast.Assign) for t in x.targets if isinstance(t, ast.Name)}
    return bool(names & set(RECORDS))


def longest_functions(house: House, count: int = 5) -> list[tuple[int, str]]:
    """Lines and names of the longest functions."""
    found = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{module.name}.{node.name}")
        for module in house.modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return sorted(found, reverse=True)[:count]


def _count(house: House, pattern: str) -> int:
    """Modules whose text has the pattern."""
    return sum(bool(re.search(pattern, module.text)) for module in house.modules.values())


def _keys_built(house: House) -> int:
    pattern = re.compile(r"\b(?:Store)?Key\.of\(|\bKeyBuilder\(")
    return sum(len(pattern.findall(module.text)) for module in house.modules.values())


MEASURES: Mapping[str, Callable[[House], object]] = {
    "modules": lambda house: len(house.modules),
    "lines": lambda house: sum(module.lines for module in house.modules.values()),
    "floors of folders (longest chain of imports)": lambda house: longest_chain(house.room_imports),
    "floors of modules": lambda house: longest_chain(house.imports),
    "circles of folders": lambda house: len(circles(house.room_imports)),
    "bands of the import contract": layers,
    "fields of `CompiledPart`": lambda house: fields_of(house, "CompiledPart"),
    "bounded tables (modules that evict the least recently used)": lambda house: _count(
        house, r"popitem\(last=False\)|move_to_end\(|pop\(next\(iter\("
    ),
    "keys built (calls of `Key.of`)": _keys_built,
    "checksummed envelopes (modules that compare a digest)": lambda house: _count(
        house, r"sha256\(.*\)\.(hex)?digest\(\) !=|_checksum\(.*\) !="
    ),
    "public functions without a verb": lambda house: sum(map(len, opaque_functions(house).values())),
    "class names used twice": lambda house: len(repeated_classes(house)),
    "module names used twice": lambda house: len(repeated_modules(house)),
    "modules with a name of the old list": lambda house: len(old_words(house)),
    "one-importer crumbs": lambda house: len(crumbs(house)),
    "longest module, lines": lambda house: max(module.lines for module in house.modules.values()),
    "longest function, lines": lambda house: longest_functions(house, 1)[0][0],
    "median function, lines": lambda house: sorted(n for n, _ in longest_functions(house, 10**6))[_half(house)],
}


def _half(house: House) -> int:
    return len(longest_functions(house, 10**6)) // 2


def write_table(houses: Mapping[str, House]) -> str:
    """The measures of several checkouts, as a table of Markdown."""
    lines = [f"| | {' | '.join(houses)} |", "|---|" + "---|" * len(houses)]
    for name, measure in MEASURES.items():
        values = [measure(house) for house in houses.values()]
        lines.append(f"| {name} | {' | '.join(map(str, values))} |")
    return "\n".join(lines)


def write_to_do(house: House) -> str:
    """The source of tests/repo/names_to_do.py."""
    tables = {
        "FUNCTIONS": opaque_functions(house),
        "CLASSES": repeated_classes(house),
        "MODULES": repeated_modules(house),
        "OLD_WORDS": old_words(house),
        "CRUMBS": crumbs(house),
        "CIRCLES": circles(house.room_imports),
    }
    kinds = {dict: "dict[str, list[str]]", list: "list[str]"}
    lines = [
        '"""What the names\' test still allows. The tables may only shrink: python -m conformance.house --to-do"""',
        "",
    ]
    for name, table in tables.items():
        kind = "list[list[str]]" if name == "CIRCLES" else kinds[type(table)]
        rows = [f"    {key!r}: {value!r}," for key, value in table.items()] if isinstance(table, dict) else []
        rows = rows or [f"    {value!r}," for value in table]
        brackets = "{}" if isinstance(table, dict) else "[]"
        lines += [f"{name}: {kind} = {brackets[0]}", *rows, brackets[1], ""]
    return "\n".join(lines)


def _replace_table(page: Path, table: str) -> None:
    text = page.read_text(encoding="utf-8")
    begin, end = "<!-- house -->\n", "<!-- end of house -->\n"
    head, _, rest = text.partition(begin)
    page.write_text(head + begin + table + "\n" + end + rest.partition(end)[2], encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.house", description=__doc__)
    parser.add_argument("roots", type=Path, nargs="*", default=[ROOT])
    parser.add_argument("--write", action="store_true", help="put the table into docs/architecture.md")
    parser.add_argument("--to-do", action="store_true", help="print tests/repo/names_to_do.py")
    given = parser.parse_args(arguments)
    if given.to_do:
        print(write_to_do(House(ROOT)), end="")
    elif given.write:
        table = write_table({"before": House(given.roots[0]), "now": House(ROOT)})
        _replace_table(ROOT / "docs" / "architecture.md", table)
    else:
        print(write_table({root.resolve().name: House(root) for root in given.roots}))
        for root in given.roots:
            print(*(f"{lines:4} {name}" for lines, name in longest_functions(House(root))), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
