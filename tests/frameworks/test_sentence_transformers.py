"""sentence-transformers: the whole model compiled in place, and its encoder alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel

from dynaxla.observe.recorder import Recorder
from examples.embed_sentences import find_model
from tests.lists import quick
from tests.tolerances import assert_close

CONFIG = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
SENTENCES = ["In the beginning", "And the earth was without form, and void", "Let there be light: and there was light."]


def whole(model: SentenceTransformer) -> None:
    model.compile(backend="dynaxla")


def encoder(model: SentenceTransformer) -> None:
    """`forward`, which is what sentence-transformers calls."""
    model[0].model.forward = torch.compile(model[0].model.forward, backend="dynaxla")


@pytest.mark.parametrize("compile_it", quick([whole, encoder], whole))
def test_embeddings(compile_it: Callable[[SentenceTransformer], None], recorder: Recorder) -> None:
    """One sentence, then all: a program for each number of sentences and bucket of lengths, and none for seen ones."""
    torch.manual_seed(1)
    first = Transformer(str(find_model()))  # for its tokenizer; the encoder is a smaller one
    first.model = BertModel(CONFIG).eval()
    model = SentenceTransformer(modules=[first, Pooling(CONFIG.hidden_size)], device="cpu")
    calls = [SENTENCES[:1], SENTENCES, SENTENCES[1:]]
    wanted = [torch.as_tensor(model.encode(each)) for each in calls]
    compile_it(model)
    before = recorder.snapshot()
    for sentences, embeddings in zip(calls, wanted, strict=True):
        assert_close(torch.as_tensor(model.encode(sentences)), embeddings)
    after = recorder.snapshot()
    assert after.fallbacks == before.fallbacks
    assert 0 < after.compiles - before.compiles <= len(calls)
    with recorder.expect(compiles=0):
        for sentences in calls:
            model.encode(sentences)
