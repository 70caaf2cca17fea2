"""What the package relies on of torch's carrier of caches."""

from __future__ import annotations

import torch

from dynaxla.torch_api import artifacts
from tests.torch_api.boundary import boundary

KIND = "dynaxla_test"


@boundary("artifacts.carry", "artifacts.record")
def test_what_is_recorded_is_saved_and_given_back() -> None:
    taken: dict[str, bytes] = {}
    artifacts.carry(KIND, taken.__setitem__)
    artifacts.carry(KIND, lambda key, content: None)  # a second time: the first stays
    artifacts.record(KIND, "key", b"content")
    artifacts.record(KIND, "key", b"content")
    saved = torch.compiler.save_cache_artifacts()
    assert saved is not None
    content, info = saved
    assert info.artifacts[KIND] == ["key"]
    assert torch.compiler.load_cache_artifacts(content) is not None
    assert taken == {"key": b"content"}
