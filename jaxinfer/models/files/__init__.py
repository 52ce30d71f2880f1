"""Model directories: converting into one, describing, loading, saving and verifying it."""
