"""The options of a service: their types, meaning and defaults."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self, TypedDict

from msgspec import Meta

from jaxinfer.elastic.errors import ElasticError, LevelError
from jaxinfer.elastic.levels import Level, Levels, default_merge_levels
from jaxinfer.elastic.programs import image_bytes
from jaxinfer.elastic.scheduling.policies import Elastic, Policy
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.fields import AtLeast1, Size, check_fields
from jaxinfer.models.config import ViTConfig
from jaxinfer.models.layers.token_adaptation import MergeSchedule, PromptMode
from jaxinfer.serving.budget import default_max_waiting

LevelList = Annotated[list[Level], Meta(description="a list of levels, integers within 2**30")]

PLAN_SECONDS = 0.01
"""Seconds that planning may take between batches before a simpler rule decides."""


def plan_in_time(profile: ServingProfile) -> Policy:
    """Make the default policy of services: it plans exactly if that takes no longer than `PLAN_SECONDS`."""
    return Elastic(profile, time_limit=PLAN_SECONDS)


class ServiceOptions(TypedDict, total=False):
    """Options of `Service`."""

    merge_levels: Sequence[int] | None
    """The levels < 0; default: five, which merge from a quarter of the patches to nearly all."""
    prompt_mode: PromptMode | str
    """How a layer's prompts continue in the next one; default: the next layer's replace them."""
    schedule: MergeSchedule | str | None
    """The division of merges over the layers; default: chosen by profiling for each level."""
    max_batch: int
    """Images that are classified at once, on a mesh in each of its lanes; default 64."""
    max_tasks: int
    """Maximum number of tasks; default 8."""
    max_classes: int
    """Maximum number of classes of a task; default 100."""
    policy: Callable[[ServingProfile], Policy]
    """Makes the policy that decides, from the profile, which queries run next and at which level. It follows changes
    of the profile."""
    max_waiting: int | None
    """Waiting queries beyond which more are refused; default: 10,000, or as many as have images of 512 MiB together."""
    device_memory: int | str | None
    """Memory for the model, its tasks and the two batches in flight: bytes, or such as "8GiB". If `max_batch` does not
    fit, batches are smaller, which shows when their programs are compiled. Default: any."""
    kernels: bool
    """Whether operations may run as kernels; False: plain XLA."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceConfig:
    """Checked options of a service, for one model; see `ServiceOptions`.

    Raises ElasticError for a value of another type or range, LevelError for such levels.
    """

    merge_levels: LevelList
    prompt_mode: PromptMode = PromptMode.REPLACE
    schedule: MergeSchedule | None = None
    max_batch: Size = 64
    max_tasks: Size = 8
    max_classes: Size = 100
    policy: Callable[[ServingProfile], Policy] = plan_in_time
    max_waiting: AtLeast1
    device_memory: int | str | None = None
    kernels: bool = True

    def __post_init__(self) -> None:
        names = ("prompt_mode", "schedule", "max_batch", "max_tasks", "max_classes", "max_waiting", "kernels")
        check_fields(self, *names, where="Service", error=ElasticError)
        check_fields(self, "merge_levels", where="Service", error=LevelError)

    @classmethod
    def from_options(cls, options: ServiceOptions, config: ViTConfig) -> Self:
        """Give the options that depend on the model their defaults. Raises TypeError for an unknown option."""
        if unknown := options.keys() - ServiceOptions.__annotations__.keys():
            known = ", ".join(ServiceOptions.__annotations__)
            raise TypeError(f"Service has no option {', '.join(sorted(unknown))}; known: {known}.")
        of_model: dict[str, Any] = {
            "merge_levels": default_merge_levels(config),
            "max_waiting": default_max_waiting(image_bytes(config)),
        }
        defaults = {name: value for name, value in of_model.items() if options.get(name) is None}
        return cls(**{**options, **defaults})

    def levels(self, config: ViTConfig) -> Levels:
        """The levels, without schedules chosen by profiling. Raises LevelError for those that the model cannot run."""
        return Levels(
            config=config,
            merge_levels=tuple(sorted(set(self.merge_levels))),
            prompt_mode=self.prompt_mode,
            forced=self.schedule,
            schedules={},
        )
