"""What is accepted fits, and what does not is refused before anything is read or written."""

import dataclasses
import re
import shutil

import jax
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoints.reading import GROUP_BYTES
from jaxinfer.compiled import ProgramSpec
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution import placement
from jaxinfer.generation.execution.placement import plan_placement
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import OpenedModel, open_model
from jaxinfer.sharding import MeshConfig
from jaxinfer.streaming.config import MemoryConfig
from tests.models import goldens
from tests.tiny import CONFIG as TINY
from tests.tiny import ONE_KIND, save_tiny

ONE = {"max_batch": 1, "token_budget": 8, "chunk_size": 8}
CONFIG = EngineConfig(context=128, **ONE)


def least(error):
    """The bytes of device_memory that an error asks for."""
    return int(re.search(r"raise device_memory (?:to at least|above) .*?\((\d+) bytes\)", str(error))[1])


@pytest.fixture(scope="module")
def same_layers(tmp_path_factory):
    """A model of two layers that one program runs."""
    return save_tiny(tmp_path_factory.mktemp("models") / "same", config=ONE_KIND)


@pytest.fixture
def unread(same_layers, tmp_path, monkeypatch):
    """A model directory without layer files, of which nothing can be read."""

    def read(self, only=None):
        raise AssertionError("a weight was read")

    shutil.copytree(same_layers, tmp_path / "model", ignore=shutil.ignore_patterns("layers-*", ".layers-*"))
    monkeypatch.setattr(OpenedModel, "read", read)
    return tmp_path / "model"


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["disk", "host", "device", "auto"])
def test_too_little_device_memory_is_refused_at_once_and_what_is_asked_for_works(unread, monkeypatch, weights):
    options = {"weights": weights, "context": 16, **ONE}  # a page is the whole cache, so that few programs do
    if weights == "auto":
        options["host_memory"] = 1
    with monkeypatch.context() as patch:
        patch.setattr(ProgramSpec, "compile", None)
        with pytest.raises(MemoryError, match="without cache and programs") as weights_alone:
            LLM(unread, device_memory=30_000, **options)
    assert "0 bytes reserved of" not in str(weights_alone.value)
    with pytest.raises(MemoryError, match="raise device_memory to at least") as refused:
        LLM(unread, device_memory=least(weights_alone.value) + 1, **options)
    enough = least(refused.value)
    with pytest.raises(MemoryError, match=rf"raise device_memory to at least .* \({enough} bytes\)"):
        LLM(unread, device_memory=enough - 1, **options)
    assert not list(unread.glob("*layers*"))
    monkeypatch.undo()
    with LLM(unread, device_memory=enough, **options) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4, output.outputs[0].error
        buffers = llm.placement.buffer_bytes if llm.placement else 0
        assert llm.memory.weights + llm.memory.cache + llm.memory.workspace + buffers <= enough


@pytest.mark.slow
def test_what_a_stage_takes_of_each_device_is_that_of_its_layers(tmp_path):
    path = save_tiny(tmp_path / "model", config=dataclasses.replace(TINY, layers=4))
    mesh = MeshConfig(pipeline=2).build(jax.devices()[:2])
    options = {"mesh": mesh, "weights": "device", "context": 16, **ONE}
    with pytest.raises(MemoryError) as weights_alone:
        LLM(path, device_memory=30_000, **options)
    with pytest.raises(MemoryError) as refused:
        LLM(path, device_memory=least(weights_alone.value) + 1, **options)
    opened, enough = open_model(path, mesh=mesh), least(refused.value)
    assert enough < open_model(path).bytes_per_device() + opened.manifest.bytes  # the half is what matters
    with LLM(path, device_memory=enough, **options) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4, output.outputs[0].error
        assert llm.memory.weights == opened.bytes_per_device()
        assert llm.memory.weights + llm.memory.cache + llm.memory.workspace <= enough
    with pytest.raises(ValueError, match=r"weights='disk' is not for a mesh with stages, and this one has pipeline=2"):
        LLM(path, **options | {"weights": "disk"})


@pytest.mark.slow
def test_a_given_cache_counts(unread, monkeypatch):
    opened = open_model(unread)
    with pytest.raises(MemoryError) as weights_alone:
        plan_placement(opened, CONFIG, MemoryConfig(weights="disk", device_memory=30_000))
    memory = MemoryConfig(weights="disk", device_memory=least(weights_alone.value) + 1)
    with pytest.raises(MemoryError) as small:
        plan_placement(opened, CONFIG, memory)
    page = placement.DeviceBytes(opened, CONFIG, memory).least_cache
    with pytest.raises(MemoryError) as large:
        plan_placement(opened, CONFIG, memory, cache_bytes=7 * page)
    assert least(large.value) - least(small.value) == pytest.approx(6 * page / 0.9, abs=2)
    with pytest.raises(ValueError, match="one page of 16 tokens takes"):
        LLM(unread, weights="disk", cache_bytes=page - 1, **ONE)
    monkeypatch.undo()
    llm = LLM(unread, weights="disk", device_memory=least(large.value), cache_bytes=7 * page, **ONE)
    assert llm.memory.num_pages == 7


# The host's memory


@pytest.fixture
def encoder(tmp_path):
    convert(goldens.DIRECTORY / "bert_awkward", tmp_path / "bert")
    return open_model(tmp_path / "bert")


def test_layers_in_the_hosts_memory_leave_room_to_load_them(encoder, monkeypatch):
    layers = encoder.transformer.layers * encoder.bytes_per_device(lambda name: name.startswith("layers.0."))
    loading = min(encoder.manifest.bytes, GROUP_BYTES)
    enough = int((layers + loading) / placement.FRACTION) + 1
    for free, fits in ((enough, True), (layers + loading, False)):
        monkeypatch.setattr(placement, "host_available_bytes", lambda free=free: free)
        for memory in (MemoryConfig(weights="host"), MemoryConfig(weights="host", host_memory=1 << 40)):
            if fits:
                assert set(plan_placement(encoder, CONFIG, memory).tiers) == {"host"}
                continue
            with pytest.raises(MemoryError, match="may be used: free memory of the host, or use weights='disk'"):
                plan_placement(encoder, CONFIG, memory)


def test_what_a_gpu_may_pin_is_checked_before_a_byte_is_read(encoder, monkeypatch):
    monkeypatch.setattr(OpenedModel, "platform", "gpu")
    plan = plan_placement(encoder, CONFIG, MemoryConfig(weights="host"))
    assert set(plan.tiers) == {"host"}
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0")
    remedy = r"raise the environment variable XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=0 before starting Python"
    with pytest.raises(MemoryError, match=remedy):
        plan_placement(encoder, CONFIG, MemoryConfig(weights="host"))
