"""Files that processes keep for one another: each is whole or absent, and its key names all it depends on."""

from jaxinfer.disk_cache.files import (
    KeptFiles,
    cache_folder,
    make_private,
    require_trusted,
    write_atomically,
)

__all__ = [
    "KeptFiles",
    "cache_folder",
    "make_private",
    "require_trusted",
    "write_atomically",
]
