"""The machine that a measurement ran on."""

import os
import platform
from typing import Any

import jax

from jaxinfer.compiled.cpu_library import library_state
from jaxinfer.disk_cache.processor import cpu_fields, cpu_model

FEATURES = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}
"""CPU flags that matter for speed, as in /proc/cpuinfo."""


def machine() -> dict[str, Any]:
    """Return the properties of this machine that affect speed."""
    device = jax.devices()[0]
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "features": sorted(FEATURES & set(cpu_fields().get("flags", "").split())),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "platform": device.platform,
        "device": device.device_kind,
        "backend": device.client.platform_version,
        "cpu_kernels": str(library_state()),
    }
