"""The device side.

`kinds.py` has how experts take inputs and judge them, `architectures.py` the programs that all experts of an
architecture share, `loader.py` weights on their way between disk, host and devices, `runner.py` running batches.
`decider.py` connects the scheduler to a loop's threads; `profiler.py` measures costs.
"""
