"""jaxinfer: compiled transformer inference in JAX."""
