"""`/v1/experts/infer` and `/v1/experts`: inputs for a system of experts."""

import functools
import itertools
from collections.abc import Awaitable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from starlette.requests import Request

from jaxinfer.experts.errors import InvalidInputError, RoutingError
from jaxinfer.experts.execution.kinds import (
    Classifier,
    Detector,
    ExpertKind,
    TextEncoder,
)
from jaxinfer.experts.results import Classification, Detection, EmbeddingVector, Judgement, Result, Stage
from jaxinfer.experts.system import System
from jaxinfer.fields import NotNegative
from jaxinfer.http.bodies import Body, decode
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.limits import Limits
from jaxinfer.http.vision.forms import is_form, read_form
from jaxinfer.http.vision.images import ImageFile, ImageThreads, Source, decode_image, source_of
from jaxinfer.http.vision.results import Until, answer_of, check_count, results_of
from jaxinfer.http.vision.served import ServedSystem


class InferInput(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An input: an image or a text.

    Attributes:
      kind: the name of one of the system's inputs.
      image: a data URL, plain base64, or a file in one of the image folders.
      text: the text, for an encoder.
    """

    kind: str
    image: str | ImageFile | None = None
    text: str | None = None


class InferOptions(Body, kw_only=True):
    """The fields of a request that hold for all of its inputs.

    Attributes:
      model: the system's name; empty: the only one.
      deadline: seconds within which the last expert must have begun; None: the server's limit.
    """

    model: str = ""
    deadline: NotNegative | None = None


class InferBody(InferOptions, kw_only=True):
    """The body of `/v1/experts/infer`."""

    inputs: list[InferInput]


class Upload(NamedTuple):
    """An input of a form: its kind, and the content of its file."""

    kind: str
    image: bytes


class Given(NamedTuple):
    """An input that was checked as far as nothing is decoded: its field, its kind, and its image or text."""

    place: str
    kind: str
    image: Source | None
    text: str | None = None


class Prepared(NamedTuple):
    """An input as the system takes it: its value, and the height and width of the image that it was made from."""

    value: np.ndarray
    shape: tuple[int, int]


async def read_infer(request: Request, limits: Limits) -> tuple[InferOptions, Sequence[InferInput | Upload]]:
    """Read a request's options and inputs, from JSON or a form. Raises BadRequestError."""
    if not is_form(request):
        body = decode(await limits.read_body(request), InferBody)
        check_count("inputs", body.inputs, limits)
        return body, body.inputs
    form = await read_form(request, limits, InferOptions, ["kind"])
    kinds, images = form.lists["kind"], form.images
    if not kinds:
        raise BadRequestError("kind is missing; give one for all images, or one for each.", param="kind")
    if len(kinds) not in (1, len(images)):
        raise BadRequestError(
            f"kind comes {len(kinds)} times; give one for all images, or one for each of {len(images)}.", param="kind"
        )
    return form.options, [Upload(*each) for each in zip(itertools.cycle(kinds), images, strict=False)]


def _checked(place: int, given: InferInput | Upload, served: ServedSystem) -> Given:
    """Check an input, without decoding anything. Raises BadRequestError."""
    if isinstance(given, Upload):
        checked, param = Given(f"image[{place}]", given.kind, given.image), "kind"
    elif (given.image is None) == (given.text is None):
        raise BadRequestError(f"inputs[{place}] must have either image or text.", param=f"inputs[{place}]")
    else:
        name, param = f"inputs[{place}].{'text' if given.image is None else 'image'}", f"inputs[{place}].kind"
        image = None if given.image is None else source_of(given.image, name, served.image_folders)
        checked = Given(name, given.kind, image, given.text)
    try:
        served.system.graph.first(given.kind)
    except RoutingError as error:
        raise BadRequestError(f"{param}: {error}", param=param) from None
    return checked


async def infer(
    served: ServedSystem,
    options: InferOptions,
    inputs: Sequence[InferInput | Upload],
    limits: Limits,
    threads: ImageThreads,
) -> dict[str, Any]:
    """Judge all inputs of a request. Raises BadRequestError, and the error of the inputs if none has a result."""
    system, checked = served.system, [_checked(place, each, served) for place, each in enumerate(inputs)]
    deadlines = [each for each in (options.deadline, limits.timeout) if each is not None]
    until = Until(min(deadlines)) if deadlines else None

    def prepare(given: Given) -> Awaitable[Prepared]:
        return threads.run(functools.partial(_prepare, system, given, limits.max_image_pixels))

    async def judge(given: Given, prepared: Prepared) -> dict[str, Any]:
        try:
            future = system.submit(given.kind, prepared.value, deadline=None if until is None else until.check())
        except InvalidInputError as error:
            raise BadRequestError(f"{given.place}: {error}", param=given.place) from error
        return _described(system, given, prepared, await future)

    return answer_of("experts.results", served.name, await results_of(checked, prepare, judge))


def _prepare(system: System, given: Given, max_pixels: int) -> Prepared:
    """Make what the first expert takes of an input. Raises BadRequestError, LoadError."""
    kind, place = system.opened.find(system.graph.first(given.kind)).kind, given.place
    if given.image is not None and isinstance(kind, TextEncoder):
        raise BadRequestError(f"{place}: inputs of kind {given.kind!r} are texts.", param=place)
    if given.image is None and not isinstance(kind, TextEncoder):
        raise BadRequestError(f"{place}: inputs of kind {given.kind!r} are images.", param=place)
    try:
        if given.image is None:
            ids = kind.check(given.text)
            return Prepared(ids[ids >= 0], (0, 0))  # which `submit` pads again
        pixels = decode_image(given.image, place, max_pixels)
        return Prepared(kind.fit(pixels), pixels.shape[:2])
    except BadRequestError:
        raise
    except ValueError as error:
        raise BadRequestError(f"{place}: {error}", param=place) from error


def _described(system: System, given: Given, prepared: Prepared, result: Result) -> dict[str, Any]:
    first = system.opened.find(system.graph.first(given.kind)).kind
    stages = [_stage(system, stage, first, prepared.shape) for stage in result.stages]
    return {"kind": given.kind, "verdict": result.verdict, "seconds": result.latency, "stages": stages}


def _stage(system: System, stage: Stage, first: ExpertKind, shape: tuple[int, int]) -> dict[str, Any]:
    """Describe a stage.

    Args:
      system: the system.
      stage: the stage.
      first: the kind of the first expert, which the image was resized for.
      shape: the image's height and width.
    """
    kind = system.opened.find(stage.expert).kind
    return {
        "expert": stage.expert,
        "verdict": stage.judgement.verdict,
        **_answer(stage.judgement, kind.verdicts, first, shape),
        "executor": stage.executor,
        "batch": stage.batch,
        "queue_seconds": stage.waited,
        "compute_seconds": stage.seconds,
    }


def _answer(judgement: Judgement, labels: tuple[str, ...], first: ExpertKind, shape: tuple[int, int]) -> dict[str, Any]:
    match judgement:
        case Classification():
            return {"scores": dict(zip(labels, judgement.probabilities.tolist(), strict=True))}
        case Detection():
            boxes = first.unfit(judgement.boxes, shape).tolist()
            rows = zip(judgement.labels, judgement.scores.tolist(), boxes, strict=True)
            return {"boxes": [{"label": label, "score": score, "box": box} for label, score, box in rows]}
        case EmbeddingVector():
            return {"vector": judgement.vector.tolist()}
        case _:
            return {}


def describe_system(served: ServedSystem) -> dict[str, Any]:
    """Describe a system for `/v1/experts`; one that is being loaded has no experts yet."""
    described = {"id": served.name, "object": "experts", "state": served.state}
    if not served.is_loaded:
        return described | {"inputs": [], "experts": [], "executors": []}
    system = served.system
    return described | {
        "inputs": [kind.name for kind in system.opened.config.inputs],
        "experts": [_expert(system, name) for name in system.graph.experts],
        "executors": [executor.name for executor in system.opened.config.executors],
    }


def _expert(system: System, name: str) -> dict[str, Any]:
    if (expert := system.experts.get(name)) is None:
        return {"name": name, "kind": "unavailable"}  # why is in the log: it names files of the server
    match expert.kind:
        case Classifier():
            kind = "classifier"
        case Detector():
            kind = "detector"
        case _:
            kind = "encoder"
    return {"name": name, "kind": kind, "labels": list(expert.kind.verdicts), "shape": list(expert.kind.shape)}
