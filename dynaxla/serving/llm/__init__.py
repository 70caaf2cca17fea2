"""A language model's engine: continuous batching over a cache of slots (the `llm` extra). docs/serving_llm.md."""
