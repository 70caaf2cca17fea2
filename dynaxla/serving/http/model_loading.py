"""From a model's files to its engine: loads weights and tokenizer with transformers, and cuts the engine to size."""

from __future__ import annotations

import argparse
import io
import sys
from contextlib import nullcontext, redirect_stderr
from typing import Any

import torch
import transformers
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM, AutoTokenizer

import dynaxla
from dynaxla.errors import OptionError
from dynaxla.serving.http.serve import Source
from dynaxla.serving.llm.engine import LanguageEngine
from dynaxla.serving.llm.tensor_parallel import use_devices
from dynaxla.serving.prometheus import EngineMetrics, watch_compiles, watch_engine
from dynaxla.serving.settings import EngineSettings

DEFAULT_MAX_SEQ_LEN = (
    1024  # unless more is asked for: memory for slots times max_seq_len tokens is allocated at the start
)
_MAX_ERROR_CHARS = 500  # characters of what transformers says
_KV_LENGTHS = (256, 1024, 4096)
_CHUNK = 64


def make_engine(source: Source, given: argparse.Namespace, registry: CollectorRegistry) -> tuple[LanguageEngine, Any]:
    """A model's engine, not started, and its tokenizer.

    Args:
        source: of the model.
        given: what `command.add_arguments` has parsed.
        registry: where the engine counts.

    Raises:
        OptionError: the model cannot be loaded or served, or the sizes contradict each other.
        TargetError, ShardingError: there are not as many devices, or they do not divide the model.
    """
    model, tokenizer = load(source, given.dtype)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    settings = settings_of(given, positions)
    use_devices(settings.tensor_parallel)
    placed = model.to("dynaxla") if settings.tensor_parallel == 1 else model  # the engine splits it
    engine = LanguageEngine(placed, tokenizer, settings, observer=EngineMetrics(registry))
    watch_engine(registry, lambda: engine.queue_depth, lambda: engine.slots_used, lambda: engine.cache_bytes)
    watch_compiles(registry, dynaxla.read_metrics)
    return engine, tokenizer


def settings_of(given: argparse.Namespace, positions: int | None) -> EngineSettings:
    """The engine's sizes: few, since each pair of them is a program, and a start should take a minute or two.

    Args:
        given: what `command.add_arguments` has parsed.
        positions: that the model has; None: as many as wanted.

    Raises:
        OptionError: the sizes contradict each other, or the model.
    """
    most = positions or DEFAULT_MAX_SEQ_LEN
    max_seq_len = given.max_seq_len or min(DEFAULT_MAX_SEQ_LEN, most)
    if max_seq_len > most and positions:
        raise OptionError(
            f"--max-seq-len {max_seq_len}: the model has {positions} positions", f"write --max-seq-len {positions}"
        )
    slots = given.slots
    return EngineSettings(
        slots=slots,
        max_seq_len=max_seq_len,
        rows=(1, slots) if slots > 2 else (slots,),
        kv_lengths=tuple(sorted({*(kv_length for kv_length in _KV_LENGTHS if kv_length < max_seq_len), max_seq_len})),
        prefill_chunks=((1, min(_CHUNK, max_seq_len)),),
        max_queue=given.max_queue,
        tensor_parallel=given.tensor_parallel,
    )


def load(source: Source, dtype: str) -> tuple[Any, Any]:
    """The model, on the host, and its tokenizer.

    Raises:
        OptionError: they are not there, or of a kind that cannot be read.
    """
    is_gguf = source.gguf_file is not None
    if is_gguf or not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    kind: dict[str, Any] = {"gguf_file": source.gguf_file} if is_gguf else {}
    try:  # the bar of a GGUF file's tensors, which has no switch, is not shown
        with redirect_stderr(io.StringIO()) if is_gguf else nullcontext():
            tokenizer = AutoTokenizer.from_pretrained(source.place, **kind)
            model = AutoModelForCausalLM.from_pretrained(source.place, dtype=getattr(torch, dtype), **kind)
    except Exception as error:  # whatever reading a damaged file raises
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_ERROR_CHARS]
        hint = "name a folder with config.json, weights and tokenizer, a .gguf file, or a causal model of the hub"
        raise OptionError(f"{source.place} cannot be loaded: {said}", hint) from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise OptionError(f"{source.place} has no fast tokenizer", "convert it: a tokenizer.json is needed")
    return model, tokenizer
