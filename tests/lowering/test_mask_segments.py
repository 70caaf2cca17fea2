"""Masks of attention that are made of segments are told so, and the numbers stay; all others are left as they are."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from dynaxla.custom_ops import internal
from dynaxla.lowering import mask_segments
from dynaxla.passes.saved_activations import partition_saving_padded
from dynaxla.torch_api.aot import aot_autograd
from tests.tolerances import assert_close

ROWS, COLUMNS = 6, 6
TOLD = (internal.ATTENTION_OF_SEGMENTS, internal.ATTENTION_OF_SEGMENTS_BACKWARD)
Mask = Callable[[Tensor, Tensor], Tensor]
"""Of what is given for each key [b, k], bools and integers."""


@pytest.fixture(autouse=True)
def takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_segments, "takes", lambda *of_call: True)


def rows() -> Tensor:
    return torch.arange(ROWS)[:, None]


def columns() -> Tensor:
    return torch.arange(COLUMNS)[None]


def documents(ends: Tensor) -> Tensor:
    return ends.cumsum(-1)


# The mask, whether it is causal, how many conditions on keys, and whether queries and keys have ids.
MADE_OF_SEGMENTS: dict[str, tuple[Mask, bool, int, bool]] = {
    "causal": (lambda keep, n: columns() <= rows(), True, 0, False),
    "causal, from the query": (lambda keep, n: rows() >= columns(), True, 0, False),
    "causal, strictly less": (lambda keep, n: columns() < rows() + 1, True, 0, False),
    "causal, strictly more": (lambda keep, n: rows() + 3 > columns() + 2, True, 0, False),
    "causal, a triangle": (lambda keep, n: torch.ones(ROWS, COLUMNS, dtype=torch.bool).tril(), True, 0, False),
    "padding": (lambda keep, n: keep[:, None, None], False, 1, False),
    "padding, computed": (lambda keep, n: (n > 1)[:, None, None], False, 1, False),
    "causal and padding": (lambda keep, n: (columns() <= rows()) & keep[:, None, None], True, 1, False),
    "two conditions": (lambda keep, n: torch.logical_and(keep[:, None, None], (n > 0)[:, None, None]), False, 2, False),
    "everything": (lambda keep, n: torch.ones(ROWS, COLUMNS, dtype=torch.bool), False, 0, False),
    "documents": (
        lambda keep, n: documents(keep)[:, None, :, None] == documents(keep)[:, None, None],
        False,
        0,
        True,
    ),
    "documents, causal, padding": (
        lambda keep, n: (
            (documents(keep)[:, None, :, None] == documents(keep)[:, None, None])
            & (columns() <= rows())
            & (n > 0)[:, None, None]
        ),
        True,
        1,
        True,
    ),
    "one document": (
        lambda keep, n: (rows() * 0 == columns() * 0) & keep[:, None, None],
        False,
        1,
        False,
    ),
    "spread": (lambda keep, n: keep[:, None, None].expand(2, 1, ROWS, COLUMNS).clone(), False, 1, False),
}

OTHERS: dict[str, Mask] = {
    "bools as numbers, which are added": (lambda keep, n: (columns() <= rows()).float()),
    "integers as bools": (lambda keep, n: torch.logical_and(n[:, None, None], keep[:, None, None])),
    "one further": (lambda keep, n: columns() <= rows() + 1),
    "one less": (lambda keep, n: columns() < rows()),
    "backwards": (lambda keep, n: columns() >= rows()),
    "a window": (lambda keep, n: (columns() <= rows()) & (columns() > rows() - 3)),
    "positions that are given": (lambda keep, n: n[:, None, None] <= rows()),
    "positions that skip": (lambda keep, n: columns() * 2 <= rows()),
    "either": (lambda keep, n: (columns() <= rows()) | keep[:, None, None]),
    "queries": (lambda keep, n: keep[:, None, :, None].expand(2, 1, ROWS, COLUMNS)),
    "by head": (lambda keep, n: keep[:, None, None] & (torch.arange(4)[:, None, None] > columns())),
    "large ids": (lambda keep, n: n[:, None, :, None] == n[:, None, None]),
    "two kinds of ids": (
        lambda keep, n: (
            (documents(keep)[:, None, :, None] == documents(keep)[:, None, None])
            & (documents(~keep)[:, None, :, None] == documents(~keep)[:, None, None])
        )
    ),
}


def attend(mask: Mask) -> Callable[..., Tensor]:
    def run(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, n: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask(keep, n))

    return run


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, ROWS, 8) for _ in range(3))
    keep = torch.tensor([[True, True, False, True, False, True], [True, False, True, True, True, True]])
    return query, key, value, keep, torch.randint(0, 4, (2, COLUMNS))


def trace(run: Callable[..., Tensor], given: tuple[Tensor, ...]) -> GraphModule:
    return make_fx(run, tracing_mode="fake")(*given)


def told(module: GraphModule) -> list[Any]:
    return [node for node in module.graph.nodes if node.target in TOLD]


@pytest.mark.parametrize("name", MADE_OF_SEGMENTS)
def test_masks_of_segments(name: str) -> None:
    mask, is_causal, kept, has_ids = MADE_OF_SEGMENTS[name]
    module = trace(attend(mask), inputs())
    mask_segments.tell_segments(module.graph)
    module.recompile()
    (node,) = told(module)
    assert (node.args[5], len(node.args[3]), bool(node.args[4])) == (is_causal, kept, has_ids)
    for _ in range(3):
        given = (*inputs()[:3], torch.rand(2, COLUMNS) < 0.7, torch.randint(0, 4, (2, COLUMNS)))
        assert_close(module(*given), attend(mask)(*given))


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks(name: str) -> None:
    module = trace(attend(OTHERS[name]), inputs())
    mask_segments.tell_segments(module.graph)
    assert not told(module)


@pytest.mark.parametrize("least", [-math.inf, torch.finfo(torch.float32).min, -1e9])
def test_numbers_that_hide_a_key(least: float) -> None:
    """Minus infinity alone hides a key from queries that attend to no other."""
    module = trace(
        attend(lambda keep, n: torch.where((columns() <= rows()) & keep[:, None, None], 0.0, least)), inputs()
    )
    mask_segments.tell_segments(module.graph)
    assert bool(told(module)) == (least == -math.inf)


def test_biases_stay() -> None:
    module = trace(attend(lambda keep, n: -(rows() - columns()).abs().float()), inputs())
    mask_segments.tell_segments(module.graph)
    assert not told(module)


def test_draws_are_no_constants() -> None:
    module = trace(attend(lambda keep, n: (torch.rand(COLUMNS) < 2.0)[None]), inputs())
    mask_segments.tell_segments(module.graph)
    (node,) = told(module)
    assert len(node.args[3]) == 1


# Models, with gradients: the backward makes its masks again.


def compiled(model: nn.Module, found: list[Any]) -> Any:
    def rewrite(module: GraphModule, _: Any) -> Any:
        mask_segments.tell_segments(module.graph)
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default  # results are row-major, as those of programs
        module.recompile()
        found.extend(told(module))
        return make_boxed_func(module.forward)

    def backend(module: GraphModule, given: Any) -> Any:
        partition = partial(partition_saving_padded, remakes_masks=True)
        return aot_autograd(fw_compiler=rewrite, bw_compiler=rewrite, partition_fn=partition)(module, given)

    return torch.compile(model, backend=backend, dynamic=False)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=2, use_cache=False, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=50, bos_token_id=1, eos_token_id=1, use_cache=False)
    return GPT2LMHeadModel(config)


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    return BertModel(BertConfig(vocab_size=50, **sizes))


def test_a_mask_that_is_drawn_is_kept_for_the_backward() -> None:
    """One that were made again would be another one."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.randint(0, 2, (ROWS, COLUMNS)) > 0
        return F.scaled_dot_product_attention(query, key, value, mask)

    given, found = [each.requires_grad_() for each in inputs()[:3]], list[Any]()
    run_compiled = compiled(run, found)  # type: ignore[arg-type]
    for function in (run_compiled, run):
        torch.manual_seed(1)
        function(*given).square().sum().backward()
    doubled = [each.grad for each in given]
    for each in given:
        each.grad = None
    torch.manual_seed(1)
    run(*given).square().sum().backward()
    for both, each in zip(doubled, given, strict=True):
        assert_close(both, 2 * each.grad)


PADDING = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])


@pytest.mark.parametrize(
    ("make", "given", "is_causal"),
    [
        (llama, {}, True),
        (llama, {"attention_mask": PADDING}, True),
        (gpt2, {"attention_mask": PADDING}, True),
        (bert, {"attention_mask": PADDING}, False),
    ],
)
def test_masks_of_models(make: Callable[[], nn.Module], given: dict[str, Tensor], is_causal: bool) -> None:
    torch.manual_seed(0)
    model = make().eval()
    found: list[Any] = []
    run = compiled(copy.deepcopy(model), found)
    words = torch.randint(0, 50, (2, 12))
    got, expected = run(input_ids=words, **given)[0], model(input_ids=words, **given)[0]
    assert_close(got, expected)
    weights = torch.randn(got.shape)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    pairs = zip(run.parameters(), model.parameters(), strict=True)
    grads = [(ours.grad.flatten(), theirs.grad.flatten()) for ours, theirs in pairs if theirs.grad is not None]
    assert_close(*map(torch.cat, zip(*grads, strict=True)))  # together: that of a key's bias is noise about zero
    assert [node.target for node in found].count(TOLD[0]) == 2  # layers
    assert [node.target for node in found].count(TOLD[1]) == 2
    assert {node.args[5 if node.target is TOLD[0] else 8] for node in found} == {is_causal}


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_a_logsumexp_that_nothing_reads_is_not_saved(is_masked: bool, trains: bool) -> None:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    given = [torch.randn(2, 3, ROWS, 8) for _ in range(3)]

    def run(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        added = torch.where(columns() <= rows(), 0.0, -math.inf) if is_masked else None
        return attend(query, key, value, attn_mask=added)[: 1 + trains]  # type: ignore[no-any-return]

    made = make_fx(run, tracing_mode="fake")(*given)
    mask_segments.tell_segments(made.graph)
    made.recompile()
    told = made.graph.find_nodes(op="call_function", target=internal.ATTENTION_OF_SEGMENTS)
    assert [node.args[-1] for node in told] == ([] if trains and not is_masked else [trains])
    for found, expected in zip(made(*given), run(*given), strict=True):
        assert_close(found, expected)
