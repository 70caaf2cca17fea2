"""A directory that others can write to is not used, is said once, and what to do about it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dynaxla.cache import permissions
from dynaxla.cache.key import Key
from dynaxla.cache.store import Counters, Store


def _give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a file another user's; who cannot do that becomes another user."""
    if os.geteuid() == 0:
        os.chown(path, 4242, -1)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722, 0o1777], ids=oct)
def test_a_directory_that_others_can_write_to(
    store: Store, key: Key, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("executable", key, b"value")
    store._own.entries.chmod(mode)
    for _ in range(3):
        assert store.get("executable", key) is None
        assert not store.put("executable", key, b"other")
    assert (store.counters().refused, store.counters().misses, store.counters().hits) == (1, 3, 0)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage()
    assert f"{store._own.entries} is not used: other users can write to it (mode {mode:04o})" in said
    assert "`chmod go-w`" in said
    assert "DYNAXLA_CACHE_DIR" in said
    store._own.entries.chmod(0o700)
    assert store.get("executable", key) == b"value", "it is looked at again when it changed"


def test_a_directory_of_another_user(
    store: Store, key: Key, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("executable", key, b"value")
    _give_away(store._own.entries, monkeypatch)
    fresh = Store(store._own.root)
    assert fresh.get("executable", key) is None
    assert not fresh.put("executable", key, b"value")
    assert fresh.counters().refused == 1
    assert "it belongs to " in caplog.text


@pytest.mark.parametrize("mode", [0o777, 0o707], ids=oct)
def test_a_folder_above_that_others_can_write_to(
    tmp_path: Path, key: Key, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    above = tmp_path / "above"
    above.mkdir()
    above.chmod(mode)
    store = Store(above / "between" / "cache")
    assert not store.put("executable", key, b"value")
    assert store.counters().refused == 1
    assert f"is not used, because of {above}: other users can write to it" in caplog.text
    above.chmod(mode | stat.S_ISVTX)
    fresh = Store(above / "between" / "cache")
    assert fresh.put("executable", key, b"value"), "as in /tmp, nobody else can put another folder in its place"


def test_a_folder_above_of_another_user(
    tmp_path: Path, key: Key, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    above = tmp_path / "above"
    above.mkdir()
    _give_away(above, monkeypatch)
    assert not Store(above / "cache").put("executable", key, b"value")
    assert "is not used" in caplog.text


def test_a_link_leads_through_a_folder_that_others_can_write_to(tmp_path: Path, key: Key) -> None:
    """Both ways to it count: the one that is named and the one that it leads to."""
    for name, mode in (("open", 0o777), ("closed", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "closed" / "to open").symlink_to(tmp_path / "open" / "cache")
    (tmp_path / "open" / "to closed").symlink_to(tmp_path / "closed" / "cache")
    for folder in ("open/cache", "closed/cache", "closed/to open", "open/to closed"):
        (tmp_path / folder).mkdir(exist_ok=True)
        assert Store(tmp_path / folder).put("executable", key, b"value") == (folder == "closed/cache")


def test_a_private_group_is_its_user(tmp_path: Path, key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each user has a group of the same name, folders are made writable by their group."""
    above = tmp_path / "home"
    above.mkdir()
    above.chmod(0o775)
    monkeypatch.setattr(permissions, "_is_private", lambda group: group == above.stat().st_gid)
    assert Store(above / "cache").put("executable", key, b"value")
    monkeypatch.setattr(permissions, "_is_private", lambda group: False)
    assert not Store(above / "other").put("executable", key, b"value")
    above.chmod(0o777)
    monkeypatch.setattr(permissions, "_is_private", lambda group: True)
    assert not Store(above / "third").put("executable", key, b"value")


def test_directories_behind_may_be_roots_but_not_others(
    tmp_path: Path, key: Key, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = Store(tmp_path / "shared")
    shared.put("executable", key, b"value")
    store = Store(tmp_path / "own", behind=[tmp_path / "shared"])
    assert store.get("executable", key) == b"value"
    shared._own.entries.chmod(0o777)
    assert store.get("executable", key) is None
    assert store.counters() == Counters(hits=1, misses=1, refused=1, read_bytes=5)
    assert store.put("executable", key, b"own")
    shared._own.entries.chmod(0o755)
    _give_away(shared._own.entries, monkeypatch)
    assert Store(tmp_path / "none", behind=[tmp_path / "shared"]).get("executable", key) is None
    assert "belongs to" in caplog.text


def test_roots_directory_is_read_by_others_and_not_written_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = {0: "root", 1000: "me", 1001: "another"}
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    status = Path.stat

    def owned_by(uid: int) -> None:
        def stat_of(path: Path, **keywords: bool) -> os.stat_result:
            fields = list(status(path, **keywords))
            fields[stat.ST_UID] = uid if path == tmp_path else 0
            fields[stat.ST_MODE] = stat.S_IFDIR | 0o755
            return os.stat_result(fields)

        monkeypatch.setattr(Path, "stat", stat_of)

    used = {}
    for uid, name in owners.items():
        owned_by(uid)
        used[name] = [
            permissions.find_distrust_of(tmp_path, read_only=read_only) is None for read_only in (False, True)
        ]
    assert used == {"root": [False, True], "me": [True, True], "another": [False, False]}
