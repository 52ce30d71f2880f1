"""The device side: how experts take inputs and judge (`kinds.py`), programs that all experts of an architecture share
(`architectures.py`), weights on their way between disk, host and devices (`loader.py`), and the threads that run them
(`executors.py`). `profiler.py` measures what they cost.
"""
