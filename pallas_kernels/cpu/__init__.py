"""Kernels of CPUs in C++, which XLA calls as foreign functions."""
