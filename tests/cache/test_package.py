"""Packages: written whole or not at all, read as a cache that is only read, and never believed where they were changed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dynaxla.cache.entry import DamagedEntry
from dynaxla.cache.key import Key
from dynaxla.cache.package import MANIFEST, PackageWriter, read_package
from dynaxla.cache.store import Store
from dynaxla.errors import OptionError

KIND = "executable"
KEYS = [Key.of(number=number) for number in range(3)]


def write(folder: Path) -> list[str]:
    with PackageWriter(folder) as writer:
        programs = []
        for number, key in enumerate(KEYS):
            written = writer.add(KIND, key, bytes([number]) * 1000, {"number": number})
            programs.append({"file": written.file, "sha256": written.sha256, "bytes": written.bytes})
        writer.finish({"programs": programs})
    return [str(program["file"]) for program in programs]


def test_a_package_is_read_behind_a_cache(tmp_path: Path) -> None:
    files = write(tmp_path / "package")
    assert sorted(os.listdir(tmp_path)) == ["package"], "nothing is left beside it"
    manifest = read_package(tmp_path / "package")
    assert manifest["format"] == 2
    for program in manifest["programs"]:
        assert (tmp_path / "package" / program["file"]).stat().st_size == program["bytes"]
    store = Store(tmp_path / "cache", behind=[tmp_path / "package"])
    assert [store.get(KIND, key) for key in KEYS] == [bytes([number]) * 1000 for number in range(3)]
    assert store.get(KIND, Key.of(number=4)) is None
    assert len(set(files)) == 3


def test_others_may_read_it_and_only_its_owner_may_write_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (file, *_) = write(tmp_path / "package")
    finally:
        os.umask(before)
    for path in (tmp_path / "package", tmp_path / "package" / "entries", tmp_path / "package" / file):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644)


def test_an_empty_folder_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    write(tmp_path / "package")
    read_package(tmp_path / "package")


@pytest.mark.parametrize(
    ("place", "told"),
    [("full", "is not empty"), ("file", "no folder"), ("link", "no folder"), ("a/b", "no folder .*a")],
)
def test_nothing_is_written_over(place: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OptionError, match=told):
        PackageWriter(tmp_path / place)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_package_that_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with PackageWriter(tmp_path / "package") as writer:
            writer.add(KIND, KEYS[0], b"x", {})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


def test_what_came_into_its_place_meanwhile_stays(tmp_path: Path) -> None:
    with PackageWriter(tmp_path / "package") as writer:
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "mine").write_text("mine")
        with pytest.raises(OptionError, match="is not empty"):
            writer.finish({"programs": []})
    assert [path.name for path in tmp_path.rglob("*")] == ["package", "mine"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "missing", "other format", "no manifest", "no json", "elsewhere"])
def test_a_changed_package_is_not_believed(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    (file, *_) = write(folder)
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    content = bytearray((folder / file).read_bytes())
    if damage == "flipped":
        content[-1] ^= 1
        (folder / file).write_bytes(content)
    elif damage == "cut":
        (folder / file).write_bytes(content[:-1])
    elif damage == "missing":
        (folder / file).unlink()
    elif damage == "no manifest":
        (folder / MANIFEST).unlink()
    elif damage == "no json":
        (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:-9])
    else:
        changed = {"format": 1} if damage == "other format" else {"programs": [{"file": "../x", "sha256": ""}]}
        (folder / MANIFEST).write_text(json.dumps({**manifest, **changed}))
    with pytest.raises(DamagedEntry):
        read_package(folder)
    if damage in ("flipped", "cut"):
        store = Store(tmp_path / "cache", behind=[folder])
        found = [store.get(KIND, key) for key in KEYS]
        assert found.count(None) == 1
        assert store.counters().corrupt == 1
