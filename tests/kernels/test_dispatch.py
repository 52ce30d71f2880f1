"""The GPU that operations are traced for, and which of them run as kernels there."""

from types import SimpleNamespace

import jax
import pytest

from jaxinfer.compiled.target import Target
from jaxinfer.pallas_kernels import dispatch as module
from jaxinfer.pallas_kernels.dispatch import (
    dispatch,
    kernels_available,
    recorded_refusals,
    require_shared_bytes,
    require_wgmma,
    target_gpu,
    targeting,
)
from jaxinfer.pallas_kernels.gpu import GPU

GPUS = {name: Target.load(name).gpu for name in Target.names()}


def needs_wgmma(x):
    require_wgmma()
    return x + 1.0


def needs_memory(x):
    require_shared_bytes(120_000)
    return x + 1.0


def fallback(x):
    return x - 1.0


def runs_as_kernel(kernel) -> bool:
    program = jax.make_jaxpr(lambda x: dispatch(kernel.__name__, kernel, fallback, x))(1.0)
    return "add" in str(program)


@pytest.mark.parametrize("name", GPUS)
def test_each_kernel_gets_what_it_needs_or_runs_its_fallback(name):
    hopper, mosaic = GPUS[name].capability == (9, 0), name not in ("a100", "l4")
    with targeting(GPUS[name]), recorded_refusals() as refused:
        assert kernels_available() is mosaic
        assert runs_as_kernel(needs_wgmma) is hopper
        assert runs_as_kernel(needs_memory) is (hopper or name == "b200")
    assert refused.keys() == ({"needs_wgmma"} if name == "b200" else set() if hopper or not mosaic else {
        "needs_wgmma", "needs_memory",
    })  # fmt: skip
    assert not kernels_available()  # this machine has no GPU


def test_a_refusal_is_said_once(caplog):
    module._warn_once.cache_clear()
    with targeting(GPUS["b200"]):
        assert not any(runs_as_kernel(needs_wgmma) for _ in range(3))
    with targeting(GPUS["l4"]):
        assert not any(runs_as_kernel(needs_wgmma) for _ in range(3))
    assert caplog.messages == [
        "needs_wgmma runs as plain XLA on NVIDIA B200: it needs wgmma, which only sm_90 has",
        "NVIDIA L4 (sm_89) runs plain XLA: kernels need sm_90 or newer",
    ]


def test_a_kernel_that_runs_asks_nothing_of_its_fallback():
    def composed(x):
        return dispatch("needs_wgmma", needs_wgmma, fallback, x)

    with targeting(GPUS["b200"]), recorded_refusals() as refused:
        jax.make_jaxpr(lambda x: dispatch("needs_memory", needs_memory, composed, x))(1.0)
    assert not refused


@pytest.fixture
def device(monkeypatch):
    """A stand-in for this machine's first device, as JAX describes it."""
    described = SimpleNamespace(device_kind="NVIDIA H20", compute_capability="9.0", core_count=78)
    described.shared_memory_per_block_optin = 232_448
    monkeypatch.setattr(jax, "devices", lambda: [described])
    module._local_gpu.cache_clear()
    yield described
    module._local_gpu.cache_clear()


def test_the_gpu_of_this_machine(device):
    assert target_gpu() == GPUS["h20"]
    with targeting(GPUS["b200"]):  # compiled for another one
        assert target_gpu() == GPUS["b200"]


def test_a_gpu_of_amd_has_no_kernels(device):
    device.compute_capability = "gfx942"
    assert not kernels_available()


@pytest.mark.gpu
def test_jax_describes_its_gpu():
    gpu = target_gpu()
    assert gpu.sms > 0
    assert gpu.shared_bytes >= 99 << 10


def test_two_blocks_share_an_sm():
    gpu = GPU(name="x", capability=(9, 0), sms=1, shared_bytes=227 << 10)
    assert [gpu.shared_bytes_of(blocks) for blocks in (1, 2, 3)] == [227 << 10, 113 << 10, 75 << 10]
