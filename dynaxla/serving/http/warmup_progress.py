"""How a warm-up goes, for whoever started the server: a bar on a terminal, lines in a log."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from dynaxla.serving.lifecycle import State
from dynaxla.serving.llm.requests import Engine

logger = logging.getLogger("dynaxla")

LOOK_S = 0.1
BETWEEN_LINES_S = 3.0


def show_warm_up(engine: Engine, between_lines_s: float = BETWEEN_LINES_S) -> None:
    """Returns when the warm-up has ended, however it did."""
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
                time.sleep(LOOK_S)
    finally:
        compiles.setLevel(before)


def _log_lines(engine: Engine, began: float, between_lines_s: float) -> None:
    told = began
    while _is_warming(engine):
        if time.monotonic() - told >= between_lines_s:
            told = time.monotonic()
            logger.info("warm-up: %d of %d programs after %.0f s", *engine.progress, told - began)
        time.sleep(LOOK_S)
