"""Collaboration of experts (CoServe, arXiv:2503.02354): many expert models in little memory.

Requests go to experts by rules; experts are loaded when they are needed and others make room. `scheduling/` decides,
without a thread, a clock or an array: which executor gets a request, in which order, and which expert goes. The
simulator and the real executors run the same decisions. Start at `scheduling/scheduler.py`.
"""
