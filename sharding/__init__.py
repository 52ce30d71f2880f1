"""Where every array lives."""
