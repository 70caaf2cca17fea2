"""Quantized and strided nested tensors of the device are refused in one sentence; nothing ends the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

D = "dynaxla"


def x(*sizes: int) -> torch.Tensor:
    return torch.ones(sizes, device=D)


CASES: dict[str, Callable[[], Any]] = {
    "quantized": lambda: torch.quantize_per_tensor(x(2), 0.1, 0, torch.quint8),
    "by channels": lambda: torch.quantize_per_channel(x(2, 2), x(2), x(2), 0, torch.quint8),
    "quantized, moved": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8).to(D),
    "quantized, empty": lambda: torch._empty_affine_quantized(
        (2,), scale=0.1, zero_point=0, dtype=torch.quint8, device=D
    ),
    "nested, moved": lambda: torch.nested.nested_tensor([torch.ones(2)]).to(D),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_it_is_said_what_to_do(name: str) -> None:
    with pytest.raises(
        NotImplementedError, match=r"tensors of dynaxla are strided or sparse; make and use .* on the CPU"
    ):
        CASES[name]()


NESTED = """
import sys
import torch
import dynaxla

D, needs = dynaxla.use("cpu"), sys.argv[1] == "True"


def x(*sizes):
    return torch.ones(sizes, device=D, requires_grad=needs)


cases = [
    lambda: torch.nested.nested_tensor([x(2, 3), x(1, 3)], requires_grad=needs),
    lambda: torch.nested.nested_tensor([torch.ones(2)], device=D, requires_grad=needs),
    lambda: torch.nested.nested_tensor([[1.0, 2.0], [3.0]], device=D, requires_grad=needs),
    lambda: torch.nested.as_nested_tensor([x(2, 3), x(1, 3)]),
    lambda: torch.nested.as_nested_tensor(x(2, 3)),
    lambda: torch.nested.narrow(x(2, 3, 4), 1, 0, 2),
    lambda: torch._nested_tensor_from_tensor_list([x(2, 3), x(1, 3)]),
    lambda: torch._nested_tensor_from_mask(x(2, 3, 4), torch.ones(2, 3, dtype=torch.bool, device=D)),
    lambda: torch._nested_from_padded(x(2, 3, 4), torch.tensor([[2, 3], [1, 3]])),
    lambda: torch.nested.nested_tensor([], device=D, requires_grad=needs) * 2,
    lambda: torch.empty_like(torch.nested.nested_tensor([torch.ones(2)]), device=D).requires_grad_(needs) * 2,
]
for number, case in enumerate(cases):
    try:
        print(number, case())
    except NotImplementedError as error:
        assert "on the CPU" in str(error), error
jagged = torch.nested.nested_tensor([x(2, 3), x(1, 3)], layout=torch.jagged, requires_grad=needs)
doubled = jagged * 2
if needs:
    doubled.values().sum().backward()
    assert jagged.grad.values().tolist() == [[2.0] * 3] * 3
print([part.tolist() for part in doubled.unbind()])
"""


@pytest.mark.parametrize("needs", [False, True])
def test_nested_tensors_do_not_end_the_process(needs: bool) -> None:
    command = [sys.executable, "-W", "ignore", "-c", NESTED, str(needs)]
    child = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert child.returncode == 0, child.stderr[-2000:]
    assert child.stdout == f"{[[[2.0] * 3] * 2, [[2.0] * 3]]}\n"


def test_nested_tensors_of_the_host_stay() -> None:
    made = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], requires_grad=True)
    (made * 2).to_padded_tensor(0.0).sum().backward()
    assert [part.tolist() for part in made.grad.unbind()] == [[2, 2], [2]]
