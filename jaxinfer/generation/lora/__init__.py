"""LoRA adapters: reading them as PEFT writes them (`peft.py`), and which are on the device (`cache.py`)."""
