"""What users hold: `LLM`, `Embedder`, beam search; they build an engine and run requests on it."""
