"""Elastic tokens (OTAS, arXiv:2401.05031): one vision transformer for many tasks, its tokens chosen per batch.

A level above 0 adds prompts, one below merges tokens. Start at `service.py`, then its parts: `catalogue.py` (levels, on
top of `levels.py` and `programs.py`), `registrar.py` (tasks, on top of `tasks/`) and `planning.py` (queries).

>>> service = jaxinfer.elastic.Service.from_checkpoint("vit")  # doctest: +SKIP
>>> service.register_task("digits", load_digits(service.config.image_size), prompts=[2, 4, 8])  # doctest: +SKIP
>>> service.classify(images, task="digits", level=-8)[0].label  # doctest: +SKIP
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.elastic.accuracy import LevelAccuracy
    from jaxinfer.elastic.answers import Answer, Classification
    from jaxinfer.elastic.errors import (
        ElasticError,
        InvalidImageError,
        LevelError,
        ProfileError,
        TaskExistsError,
        UnknownTaskError,
    )
    from jaxinfer.elastic.latency import Latency
    from jaxinfer.elastic.options import ServiceOptions
    from jaxinfer.elastic.registrar import RegistrationOptions
    from jaxinfer.elastic.service import Service
    from jaxinfer.elastic.tasks.datasets import (
        Dataset,
        Division,
        load_cifar,
        load_dataset,
        load_digits,
        load_faces,
        load_image_folder,
        load_mnist,
        load_textures,
    )
    from jaxinfer.elastic.tasks.images import load_image
    from jaxinfer.elastic.tasks.repository import Task, TaskRepository
    from jaxinfer.elastic.tasks.training import TrainingConfig
    from jaxinfer.models.layers.token_adaptation import MergeSchedule, PromptMode, TokenAdaptation

_MODULES = {
    "elastic.accuracy": ("LevelAccuracy",),
    "elastic.answers": ("Answer", "Classification"),
    "elastic.tasks.datasets": (
        "Dataset",
        "Division",
        "load_cifar",
        "load_dataset",
        "load_digits",
        "load_faces",
        "load_image_folder",
        "load_mnist",
        "load_textures",
    ),
    "elastic.errors": (
        "ElasticError",
        "InvalidImageError",
        "LevelError",
        "ProfileError",
        "TaskExistsError",
        "UnknownTaskError",
    ),
    "elastic.tasks.images": ("load_image",),
    "elastic.latency": ("Latency",),
    "elastic.options": ("ServiceOptions",),
    "elastic.registrar": ("RegistrationOptions",),
    "elastic.service": ("Service",),
    "elastic.tasks.repository": ("Task", "TaskRepository"),
    "elastic.tasks.training": ("TrainingConfig",),
    "models.layers.token_adaptation": ("MergeSchedule", "PromptMode", "TokenAdaptation"),
}

__all__ = [
    "Answer",
    "Classification",
    "Dataset",
    "Division",
    "ElasticError",
    "InvalidImageError",
    "Latency",
    "LevelAccuracy",
    "LevelError",
    "MergeSchedule",
    "ProfileError",
    "PromptMode",
    "RegistrationOptions",
    "Service",
    "ServiceOptions",
    "Task",
    "TaskExistsError",
    "TaskRepository",
    "TokenAdaptation",
    "TrainingConfig",
    "UnknownTaskError",
    "load_cifar",
    "load_dataset",
    "load_digits",
    "load_faces",
    "load_image",
    "load_image_folder",
    "load_mnist",
    "load_textures",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: `jaxinfer --help` should not wait for JAX.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"jaxinfer.{module}"), name)
    raise AttributeError(f"module 'jaxinfer.elastic' has no attribute {name!r}")
