"""Reading a `tokenizer.json`: some that are damaged abort the process."""

import tokenizers

TEXT = "Hello, World 123\n"


def try_tokenizer(file: str) -> None:
    """Read a tokenizer, and encode and decode a text with it. Raises ValueError if that fails."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(file)
        tokenizer.decode(tokenizer.encode(TEXT).ids)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(str(error)) from error
