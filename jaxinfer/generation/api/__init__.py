"""User-facing classes: `LLM`, `Embedder`, beam search; they build an engine and run requests on it."""
