"""Model files: Orbax model directories and Hugging Face safetensors, in and out."""
