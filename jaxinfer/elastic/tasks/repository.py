"""Tasks: heads and prompts by which one backbone solves different problems, and the repository that keeps them."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import jax
import msgspec
import numpy as np

from jaxinfer import checkpoints
from jaxinfer.checkpoints import CheckpointError
from jaxinfer.elastic.accuracy import LevelAccuracy
from jaxinfer.elastic.errors import ElasticError, TaskExistsError, UnknownTaskError
from jaxinfer.elastic.tasks.datasets import Dataset, Division, Parts
from jaxinfer.hub import HubName
from jaxinfer.models.layers.token_adaptation import PromptMode

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_TASK = "task.json"
_SMALL = 8 << 20
"""Bytes of heads and prompts up to which a task is a single file."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """A linear layer from features to the logits of a task's classes.

    Attributes:
      weight: float32 [classes, D].
      bias: float32 [classes].
    """

    weight: np.ndarray
    bias: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """The trained parts of a task, for a frozen backbone.

    Attributes:
      name: the task's name.
      labels: its classes' labels.
      backbone: the digest of the model it was trained with.
      prompt_mode: how its prompts were trained.
      heads: heads by number of prompts; 0 is for the levels without any.
      prompts: each layer's prompts by their number P, float32 [layers, P, D].
      accuracy: on the validation images, by what ran (`profiling.level_key`): a level that is run in another way, or
        with weights in another format, has an accuracy of its own.
      division: the division of its data set; None: all of it was trained on, or the division is not known.
      version: counted from 1.
    Raises ElasticError if a head does not fit the labels, or what was trained is not finite.
    """

    name: str
    labels: tuple[str, ...]
    backbone: str
    prompt_mode: PromptMode
    heads: Mapping[int, Head]
    prompts: Mapping[int, np.ndarray]
    accuracy: Mapping[str, LevelAccuracy]
    division: Division | None = None
    version: int = 1

    def divide(self, dataset: Dataset) -> Parts:
        """Divide its data set into parts. Raises ElasticError if the division is not known."""
        if self.division is None:
            raise ElasticError(
                f"task {self.name!r}: which images of its data set it was not trained on is not known; register it "
                "again without validation images."
            )
        return self.division.parts(dataset)

    def __post_init__(self) -> None:
        for n, head in self.heads.items():
            trained = {"weight": head.weight, "bias": head.bias}
            if n:
                trained["prompts"] = self.prompts[n]
            for what, values in trained.items():
                if not np.isfinite(values).all():
                    raise ElasticError(
                        f"task {self.name!r}: the {what} trained for {n} prompts have values that are not finite; "
                        "register it again, with a lower TrainingConfig.learning_rate."
                    )
            if len(head.weight) != len(self.labels) or len(head.bias) != len(self.labels):
                raise ElasticError(f"task {self.name!r} has {len(self.labels)} labels and {len(head.bias)} logits.")


class _TaskFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of `task.json`."""

    labels: tuple[str, ...]
    backbone: str
    prompt_mode: PromptMode
    accuracy: dict[str, LevelAccuracy]
    division: Division | None = None


def check_name(name: str) -> None:
    """Check that this can be a task's name, which is a folder's. Raises ElasticError."""
    if not _NAME.fullmatch(name):
        raise ElasticError(f"a task's name has letters, digits, - and _ alone, got {name!r}.")


class TaskRepository:
    """Tasks on disk (OTAS, section III-A): a folder per task, in it a folder per version, a checkpoint.

    A version appears whole or not at all; the newest serves. So a process that is killed while it registers a task
    leaves the version before it.

    Args:
      folder: the repository's folder, which need not exist.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    @classmethod
    def of_model(cls, model: str | Path, folder: str | Path | None = None) -> Self:
        """The repository in a folder; None: in `tasks` of the model directory.

        Raises ElasticError for a model of the hub without a folder.
        """
        if folder is None and not Path(model).is_dir() and HubName.parse(model):
            raise ElasticError(f"{model} is a repository of the hub: give `repository`, a folder to keep tasks in.")
        return cls(Path(model) / "tasks" if folder is None else folder)

    def names(self) -> list[str]:
        """List the tasks in alphabetical order."""
        if not self.folder.is_dir():
            return []
        return sorted(
            path.name for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and self._versions(path)
        )

    def read(self, name: str) -> Task:
        """Read the newest version of a task. Raises UnknownTaskError, or CheckpointError if it is damaged."""
        versions = self._versions(self.folder / name) if _NAME.fullmatch(name) else []
        if not versions:
            raise UnknownTaskError(f"{self.folder}: no task {name!r}; known: {', '.join(self.names()) or 'none'}.")
        folder = self.folder / name / f"v{versions[-1]}"
        try:
            described = msgspec.json.decode(checkpoints.read_file(folder, _TASK) or b"", type=_TaskFile)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"{folder}: {_TASK} is damaged ({error}); register the task again.") from error
        leaves = {
            name: np.array(leaf) for name, leaf in checkpoints.load(folder).items()
        }  # of views, JAX keeps the arrays
        heads = {int(n.split(".")[1]) for n in leaves if n.startswith("heads.")}
        return Task(
            name=name,
            labels=described.labels,
            backbone=described.backbone,
            prompt_mode=described.prompt_mode,
            heads={n: Head(leaves[f"heads.{n}.weight"], leaves[f"heads.{n}.bias"]) for n in sorted(heads)},
            prompts={int(n.split(".")[1]): leaves[n] for n in sorted(leaves) if n.startswith("prompts.")},
            accuracy={level.adaptation: level for level in described.accuracy.values()},
            division=described.division,
            version=versions[-1],
        )

    def next_version(self, name: str, *, new_version: bool) -> int:
        """Choose the next version of a task. Raises TaskExistsError for a second one unless `new_version`."""
        check_name(name)
        versions = self._versions(self.folder / name)
        if versions and not new_version:
            raise TaskExistsError(
                f"{self.folder}: task {name!r} is registered; ask for a new version, or choose another name."
            )
        return versions[-1] + 1 if versions else 1

    def write(self, task: Task) -> None:
        """Add a version of a task. Raises CheckpointError if it exists."""
        leaves: dict[str, np.ndarray] = {}
        for n, head in task.heads.items():
            leaves |= {f"heads.{n}.weight": head.weight, f"heads.{n}.bias": head.bias}
        leaves |= {f"prompts.{n}": prompts for n, prompts in task.prompts.items()}
        described = _TaskFile(
            labels=task.labels,
            backbone=task.backbone,
            prompt_mode=task.prompt_mode,
            accuracy=dict(task.accuracy),
            division=task.division,
        )
        checkpoints.save(
            self.folder / task.name / f"v{task.version}",
            leaves,
            axes={name: (None,) * leaf.ndim for name, leaf in leaves.items()},
            files={_TASK: msgspec.json.format(msgspec.json.encode(described), indent=1) + b"\n"},
            layout="single-file" if sum(leaf.nbytes for leaf in leaves.values()) <= _SMALL else "orbax",
        )

    def _versions(self, folder: Path) -> list[int]:
        """List the complete versions, ascending."""
        complete = (path.name for path in folder.glob("v*") if checkpoints.is_complete(path))
        return sorted(int(match[1]) for match in (re.fullmatch(r"v(\d+)", name) for name in complete) if match)
