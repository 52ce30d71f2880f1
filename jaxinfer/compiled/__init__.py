"""Executables: compiled ahead of time for fixed shapes, kept on disk, measured.

Knows nothing of requests or models. Start at `spec.py` (what a program is), then `program.py` (one executable and its
cost) and `cache.py` (all of a model's); `executables.py` keeps what is compiled on disk, `target.py` compiles for a GPU
on a machine without one.
"""

from jaxinfer.compiled.cache import CompileMissError, CostRecords, ProgramCache
from jaxinfer.compiled.executables import ExecutableStore
from jaxinfer.compiled.options import compiler_options
from jaxinfer.compiled.program import Bucket, Cost, Program
from jaxinfer.compiled.spec import ProgramSpec, Sizes
from jaxinfer.disk_cache import cache_folder

__all__ = [
    "Bucket",
    "CompileMissError",
    "Cost",
    "CostRecords",
    "ExecutableStore",
    "Program",
    "ProgramCache",
    "ProgramSpec",
    "Sizes",
    "cache_folder",
    "compiler_options",
]
