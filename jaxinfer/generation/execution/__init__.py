"""The device side of the engine: what is on the device, the programs that run there, what goes in and comes out.

Start at `decoder.py` (how a batch runs), then `programs/` (what is compiled, a file each) and `layout.py` (shapes).
"""
