"""A package of compiled programs: made once, run where neither torch-mlir nor a compile is wanted.

    python examples/package_embeddings.py save embedder.dynaxla      # every length from 8 to 256, by powers of two
    python examples/package_embeddings.py run embedder.dynaxla       # in another process, with the weights of its own

The model has the shape of all-MiniLM-L6-v2, with random weights: a package holds programs, and the weights are the caller's.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import dynaxla


class Embedder(nn.Module):
    """A transformer encoder, its outputs averaged over each text and normalized.

    `forward` takes ids and a mask, int64 [batch, length], and gives float32 [batch, width].
    """

    def __init__(
        self, layers: int = 6, width: int = 384, heads: int = 12, words: int = 30522, longest: int = 512
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Embedding(longest, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.norm(self.words(ids) + self.positions(torch.arange(ids.shape[1])))
        hidden = self.encoder(hidden, src_key_padding_mask=mask == 0)
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)


def embed(model: Embedder, ids: Tensor, mask: Tensor) -> Tensor:
    """What is compiled: a function of the model, so that its weights are the caller's."""
    return model(ids, mask)  # type: ignore[no-any-return]


def texts(length: int, words: int, batch: int = 2) -> tuple[Tensor, Tensor]:
    """Ids, and the mask of a batch in which the last text is shorter."""
    ids, mask = torch.randint(0, words, (batch, length)), torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length // 2 + 1 :] = 0
    return ids, mask


@torch.no_grad()
def save(path: str, model: Embedder, shortest: int = 8, longest: int = 256) -> None:
    """Compiles every bucket and writes the package."""
    ids, mask = texts(longest, model.words.num_embeddings)
    for tensor in (ids, mask):
        dynaxla.mark_bucketed(tensor, 1, policy=dynaxla.PowersOfTwo(), min=shortest, max=longest)
    compiled = torch.compile(embed, backend="dynaxla", fullgraph=True).aot_compile(((model, ids, mask), {}))
    compiled.save_compiled_function(path)


@torch.no_grad()
def run(path: str, model: Embedder, lengths: range) -> float:
    """The largest difference from eager PyTorch at these lengths; compiles nothing."""
    with open(path, "rb") as file:
        compiled = torch.compiler.load_compiled_function(file)
    given = [texts(length, model.words.num_embeddings) for length in lengths]
    return max(float((compiled(model, *args) - model(*args)).abs().max()) for args in given)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("save", "run"))
    parser.add_argument("path")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Embedder().eval()
    started = time.perf_counter()
    if given.what == "save":
        save(given.path, model)
        print(f"saved {dynaxla.read_metrics().executables} programs in {time.perf_counter() - started:.1f} s")
        return
    difference = run(given.path, model, range(8, 257, 31))
    metrics = dynaxla.read_metrics()
    print(f"{metrics.loads} programs loaded, {metrics.compiles} compiled, {time.perf_counter() - started:.1f} s")
    print(f"largest difference from eager: {difference:.1e}")


if __name__ == "__main__":
    main()
