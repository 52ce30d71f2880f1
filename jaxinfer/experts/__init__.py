"""Collaborating experts (CoServe, arXiv:2503.02354): many expert models in little memory.

Rules route requests to experts; experts are loaded on demand and evict others. `scheduling/` decides, without a thread,
a clock or an array: which executor gets a request, in which order, and which expert is evicted. The executors and the
simulator (`jaxinfer.evaluation`) run the same decisions. Start at `scheduling/scheduler.py`.

>>> with jaxinfer.experts.System.from_config("board.toml") as system:  # doctest: +SKIP
...     print(system.submit("resistor", image).result().verdict)
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.experts.config import ExecutorOptions, ExpertConfig, SystemConfig
    from jaxinfer.experts.errors import (
        ConfigError,
        ExecutorDiedError,
        InsufficientMemoryError,
        InvalidInputError,
        LoadError,
        ProfileError,
        RoutingError,
    )
    from jaxinfer.experts.opened import OpenedSystem
    from jaxinfer.experts.results import Classification, Detection, EmbeddingVector, Judgement, Result, Stage
    from jaxinfer.experts.scheduling.experts import InputKind, Rule
    from jaxinfer.experts.scheduling.policy import POLICIES, Policy, policy_of
    from jaxinfer.experts.scheduling.profile import Profile
    from jaxinfer.experts.system import System

_MODULES = {
    "config": ("ExecutorOptions", "ExpertConfig", "SystemConfig"),
    "errors": (
        "ConfigError",
        "ExecutorDiedError",
        "InsufficientMemoryError",
        "InvalidInputError",
        "LoadError",
        "ProfileError",
        "RoutingError",
    ),
    "results": ("Classification", "Detection", "EmbeddingVector", "Judgement", "Result", "Stage"),
    "opened": ("OpenedSystem",),
    "scheduling.experts": ("InputKind", "Rule"),
    "scheduling.policy": ("POLICIES", "Policy", "policy_of"),
    "scheduling.profile": ("Profile",),
    "system": ("System",),
}

__all__ = [
    "POLICIES",
    "Classification",
    "ConfigError",
    "Detection",
    "EmbeddingVector",
    "ExecutorDiedError",
    "ExecutorOptions",
    "ExpertConfig",
    "InputKind",
    "InsufficientMemoryError",
    "InvalidInputError",
    "Judgement",
    "LoadError",
    "OpenedSystem",
    "Policy",
    "Profile",
    "ProfileError",
    "Result",
    "RoutingError",
    "Rule",
    "Stage",
    "System",
    "SystemConfig",
    "policy_of",
]


def __getattr__(name: str) -> Any:
    # Imported on first use: deciding and simulating need no JAX, and `jaxinfer --help` should not wait for it.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"jaxinfer.experts.{module}"), name)
    raise AttributeError(f"module 'jaxinfer.experts' has no attribute {name!r}")
