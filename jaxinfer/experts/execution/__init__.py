"""The device side: how experts take inputs and judge them (`kinds.py`), programs shared by all experts of an
architecture (`architectures.py`), moving weights between disk, host and devices (`loader.py`), and running batches
(`runner.py`). `decider.py` connects the scheduler to a loop's threads; `profiler.py` measures costs.
"""
