"""Every number that a caller can give, found in the public signatures, is taken or refused by its name."""

import asyncio
import collections.abc
import contextlib
import enum
import functools
import inspect
import math
import time
import types
import typing

import numpy as np
import pytest

import jaxinfer
from jaxinfer import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    Embedder,
    MeshConfig,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    elastic,
    experts,
)
from jaxinfer.elastic import Division, Service, TokenAdaptation, TrainingConfig
from jaxinfer.experts import ExecutorOptions, ExpertConfig, InputKind, Policy, Rule, System
from jaxinfer.serving.errors import DeadlineExceededError, ShedError
from tests.elastic.vits import QUICK, stripes
from tests.experts.boards import AnyProfiles, config, image
from tests.generation.conftest import PLAIN
from tests.generation.few_programs import few_programs

PACKAGES = jaxinfer, experts, elastic
RESULTS = {
    *("Answer", "BeamSearchOutput", "Classification", "EngineStats", "Latency", "LevelAccuracy", "Profile", "Request"),
    *("RequestOutput", "Result", "Stage", "Task"),
}
"""What callers get, and do not make."""
OF_MODELS = {
    "ShardingRules.fetch_sharding",
    "ShardingRules.sharding",
    "TokenAdaptation.counts",
    "TokenAdaptation.run_layers",
}
"""What models call with numbers of their configs."""
SAME = {"LoadOptions": ("LLM", "ModelOptions")}
"""Options that are those of others."""
INTEGERS = [-1, 0, True, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400, np.int64(2**62)]
FLOATS = [3e38, -3e38, 1e30, 0.5, math.inf, -math.inf, math.nan, np.float32("nan")]
VALUES = [*INTEGERS, *FLOATS, "1", b"1", object()]
SYNONYMS = {"texts": "Text 0", "inputs": "Text 0", "prompts": "prompt", "merge_levels": "level "}
LONGEST = 400
"""Characters of an error, whose first line is for all; others say who has the memory."""
SURE_TO_END = 60.0


def holds(kind, *wanted):
    """Whether a type, or a part of it, is one of those."""
    if kind in wanted or typing.get_origin(kind) in wanted:
        return True
    callables = typing.get_origin(kind) is collections.abc.Callable  # their numbers are for the caller
    return not callables and any(holds(part, *wanted) for part in typing.get_args(kind))


def options_of(name, function):
    """The options of a function that hold numbers: {owner: {option: type}}. Those of a TypedDict have its name."""
    found = collections.defaultdict(dict)
    for option, parameter in inspect.signature(function).parameters.items():
        if typing.get_origin(kind := parameter.annotation) is typing.Unpack:
            (options,) = typing.get_args(kind)
            found[options.__name__] |= typing.get_type_hints(options)
        else:
            found[name][option] = kind
    return {
        owner: numbers
        for owner, options in found.items()
        if (numbers := {key: kind for key, kind in options.items() if holds(kind, int, float)})
    }


@functools.cache
def public_numbers():
    """The options with numbers of all public functions, classes and their methods."""
    found = {}
    for package in PACKAGES:
        for name in package.__all__:
            value = getattr(package, name)
            if isinstance(value, types.FunctionType):
                found |= options_of(name, value)
            if not inspect.isclass(value) or name in RESULTS or issubclass(value, dict | enum.Enum | Exception):
                continue
            found |= options_of(name, value)
            for key, method in inspect.getmembers(value):
                if not key.startswith("_") and (inspect.isfunction(method) or inspect.ismethod(method)):
                    found |= options_of(f"{name}.{key}", method)
    return {owner: options for owner, options in found.items() if owner not in OF_MODELS}


def tried(kind):
    """The values to try for a type: each, and in the containers that the type takes."""
    for value in VALUES:
        yield value
        if holds(kind, collections.abc.Sequence, list, tuple):
            yield [value]
            yield (value, value)
        if holds(kind, dict):
            yield {1: value}
            yield {value: 1.0}


def fault(option, value, call):
    """What was wrong with the error of a call, if anything."""
    start = time.monotonic()
    try:
        call(**{option: value})
    except (DeadlineExceededError, ShedError):
        pass  # at 0 s
    except (ValueError, MemoryError) as error:
        first, *_ = str(error).splitlines()
        if option not in first and SYNONYMS.get(option, option) not in first:
            return f"does not name it: {first}"
        if len(first) > LONGEST:
            return f"is long: {first}"
    except BaseException as error:
        return repr(error)
    return None if time.monotonic() - start < SURE_TO_END else "took long"


@pytest.fixture(scope="module")
def calls(model_dir, vit, registered, service_options, board, tmp_path_factory):
    """A call of each, which needs only the option that is tried."""
    stack = contextlib.ExitStack()
    encoder, picture, photos = board / "e0", stripes(1).images[0], tmp_path_factory.mktemp("images")
    for name in ("a", "b"):
        (photos / name).mkdir()
        (photos / name / "0.png").touch()
    cifar = tmp_path_factory.mktemp("cifar")
    (cifar / "fine_label_names.txt").write_text("a\nb")
    (cifar / "train.bin").write_bytes(bytes(2 + 3 * 32 * 32))
    with few_programs():
        llm = stack.enter_context(LLM(model_dir, **PLAIN))
        served = stack.enter_context(contextlib.closing(AsyncLLM(model_dir, **PLAIN)))
        asleep = stack.enter_context(contextlib.closing(AsyncLLM(model_dir, **PLAIN, asleep=True)))
    service = stack.enter_context(Service.from_checkpoint(vit, repository=registered, **service_options))
    service.measure_latency()
    system = stack.enter_context(System(config(board, ["c0"]), profiles=AnyProfiles()))
    one, prompt, hello = SamplingParams(max_tokens=1), {"prompt": [7]}, [{"role": "user", "content": "hi"}]
    beams = {"beam_width": 1, "max_tokens": 1}

    def load(**options):
        LLM(model_dir, **{"max_batch": 1, "context": 32} | options).close()

    def serve(**options):
        Service.from_checkpoint(vit, repository=registered, **service_options | options).close()

    yield {
        "LLM": load,
        "ModelOptions": load,
        "LLM.beam_search": lambda **o: llm.beam_search(**o, params=BeamSearchParams(**beams)),
        "LLM.close": lambda **o: LLM(model_dir, max_batch=1, context=32).close(**o),
        "LLM.embed": llm.embed,
        "LLM.generate": lambda **o: llm.generate(**o, sampling_params=one),
        "LLM.prepare": llm.prepare,
        "LLM.stream": lambda **o: list(llm.stream(**{"prompts": [[7]]} | o, sampling_params=one)),
        "AsyncLLM": lambda **o: AsyncLLM(model_dir, max_batch=1, context=32, **o).close(),
        "AsyncLLM.close": lambda **o: AsyncLLM(model_dir, max_batch=1, context=32).close(**o),
        "AsyncLLM.chat": lambda **o: asyncio.run(served.chat(hello, one, **o).final()),
        "AsyncLLM.embed": lambda **o: asyncio.run(served.embed(**{"texts": [[7]]} | o)),
        "AsyncLLM.check_room": served.check_room,
        "AsyncLLM.generate": lambda **o: asyncio.run(
            served.generate(**{"prompt": [7]} | o, sampling_params=one).final()
        ),
        "AsyncLLM.prepare": served.prepare,
        "AsyncLLM.sleep": asleep.sleep,
        "AsyncLLM.submit": lambda **o: served.submit(**prompt | o, sampling_params=one).result(),
        "BeamSearchParams": lambda **o: llm.beam_search([[7]], BeamSearchParams(**beams | o)),
        "Embedder": lambda **o: Embedder(encoder, **{"max_batch": 1} | o).close(),
        "Embedder.close": lambda **o: Embedder(encoder, max_batch=1).close(**o),
        "Embedder.embed": stack.enter_context(Embedder(encoder, max_batch=1)).embed,
        "MeshConfig": MeshConfig,
        "PoolingParams": PoolingParams,
        "SamplingParams": lambda **o: llm.generate([[7]], SamplingParams(**{"max_tokens": 1} | o)),
        "StructuredOutputsParams": lambda **o: StructuredOutputsParams(regex="a", reasoning_tags=("", "b"), **o),
        "ExecutorOptions": lambda **o: ExecutorOptions(**{"name": "a", "expert_memory": 1} | o),
        "ExpertConfig": lambda **o: ExpertConfig(name="a", checkpoint=board / "c0", **o),
        "InputKind": lambda **o: InputKind(name="a", expert="c0", **o),
        "Policy": Policy,
        "Rule": lambda **o: Rule(expert="a", verdict="b", next="c", **o),
        "System.close": lambda **o: System(config(board, ["c0"]), profiles=AnyProfiles()).close(**o),
        "System.submit": lambda **o: system.submit("c0", image(0), **o).result(),
        "SystemConfig": lambda **o: config(board, ["c0"], **o),
        "Dataset.split": lambda **o: stripes().split(**{"share": 0.2} | o),
        "Division": Division,
        "ServiceOptions": serve,
        "Service.accuracy": lambda **o: service.accuracy("stripes", **o),
        "Service.adaptation": service.adaptation,
        "Service.classify": lambda **o: service.classify(picture, "stripes", **o),
        "Service.close": lambda **o: Service.from_checkpoint(vit, repository=registered, **service_options).close(**o),
        "Service.compile_ahead": service.compile_ahead,
        "Service.measure_latency": service.measure_latency,
        "RegistrationOptions": lambda **o: service.register_task("other", stripes(), training=QUICK, **o),
        "Service.serving_profile": service.serving_profile,
        "Service.submit": lambda **o: service.submit(picture, "stripes", **{"deadline": 60.0} | o).result(),
        "TokenAdaptation": TokenAdaptation,
        "TrainingConfig": TrainingConfig,
        "load_cifar": functools.partial(elastic.load_cifar, cifar),
        "load_dataset": functools.partial(elastic.load_dataset, "digits"),
        "load_digits": elastic.load_digits,
        "load_faces": elastic.load_faces,
        "load_image": functools.partial(elastic.load_image, photos / "a" / "0.png"),
        "load_image_folder": functools.partial(elastic.load_image_folder, photos),
        "load_mnist": elastic.load_mnist,
        "load_textures": elastic.load_textures,
    }
    stack.close()


SLOW = {
    *("AsyncLLM.close", "Embedder.close", "LLM", "LLM.close", "ModelOptions", "ServiceOptions", "Service.close"),
    *("LLM.beam_search", "load_dataset", "load_mnist"),
}
"""Calls that make whole engines, compile more programs, or read thousands of images."""


@pytest.mark.parametrize(
    "owner",
    [
        pytest.param(owner, marks=pytest.mark.slow) if owner in SLOW else owner
        for owner in public_numbers()
        if owner not in SAME
    ],
)
def test_a_number_is_taken_or_refused_by_its_name(calls, owner):
    faults = {
        f"{option}={value!r:.40}": found
        for option, kind in public_numbers()[owner].items()
        for value in tried(kind)
        if (found := fault(option, value, calls[owner]))
    }
    assert not faults


def test_options_of_others_are_tried_there():
    found = public_numbers()
    for name, owners in SAME.items():
        assert found[name].keys() <= {option for owner in owners for option in found[owner]}
