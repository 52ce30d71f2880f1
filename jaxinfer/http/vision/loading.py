"""Systems of experts and elastic services from a server's config."""

import functools

from jaxinfer.elastic.service import Service
from jaxinfer.experts.system import System
from jaxinfer.http.config import ElasticConfig, ExpertsConfig, ServerConfig, naming_table
from jaxinfer.http.vision.served import ServedService, ServedSystem


def vision_of(config: ServerConfig) -> tuple[list[ServedSystem], list[ServedService]]:
    """Make the systems and services of a config, which are not loaded yet."""
    systems = [
        ServedSystem(name, functools.partial(_load_system, config.source, name, each), each.image_folders)
        for name, each in config.experts.items()
    ]
    services = [
        ServedService(
            name, functools.partial(_load_service, config.source, name, each), each.image_folders, each.dataset_folders
        )
        for name, each in config.elastic.items()
    ]
    return systems, services


def _load_system(source: str | None, name: str, config: ExpertsConfig) -> System:
    with naming_table(source, f"experts.{name}"):
        return System.from_config(config.config, mode=config.mode)


def _load_service(source: str | None, name: str, config: ElasticConfig) -> Service:
    with naming_table(source, f"elastic.{name}"):
        return Service.from_checkpoint(str(config.path), repository=config.repository, **config.options)
