"""Elastic serving (OTAS, arXiv:2401.05031), on a simulated clock and live. Run `python -m benchmarks.otas`."""
