"""`/v1/elastic/query` and `/v1/elastic/tasks`: images for the tasks of an elastic service, and new tasks."""

import asyncio
import functools
import os
from collections.abc import Awaitable, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request

from jaxinfer.elastic.answers import Answer
from jaxinfer.elastic.errors import ElasticError, ProfileError, TaskExistsError, UnknownTaskError
from jaxinfer.elastic.service import Service
from jaxinfer.elastic.tasks.datasets import DATASETS, Dataset, Division, load_dataset
from jaxinfer.elastic.tasks.repository import Task
from jaxinfer.elastic.tasks.training import TrainingConfig
from jaxinfer.fields import AtLeast1, NotNegative, Seed, shown
from jaxinfer.http.bodies import Body, decode
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.folders import find_inside
from jaxinfer.http.limits import Limits
from jaxinfer.http.vision.forms import is_form, read_form
from jaxinfer.http.vision.images import ImageFile, ImageThreads, Source, decode_image, source_of
from jaxinfer.http.vision.results import Until, answer_of, check_count, results_of
from jaxinfer.http.vision.served import ServedService, prepared
from jaxinfer.models.vision.image_files import fitted
from jaxinfer.serving.budget import BudgetError


class QueryOptions(Body, kw_only=True):
    """The fields of a request that hold for all of its images.

    Attributes:
      model: the service's name; empty: the only one.
      task: the task whose classes the images are sorted into.
      latency: seconds within which an answer has a value.
      utility: the value of a right answer in time, relative to other queries.
    """

    model: str = ""
    task: str
    latency: NotNegative
    utility: NotNegative = 1.0


class QueryBody(QueryOptions, kw_only=True):
    """The body of `/v1/elastic/query`.

    Attributes:
      images: each a data URL, plain base64, or a file in one of the image folders.
    """

    images: list[str | ImageFile]


class RegisterBody(Body, kw_only=True):
    """The body of `POST /v1/elastic/tasks`; the options are those of `jaxinfer elastic register`.

    Attributes:
      model: the service's name; empty: the only one.
      task: the task's name.
      data: digits, mnist, textures or faces; or a folder in one of the data set folders, with CIFAR's binary version or
        one folder per class.
      prompts: numbers of prompts to train; each becomes a level.
      test_share: share of each class's images that is kept for tests.
      steps: training steps for each number of prompts.
      seed: seed of the training.
      new_version: whether to replace a task of this name.
    """

    model: str = ""
    task: str
    data: str
    prompts: tuple[int, ...] = ()
    test_share: float = 0.0
    steps: AtLeast1 = 600
    seed: Seed = 0
    new_version: bool = False


async def read_query(request: Request, limits: Limits) -> tuple[QueryOptions, Sequence[str | ImageFile | bytes]]:
    """Read a request's options and images, from JSON or a form. Raises BadRequestError."""
    if is_form(request):
        form = await read_form(request, limits, QueryOptions)
        return form.options, form.images
    body = decode(await limits.read_body(request), QueryBody)
    check_count("images", body.images, limits)
    return body, body.images


async def query(
    served: ServedService,
    options: QueryOptions,
    images: Sequence[str | ImageFile | bytes],
    limits: Limits,
    threads: ImageThreads,
) -> dict[str, Any]:
    """Answer a request's queries. Raises BadRequestError, and the error of the queries if none has an answer."""
    service = served.service
    try:
        labels = service.task(options.task).labels
    except UnknownTaskError as error:
        raise BadRequestError(str(error), param="task", status=404, code="task_not_found") from None
    folders = served.image_folders
    sources = [
        (f"image[{place}]", image) if isinstance(image, bytes) else (name, source_of(image, name, folders))
        for place, image in enumerate(images)
        for name in [f"images[{place}]"]
    ]
    until = Until(options.latency)

    def prepare(given: tuple[str, Source]) -> Awaitable[np.ndarray]:
        return threads.run(functools.partial(_prepare, service, *given, limits.max_image_pixels))

    async def answer(_: tuple[str, Source], image: np.ndarray) -> dict[str, Any]:
        left = max(0.0, until.seconds_left)  # late queries are shed, and counted so
        answer = await service.submit(image, options.task, deadline=left, utility=options.utility)
        return _described(answer, labels)

    results = await results_of(sources, prepare, answer)
    return answer_of("elastic.answers", served.name, results, task=options.task)


def _prepare(service: Service, place: str, source: Source, max_pixels: int) -> np.ndarray:
    """Decode and resize an image for the service's model. Raises BadRequestError."""
    pixels = decode_image(source, place, max_pixels)
    try:
        return fitted(pixels, service.config.image_size, service.config.preprocessing)
    except ValueError as error:
        raise BadRequestError(f"{place}: {error}", param=place) from error


def _described(answer: Answer, labels: Sequence[str]) -> dict[str, Any]:
    return {
        "label": answer.label,
        "probabilities": dict(zip(labels, answer.probabilities.tolist(), strict=True)),
        "level": answer.level,
        "queue_seconds": answer.queue_seconds,
        "compute_seconds": answer.compute_seconds,
        "in_time": answer.in_time,
    }


# Tasks


async def register(served: ServedService, body: RegisterBody) -> dict[str, Any]:
    """Register a task in a thread, one at a time, and describe it; queries go on. Raises BadRequestError."""
    if not served.dataset_folders:
        raise BadRequestError(
            f"the elastic service {served.name!r} registers no tasks: set dataset_folders in the server's config.",
            status=403,
            code="datasets_not_allowed",
        )
    served.service  # noqa: B018 - raises until it is loaded
    async with served.registering:
        return await asyncio.to_thread(_register, served, body)


def _register(served: ServedService, body: RegisterBody) -> dict[str, Any]:
    service = served.service
    try:
        task = service.register_task(
            body.task,
            _dataset(served, body.data),
            prompts=body.prompts,
            division=Division(test_share=body.test_share),
            training=TrainingConfig(steps=body.steps, seed=body.seed),
            new_version=body.new_version,
        )
        if len(service.tasks) == 1:  # the service had none to be prepared for
            prepared(service)
    except TaskExistsError as error:
        message = f"a task {body.task!r} is registered; set new_version, or choose another name."
        raise BadRequestError(message, param="task", status=409, code="task_exists") from error
    except BudgetError as error:
        raise BadRequestError(str(error), status=507, code="insufficient_memory") from error
    except BadRequestError:
        raise
    except ValueError as error:
        raise BadRequestError(str(error)) from error
    return describe_task(served, task)


def _dataset(served: ServedService, data: str) -> Dataset:
    """Load a data set, by its name or from one of the folders. Raises BadRequestError, InvalidImageError."""
    config = served.service.config
    if data in DATASETS:
        return load_dataset(data, config.image_size, config.preprocessing)
    folder = find_inside(served.dataset_folders, data, "data", "data sets")
    if not os.path.isdir(folder):
        raise BadRequestError(f"data: {shown(data)}: no such folder.", param="data")
    names = [str(file.relative_to(folder)) for file in (*folder.glob("*"), *folder.glob("*/*"))]
    find_inside(served.dataset_folders, data, "data", "data sets", names)  # none is a link that leads out
    try:
        return load_dataset(str(folder), config.image_size, config.preprocessing)
    except ElasticError as error:  # the client knows the folder by its own path only
        raise BadRequestError(str(error).replace(str(folder), data), param="data") from error


def describe_task(served: ServedService, task: Task) -> dict[str, Any]:
    """Describe a task: its classes, and each level's accuracy and the seconds of its batches by size."""
    service = served.service
    levels = [level for level in service.levels if level <= 0 or level in task.prompts]
    return {
        "id": task.name,
        "object": "elastic.task",
        "model": served.name,
        "version": task.version,
        "classes": list(task.labels),
        "image_size": service.config.image_size,
        "levels": [_level(service, task, level) for level in levels],
    }


def _level(service: Service, task: Task, level: int) -> dict[str, Any]:
    """Describe a level; null stands for what was not measured."""
    seconds: dict[str, dict[str, float] | None] = {}
    for size in service.batch_sizes:
        try:
            seconds[str(size)] = service.latency.seconds(level, size)._asdict()
        except ProfileError:
            seconds[str(size)] = None
    try:
        accuracy = service.accuracy(task.name, level).accuracy
    except ProfileError:
        accuracy = None
    return {"level": level, "accuracy": accuracy, "batch_seconds": seconds}
