"""How batches of any model reach its devices; read `forward.py` first."""
