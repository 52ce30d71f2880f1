"""The services of `tests/elastic`."""

from tests.elastic.conftest import options, registered, service, vit

__all__ = ["options", "registered", "service", "vit"]
