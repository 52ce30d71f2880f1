"""Executables: compiled ahead of time for fixed shapes, cached, measured.

Knows nothing of requests or models. Start at `spec.py` (what a program is), then `program.py` (one executable and its
cost) and `cache.py` (all of a model's); `target.py` compiles for a GPU on a machine without one.
"""

from jaxinfer.compiled.cache import CompileMissError, CostRecords, ProgramCache, cache_folder, enable_persistent_cache
from jaxinfer.compiled.options import compiler_options
from jaxinfer.compiled.program import Bucket, Cost, Program
from jaxinfer.compiled.spec import ProgramSpec, Sizes

__all__ = [
    "Bucket",
    "CompileMissError",
    "Cost",
    "CostRecords",
    "Program",
    "ProgramCache",
    "ProgramSpec",
    "Sizes",
    "cache_folder",
    "compiler_options",
    "enable_persistent_cache",
]
