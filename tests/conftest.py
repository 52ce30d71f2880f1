"""The environment of every test: CPU with 8 virtual devices, no shared compile cache, warnings as errors."""

import os

# Before any backend starts: 8 virtual devices on few cores deadlock without spare threads.
os.environ["NPROC"] = "32"
os.environ["JAX_ENABLE_PREEMPTION_SERVICE"] = "0"
if os.environ.get("JAXINFER_TEST_GPU") != "1":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUM_CPU_DEVICES"] = "8"
