"""transformers: its trainer on a model that was compiled in place, and what it refuses. Generation:
tests/generation/test_generate.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification, CompileConfig, Trainer, TrainingArguments

import dynaxla
from dynaxla.observe.recorder import Recorder
from tests.generation.test_generate import _build, _generate, _prompt
from tests.tolerances import assert_close

CONFIG = BertConfig(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=24,
    vocab_size=40,
    max_position_embeddings=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def build() -> BertForSequenceClassification:
    torch.manual_seed(1)
    return BertForSequenceClassification(CONFIG)


def rows() -> list[dict[str, Any]]:
    torch.manual_seed(2)
    return [{"input_ids": torch.randint(5, 40, (5 + i % 4,)), "labels": i % 2} for i in range(12)]


def collate(batch: list[dict[str, Any]]) -> dict[str, Tensor]:
    ids = pad_sequence([row["input_ids"] for row in batch], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([r["labels"] for r in batch])}


def trainer(net: torch.nn.Module, folder: Path, **settings: Any) -> Trainer:
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        **settings,
    )
    data = rows()
    return Trainer(net, arguments, train_dataset=data, eval_dataset=data[:4], data_collator=collate)


@pytest.mark.long
def test_the_trainer_trains_and_saves_a_model_compiled_in_place(recorder: Recorder, tmp_path: Path) -> None:
    plain, net = build(), build()
    wanted = trainer(plain, tmp_path)
    wanted.train()
    net.compile(backend="dynaxla")
    ours = trainer(net, tmp_path)
    with recorder.expect(eager_ops=0):
        ours.train()
        loss = ours.evaluate()["eval_loss"]
    assert loss == pytest.approx(wanted.evaluate()["eval_loss"], rel=1e-4)
    assert_close(parameters_to_vector(net.parameters()), parameters_to_vector(plain.parameters()))
    ours.save_model(str(tmp_path))
    saved = BertForSequenceClassification.from_pretrained(tmp_path)
    for name, parameter in saved.state_dict().items():
        assert torch.equal(parameter, net.state_dict()[name])
    captured = recorder.snapshot().captured[-1]
    assert captured.function.startswith("BertForSequenceClassification.forward in ")


def test_accelerate_knows_a_closed_list_of_backends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'DYNAXLA' is not a valid DynamoBackend"):
        Accelerator(cpu=True, dynamo_backend="dynaxla")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "")  # the trainer writes its argument there, and leaves it
    with pytest.raises(ValueError, match="'DYNAXLA' is not a valid DynamoBackend"):
        trainer(build(), tmp_path, torch_compile=True, torch_compile_backend="dynaxla")


def test_accelerate_prepares_a_model_compiled_in_place(recorder: Recorder) -> None:
    plain, net = build(), build()
    net.compile(backend="dynaxla")
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net, optimizer = accelerator.prepare(net, optimizer)
    batch = collate(rows()[:4])
    with recorder.expect(compiles=2, eager_ops=0):
        loss = net(**batch).loss
        accelerator.backward(loss)
    wanted = plain(**batch).loss
    wanted.backward()
    assert_close(loss, wanted)
    gradients = [[p.grad for p in each.parameters() if p.grad is not None] for each in (net, plain)]
    assert len(gradients[0]) == len(gradients[1])
    assert_close(parameters_to_vector(gradients[0]), parameters_to_vector(gradients[1]))
    assert accelerator.unwrap_model(net, keep_torch_compile=False) is net


@pytest.mark.long
def test_a_compile_config_is_ignored_on_a_cpu(recorder: Recorder) -> None:
    """transformers compiles by itself on accelerators alone; what it then says is in docs/frameworks.md."""
    net, prompt = _build("llama"), _prompt(1)
    before = len(dynaxla.read_metrics().captured)
    _generate(net, prompt, cache_implementation="static", compile_config=CompileConfig(backend="dynaxla"))
    assert len(dynaxla.read_metrics().captured) == before
    expected = _generate(net, prompt, cache_implementation="static")
    net.forward = torch.compile(net.forward, backend="dynaxla")
    with recorder.expect(compiles=2):
        tokens = _generate(net, prompt, cache_implementation="static")
    assert torch.equal(tokens, expected)
