"""Executables: compiled ahead of time for fixed shapes, cached, measured.

Knows nothing of requests or models. Start at `spec.py` (what a program is), then `program.py` (one executable),
`cache.py` (all of a model's) and `costs.py` (how long they take); `target.py` compiles for a GPU that is
not there.
"""

from jaxinfer.compiled.cache import CompileMissError, ProgramCache, cache_folder, enable_persistent_cache
from jaxinfer.compiled.costs import Cost, Costs, LinearFit
from jaxinfer.compiled.options import compiler_options
from jaxinfer.compiled.program import Bucket, MemoryUse, Program
from jaxinfer.compiled.spec import ProgramSpec, Sizes

__all__ = [
    "Bucket",
    "CompileMissError",
    "Cost",
    "Costs",
    "LinearFit",
    "MemoryUse",
    "Program",
    "ProgramCache",
    "ProgramSpec",
    "Sizes",
    "cache_folder",
    "compiler_options",
    "enable_persistent_cache",
]
