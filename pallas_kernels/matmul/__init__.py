"""Products with a matrix of outputs by inputs."""
