"""The error for unusable files. Its message is one line that names the file and the remedy."""


class CheckpointError(ValueError):
    """A model directory or a Hugging Face directory is missing, damaged, or not of the expected kind."""
