"""What went wrong with a file, said in one line that names it and the remedy."""


class CheckpointError(ValueError):
    """A model directory or a Hugging Face directory is missing, damaged, or not what was asked for."""
