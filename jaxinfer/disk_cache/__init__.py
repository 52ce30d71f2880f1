"""What processes keep for one another: files that are whole or not there, by keys that say all they depend on."""

from jaxinfer.disk_cache.files import KeptFiles, cache_folder, write_atomically

__all__ = ["KeptFiles", "cache_folder", "write_atomically"]
