"""The layers that models are made of, and what a forward pass shares between them."""
