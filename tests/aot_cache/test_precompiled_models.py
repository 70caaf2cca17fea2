"""Dynamo keeps its captures of functions whose code is a wrapper's, as transformers' models are; and serves no other value."""

from __future__ import annotations

from pathlib import Path

from tests.aot_cache.precompiled_models import FUNCTIONS
from tests.aot_cache.test_dynamo_precompile import process

MODELS = ("BertModel", "GPT2Model", "ResNetForImageClassification")


def test_wrapped_models_and_functions(tmp_path: Path) -> None:
    """A second process captures and compiles nothing; where something changed that guards were on, it captures that again."""
    saved, module = tmp_path / "artifacts", "tests.aot_cache.precompiled_models"
    once = dict.fromkeys((*FUNCTIONS, *MODELS), 1)
    assert process("save", tmp_path / "first", saved, module) == {**once, "compiles": 9}
    found = process("load", tmp_path / "second", saved, module)
    assert found == {**dict.fromkeys(once, 0), "compiles": 0}
    found = process("change", tmp_path / "third", saved, module)
    unread = {"ResNetForImageClassification": 0}  # it has no attention that could be another
    assert found == {**once, **unread, "compiles": 8}
