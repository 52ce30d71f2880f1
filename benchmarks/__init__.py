"""Every figure that README quotes, each by one command.

`python -m benchmarks.NAME [--quick] [--json FILE]` measures, ends with a table of its checks, and writes a result in
the form of `report.py`. Other engines run in processes and an interpreter of their own (`peers/`, `make peers`).
Start at `cpu_decode.py`.
"""
