"""The source of every figure of docs/benchmarks, each from one command.

`python -m benchmarks.NAME [--quick] [--json FILE]` measures, prints a table of its checks, and writes a result in the
format of `report.py`. Other engines run in their own processes and their own interpreter (`peers/`, `make peers`).
Start at `cpu_decode/`.
"""

import os

os.environ.setdefault("JAXINFER_CPU_LIBRARY", "1")  # figures are of CPU kernels: wait until they are compiled
