"""What code was compiled with and where is in the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynaxla.cache import environment_key
from dynaxla.cache.key import Key

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu MHz\t\t: 2600.1
flags\t\t: fpu avx2 avx512f
bugs\t\t: one

processor\t: 1
"""
ARM = "processor\t: 0\nBogoMIPS\t: 50\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"


def _host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> str:
    path = tmp_path / "cpuinfo"
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(environment_key, "_PROCESSORS", path)
    return Key.of(host=environment_key.host.__wrapped__()).digest


@pytest.mark.parametrize("text", [X86, ARM], ids=["x86", "arm"])
def test_processors_with_other_features_are_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    key = _host(tmp_path, monkeypatch, text)
    assert _host(tmp_path, monkeypatch, text.replace("fp asimd sve", "sve fp asimd").replace("2600.1", "1200.9")) == key
    others = [
        text.replace(" avx512f", "").replace(" sve", ""),
        text.replace("AMD", "X").replace("0xd40", "0xd41"),
        None,
    ]
    assert key not in [_host(tmp_path, monkeypatch, other) for other in others]


def test_this_host_says_what_it_has() -> None:
    assert {"system", "machine"} < set(environment_key.host())


def test_versions_are_those_of_all_that_compile() -> None:
    assert {"python", "torch", "jax", "jaxlib", "torch-mlir", "dynaxla"} == set(environment_key.versions())


def test_any_change_of_source_changes_the_digest(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    digests = []
    for name, text in (
        ("a.py", "1"),
        ("a.py", "2"),
        ("b.py", ""),
        ("inner/a.py", "12"),
        ("inner/a.py", "1"),
        ("b.py", "2"),
        ("inner/table.tsv", "1"),
        ("inner/table.tsv", "2"),
    ):
        (tmp_path / name).write_text(text)
        digests.append(environment_key.source_digest(tmp_path))
    (tmp_path / "notes.txt").write_text("not code")
    assert environment_key.source_digest(tmp_path) == digests[-1]
    assert len(set(digests)) == len(digests)
