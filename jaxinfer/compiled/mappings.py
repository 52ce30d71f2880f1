"""Memory mappings: on a CPU each program takes hundreds, and Linux ends a process that asks for too many."""

from pathlib import Path

_MAPS, _LIMIT = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_SHARE = 0.9
"""Share of the limit that programs may use: threads, files and buffers need mappings, too."""
_PROGRAM = 2000
"""Mappings that no program needs: hundreds are usual. While there is room for them, they are not counted again."""
_sure = 0
"""Programs that have room by the last count."""


class MappingsError(RuntimeError):
    """The process has nearly as many memory mappings as it may have."""


def check_mappings() -> None:
    """Raise MappingsError if there is no room for more programs; does nothing where Linux does not tell."""
    global _sure
    if _sure:
        _sure -= 1
        return
    try:
        used, limit = _MAPS.read_bytes().count(b"\n"), int(_LIMIT.read_text())
    except (OSError, ValueError):
        return
    if used > _SHARE * limit:
        raise MappingsError(
            f"this process has {used:,} memory mappings, and Linux ends it at {limit:,} (vm.max_map_count): compile "
            "fewer programs in it (fewer levels, or smaller batches), or raise the limit with `sysctl`."
        )
    _sure = max(0, int(_SHARE * limit - used) // _PROGRAM - 1)  # beside the one that is compiled now
