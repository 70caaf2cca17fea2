"""`python -m dynaxla cache info|list|verify|clear`: what lies in the cache folder."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from dynaxla.cache.directory import Directory, EntryFile
from dynaxla.cache.entry import NAME, DamagedEntry, Description, read_description, read_entry
from dynaxla.cache.store import MAX_BYTES
from dynaxla.isolation.disk import cache_folders

_SAYS = {
    "info": "where the cache is, who is kept out, and how much there is of each kind",
    "list": "every entry, the last used first",
    "verify": "read every entry and check it; exit status 1 if one is damaged",
    "clear": "remove every entry",
}


def add_cache_command(commands: Any) -> None:
    """Adds the command `cache` to the subparsers of the package's own; its `run` takes what is parsed."""
    parser = commands.add_parser("cache", help="what is kept on disk")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, says in _SAYS.items():
        action = actions.add_parser(name, help=says, description=says)
        action.add_argument(
            "--dir", type=Path, help="the cache folder; default: the first that DYNAXLA_CACHE_DIR names"
        )
        if name in ("info", "list"):
            action.add_argument("--json", action="store_true", help="print JSON")
        action.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    """The exit status of `python -m dynaxla cache ...`."""
    directory = Directory(given.dir or cache_folders().own)
    runners: Mapping[str, Callable[[Directory, argparse.Namespace], int]] = {
        "info": _info,
        "list": _list,
        "verify": _verify,
        "clear": _clear,
    }
    return runners[given.action](directory, given)


def _info(directory: Directory, given: argparse.Namespace) -> int:
    found = list(directory.list_entries())
    counts, sizes = Counter(map(_kind, found)), Counter[str]()
    for each in found:
        sizes[_kind(each)] += each.size
    document: dict[str, Any] = {
        "folder": str(directory.entries),
        "not_used": _not_used(directory),
        "read_only": [str(folder) for folder in cache_folders().behind],
        "entries": len(found),
        "bytes": sizes.total(),
        "default_max_bytes": MAX_BYTES,
        "kinds": {kind: {"entries": counts[kind], "bytes": sizes[kind]} for kind in sorted(counts)},
        "first_used": _time(min((each.used_ns for each in found), default=None)),
        "last_used": _time(max((each.used_ns for each in found), default=None)),
    }
    if given.json:
        print(json.dumps(document, indent=2))
        return 0
    kinds = [(kind, str(counts[kind]), f"{sizes[kind] / 1e6:.1f}") for kind in sorted(counts)]
    print(f"{document['folder']}: {document['not_used'] or 'used'}")
    for folder in cache_folders().behind:
        print(f"read only: {folder}")
    print(f"{len(found)} entries, {sizes.total() / 1e6:.1f} MB of at most {MAX_BYTES / 1e6:.0f}")
    _print_table(("kind", "entries", "MB"), kinds)
    return 0


def _list(directory: Directory, given: argparse.Namespace) -> int:
    entries = sorted(directory.list_entries(), key=lambda found: found.used_ns, reverse=True)
    documents = [_document(each) for each in entries]
    if given.json:
        print(json.dumps(documents, indent=2))
        return 0
    rows = [
        (each["name"][:12], each["kind"], f"{each['bytes'] / 1e3:.1f}", each["used"], _about(each))
        for each in documents
    ]
    _print_table(("key", "kind", "kB", "used", "about"), rows)
    return 0


def _verify(directory: Directory, given: argparse.Namespace) -> int:
    damaged = checked = 0
    for each in directory.list_entries():
        checked += 1
        try:
            description, _ = read_entry(each.path, max(MAX_BYTES, each.size))
            if f"{description.digest}.{description.kind}" != each.path.name:
                raise DamagedEntry("it is another entry's")
        except FileNotFoundError:
            continue  # removed by another process
        except (DamagedEntry, OSError) as error:
            damaged += 1
            print(f"{each.path}: {error}")
    print(f"{checked} entries, {damaged} damaged" + ("; each is removed when it is asked for" if damaged else ""))
    return 1 if damaged else 0


def _clear(directory: Directory, given: argparse.Namespace) -> int:
    removed = freed = 0
    for each in directory.list_entries():
        if directory.remove(each.path):
            removed += 1
            freed += each.size
    freed += directory.remove_abandoned(however_young=True)
    directory.journal.forget()
    left = sum(1 for _ in directory.list_entries())
    print(
        f"removed {removed} entries, {freed / 1e6:.1f} MB, of {directory.entries}"
        + (f"; {left} are left" if left else "")
    )
    return 1 if left else 0


def _document(found: EntryFile) -> dict[str, Any]:
    """What is known of an entry, unchecked."""
    try:
        description = read_description(found.path, max(MAX_BYTES, found.size))
        damage = None
    except (DamagedEntry, OSError) as error:
        description, damage = Description(_kind(found), ""), str(error)
    return {
        "name": found.path.name,
        "bytes": found.size,
        "used": _time(found.used_ns),
        "damage": damage,
        **asdict(description),
    }


def _about(document: Mapping[str, Any]) -> str:
    if document["damage"]:
        return f"damaged: {document['damage']}"
    return ", ".join(f"{name} {value}" for name, value in document["about"].items())


def _not_used(directory: Directory) -> str | None:
    try:
        return directory.not_used()
    except FileNotFoundError:
        return "not made yet"


def _kind(found: EntryFile) -> str:
    match = NAME.fullmatch(found.path.name)
    return match["kind"] if match else ""


def _time(stamp_ns: int | None) -> str | None:
    if stamp_ns is None:
        return None
    try:
        return datetime.fromtimestamp(stamp_ns / 1e9).isoformat(" ", "seconds")
    except (ValueError, OverflowError, OSError):
        return f"{stamp_ns} ns"


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*headings)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
