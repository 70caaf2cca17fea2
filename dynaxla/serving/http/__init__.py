"""OpenAI's HTTP interface to a language model's engine. Needs the extra `llm`; docs/serving_llm_http.md says what is taken.

app = create_app(engine, tokenizer, "my-model", CollectorRegistry())
LingeringServer(uvicorn.Config(app, port=8000), app, linger_s=5.0).run()
"""

from __future__ import annotations

from dynaxla.serving.http.app import create_app
from dynaxla.serving.http.graceful_shutdown import LingeringServer

__all__ = ["LingeringServer", "create_app"]
