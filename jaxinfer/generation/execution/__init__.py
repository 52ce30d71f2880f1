"""The device side of the engine: arrays on the device, programs that run there, inputs and results.

Start at `decoder.py` (how a batch runs), then `programs/` (what is compiled, a file each) and `layout.py` (shapes).
"""
