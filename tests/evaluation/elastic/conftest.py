"""The services of `tests/elastic`."""

from tests.elastic.conftest import options, service

__all__ = ["options", "service"]
