"""Models of text: the decoder and the encoder."""
