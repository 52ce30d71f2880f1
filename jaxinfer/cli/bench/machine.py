"""The machine that a measurement ran on."""

import os
import platform
from pathlib import Path
from typing import Any

import jax

FEATURES = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}
"""CPU flags that matter for speed, as in /proc/cpuinfo."""


def machine() -> dict[str, Any]:
    """The properties of this machine that affect speed."""
    cpu, flags = platform.processor() or platform.machine(), set()
    if (info := Path("/proc/cpuinfo")).exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        fields = {name.strip(): value.strip() for name, value in fields.items()}
        cpu, flags = fields.get("model name", cpu), set(fields.get("flags", "").split())
    device = jax.devices()[0]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "features": sorted(flags & FEATURES),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "platform": device.platform,
        "device": device.device_kind,
        "backend": device.client.platform_version,
    }
