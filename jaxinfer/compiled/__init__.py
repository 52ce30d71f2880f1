"""Executables: compiled ahead of time for fixed shapes, kept on disk, measured.

Knows nothing of requests or models. Start at `spec.py` (what a program is), then `program.py` (one executable),
`cache.py` (all of a model's, compiled ahead, when needed, or as in `background.py`) and `costs.py` (how long they take,
as `device_time.py` times them); `executables.py` keeps what is compiled on disk, `target.py` compiles for a GPU that is
not there.
"""

from jaxinfer.compiled.cache import CompileMissError, ProgramCache
from jaxinfer.compiled.costs import Cost, Costs, CostTable, LinearFit
from jaxinfer.compiled.device_time import Clock, DeviceTime, Interval
from jaxinfer.compiled.drift import Drift
from jaxinfer.compiled.executables import ExecutableStore, executable_store
from jaxinfer.compiled.mappings import MappingsError, check_mappings
from jaxinfer.compiled.options import compiler_options
from jaxinfer.compiled.origin import Origin
from jaxinfer.compiled.program import Bucket, MemoryUse, Program, Sizes
from jaxinfer.compiled.spec import ProgramSpec
from jaxinfer.compiled.threads import close_at_exit
from jaxinfer.disk_cache import cache_folder

__all__ = [
    "Bucket",
    "Clock",
    "CompileMissError",
    "Cost",
    "CostTable",
    "Costs",
    "DeviceTime",
    "Drift",
    "ExecutableStore",
    "Interval",
    "LinearFit",
    "MappingsError",
    "MemoryUse",
    "Origin",
    "Program",
    "ProgramCache",
    "ProgramSpec",
    "Sizes",
    "cache_folder",
    "check_mappings",
    "close_at_exit",
    "compiler_options",
    "executable_store",
]
