"""`python -m dynaxla cache info|list|verify|clear`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dynaxla.__main__ import main
from dynaxla.cache.key import Key
from dynaxla.cache.store import Store

KEYS = [Key.of(number=number) for number in range(3)]


@pytest.fixture
def filled(store: Store) -> Path:
    """A cache folder of two executables and a lowered function, the last used first in KEYS."""
    store.put("lowered", KEYS[2], bytes(100), about={"op": "aten.add.Tensor"})
    for key in KEYS[1::-1]:
        store.put("executable", key, bytes(5000), about={"ops": 7, "compile_s": 0.5})
    return store._own.root


def _entry(root: Path, key: Key) -> Path:
    (path,) = (root / "entries").glob(f"{key.digest}.*")
    return path


def test_info(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info", "--dir", str(filled), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    sizes = [_entry(filled, key).stat().st_size for key in KEYS]
    assert told["folder"] == str(filled / "entries")
    assert (told["not_used"], told["entries"], told["bytes"]) == (None, 3, sum(sizes))
    assert told["kinds"] == {
        "executable": {"entries": 2, "bytes": sizes[0] + sizes[1]},
        "lowered": {"entries": 1, "bytes": sizes[2]},
    }
    assert told["first_used"] <= told["last_used"]
    assert main(["cache", "info", "--dir", str(filled)]) == 0
    printed = capsys.readouterr().out
    assert f"{filled / 'entries'}: used" in printed
    assert "3 entries" in printed


def test_info_says_why_a_directory_is_not_used(
    filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (filled / "entries").chmod(0o777)
    monkeypatch.setenv("DYNAXLA_CACHE_DIR", f"{filled}:/srv/shared")
    assert main(["cache", "info"]) == 0
    printed = capsys.readouterr().out
    assert "other users can write to it (mode 0777)" in printed
    assert "read only: /srv/shared" in printed


def test_list(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _entry(filled, KEYS[1]).write_bytes(b"damaged")
    assert main(["cache", "list", "--dir", str(filled), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["kind"] for each in listed] == ["executable", "executable", "lowered"]
    by_name = {each["name"]: each for each in listed}
    first = by_name[f"{KEYS[0].digest}.executable"]
    assert (first["about"], first["digest"], first["damage"]) == ({"ops": 7, "compile_s": 0.5}, KEYS[0].digest, None)
    assert first["parts"] == dict(KEYS[0].parts)
    assert by_name[f"{KEYS[1].digest}.executable"]["damage"]
    assert main(["cache", "list", "--dir", str(filled)]) == 0
    printed = capsys.readouterr().out
    for text in (KEYS[0].digest[:12], "aten.add.Tensor", "damaged", "ops 7, compile_s 0.5"):
        assert text in printed


def test_verify(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "verify", "--dir", str(filled)]) == 0
    assert "3 entries, 0 damaged" in capsys.readouterr().out
    content = bytearray(_entry(filled, KEYS[0]).read_bytes())
    content[-1] ^= 1
    _entry(filled, KEYS[0]).write_bytes(content)
    os.replace(_entry(filled, KEYS[1]), filled / "entries" / f"{'0' * 64}.executable")
    assert main(["cache", "verify", "--dir", str(filled)]) == 1
    printed = capsys.readouterr().out
    assert f"{KEYS[0].digest}.executable: its checksum" in printed
    assert f"{'0' * 64}.executable: it is another entry's" in printed
    assert "3 entries, 2 damaged" in printed


def test_clear(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (filled / "entries" / ".half.tmp").write_bytes(bytes(10))
    (filled / "entries" / "mine.txt").write_text("not the cache's")
    (filled / "failures-jaxlib-1.jsonl").write_text("")
    freed = sum(_entry(filled, key).stat().st_size for key in KEYS) + 10
    assert main(["cache", "clear", "--dir", str(filled)]) == 0
    assert f"removed 3 entries, {freed / 1e6:.1f} MB" in capsys.readouterr().out
    assert {path.name for path in (filled / "entries").iterdir()} - {"lock"} == {"mine.txt"}
    assert (filled / "failures-jaxlib-1.jsonl").exists()
    store = Store(filled)
    assert store.get("executable", KEYS[0]) is None
    assert store.put("executable", KEYS[0], b"again")


@pytest.mark.parametrize("action", ["info", "list", "verify", "clear"])
def test_there_is_no_cache_yet(tmp_path: Path, action: str) -> None:
    assert main(["cache", action, "--dir", str(tmp_path / "nowhere")]) == 0
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("arguments", [["cache"], ["cache", "empty"], ["cache", "clear", "--json"]], ids=str)
def test_bad_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: python -m dynaxla" in capsys.readouterr().err


def test_the_command_line_needs_no_torch(filled: Path) -> None:
    code = (
        "import sys; from dynaxla.__main__ import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    environment = {**os.environ, "DYNAXLA_CACHE_DIR": str(filled)}
    done = subprocess.run(
        [sys.executable, "-c", code, "cache", "verify"], capture_output=True, text=True, env=environment
    )
    assert (done.returncode, done.stdout) == (0, "3 entries, 0 damaged\n"), done.stderr
