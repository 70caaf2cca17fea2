"""What running a program without computing relies on."""

from __future__ import annotations

import pytest
import torch

from dynaxla.torch_api import frames, pytree, uncomputed
from tests.torch_api.boundary import boundary


@boundary("uncomputed.UncomputedTensors", "uncomputed.KNOWN_ELEMENTS")
def test_tensors_are_taken_and_small_ones_known_until_written() -> None:
    tensors = uncomputed.UncomputedTensors(torch.device("cpu"))
    small, large = torch.arange(3.0), torch.zeros(uncomputed.KNOWN_ELEMENTS + 1)
    layer = torch.nn.Linear(2, 3, device="meta")
    with tensors.mode:
        assert tensors.take(small) is tensors.take(small)
        assert (tensors.take(small)[1:] * 2).tolist() == [2.0, 4.0]
        with pytest.raises(RuntimeError):
            tensors.take(large)[0].item()
        small.add_(large[:3])  # both are real, and nothing is written
        for written in (small, tensors.take(small)):
            with pytest.raises(RuntimeError):
                written[0].item()
        weight = tensors.take(layer.weight)
        assert isinstance(weight, torch.nn.Parameter)
        assert (weight.device.type, weight.shape) == ("cpu", (3, 2))
        copied = tensors.copy({"pair": [small, 1]})
        assert copied["pair"][0] is tensors.take(small)
    assert small.tolist() == [0.0, 1.0, 2.0]


@boundary("uncomputed.hold_uncomputed")
def test_a_module_holds_what_stands_for_its_tensors() -> None:
    tensors = uncomputed.UncomputedTensors(torch.device("cpu"))
    model = torch.nn.LSTM(2, 3)
    before = dict(vars(model)), dict(model.named_parameters())
    with uncomputed.hold_uncomputed(tensors, model):
        assert all(held is tensors.take(before[1][name]) for name, held in model.named_parameters())
        model.extra = 1
    assert dict(vars(model)) == before[0]
    assert all(held is before[1][name] for name, held in model.named_parameters())


@torch.library.custom_op("dynaxla_tests::silent", mutates_args=())
def silent(x: torch.Tensor) -> torch.Tensor:
    raise AssertionError("it is not called")


@boundary("uncomputed.find_asked_value", "uncomputed.find_missing_kernel", "frames.raising_line", "pytree.tree_map")
def test_errors_say_what_is_missing_and_where() -> None:
    tensors = uncomputed.UncomputedTensors(torch.device("cpu"))
    large = torch.zeros(uncomputed.KNOWN_ELEMENTS + 1)
    asked = {
        "item": lambda x: x.sum().item(),
        "nonzero": lambda x: x.nonzero(),
        "numpy": lambda x: x.numpy(),
        "data_ptr": lambda x: x.data_ptr(),
        "format": lambda x: f"{x.sum():.2f}",
    }

    def told(call: object) -> str | None:
        with tensors.mode, pytest.raises((RuntimeError, TypeError)) as caught:
            call(tensors.take(large))  # type: ignore[operator]
        line = frames.raising_line(caught.tb)
        assert line is not None
        assert line.startswith(f"{__file__}:")
        return uncomputed.find_asked_value(caught.value)

    assert pytree.tree_map(told, asked) == {
        "item": "aten._local_scalar_dense.default",
        "nonzero": "aten.nonzero.default",
        **dict.fromkeys(("numpy", "data_ptr", "format"), "a conversion"),
    }
    with tensors.mode, pytest.raises(RuntimeError) as caught:
        silent(tensors.take(large))
    assert uncomputed.find_missing_kernel(caught.value) == "dynaxla_tests::silent"
    assert uncomputed.find_asked_value(ValueError("another")) is None
    assert uncomputed.find_missing_kernel(ValueError("another")) is None
