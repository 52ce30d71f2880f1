"""The GPU that operations are traced for, and which of them run as kernels there."""

from types import SimpleNamespace

import jax
import pytest

from jaxinfer.compiled.target import Target
from jaxinfer.pallas_kernels import dispatch as module
from jaxinfer.pallas_kernels import target as target_module
from jaxinfer.pallas_kernels.dispatch import Operation, kernels_available, recorded_refusals
from jaxinfer.pallas_kernels.implementation import Implementation, composed, mosaic, reference, xla
from jaxinfer.pallas_kernels.target import FEATURES, GPU, UnsupportedError, require_shared_bytes, target_gpu, targeting

GPUS = {name: Target.load(name).gpu for name in Target.names()}


def kernel(x):
    return x + 1.0


def kernel_that_needs_memory(x):
    require_shared_bytes(120_000)
    return x + 1.0


def fallback(x):
    return x - 1.0


needs_wgmma = Operation("needs_wgmma", mosaic(kernel, "wgmma"), reference(fallback))
needs_memory = Operation("needs_memory", mosaic(kernel_that_needs_memory), reference(fallback))


def runs_as_kernel(operation) -> bool:
    return "add" in str(jax.make_jaxpr(lambda x: operation(x))(1.0))  # a function anew: traces are kept by function


@pytest.mark.parametrize("name", GPUS)
def test_the_table_of_capabilities(name):
    """Every feature on every target: a new one, or a new target, is a row to fill in here."""
    has = {feature for feature in FEATURES if GPUS[name].has(feature)}
    expected = {"a100": set(), "l4": set(), "b200": {"mosaic", "cudnn"}, "rtx-5090": {"mosaic", "cudnn"}}
    assert has == expected.get(name, {"mosaic", "wgmma", "cudnn"})


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


def asks_another(x):
    return needs_wgmma(x)


def test_a_kernel_that_runs_asks_nothing_of_its_fallback():
    operation = Operation("needs_memory", mosaic(kernel_that_needs_memory), composed(asks_another))
    with targeting(GPUS["b200"]), recorded_refusals() as refused:
        jax.make_jaxpr(operation)(1.0)
    assert not refused


def refuses(x):
    raise UnsupportedError("never")


def times_two(x):
    return x * 2.0


def test_the_first_implementation_that_takes_the_arguments_runs():
    second = Implementation(name="second", call=kernel, platform="cuda", needs=("mosaic",))
    operation = Operation("op", mosaic(refuses), second, xla(times_two, platform="cpu"), reference(fallback))
    assert operation(3.0) == 6.0  # on this CPU
    with targeting(GPUS["h200"]), recorded_refusals() as refused:
        assert runs_as_kernel(operation)
        with module.without_kernels("op"):
            assert "sub" in str(jax.make_jaxpr(operation)(1.0))
    assert not refused  # a kernel ran


def test_an_operation_inside_another_is_chosen_for_the_same_platform(device):
    """With a GPU here a program may be lowered for it or for the CPU, and each gets its implementations all through."""
    inner = Operation("inner", mosaic(refuses), xla(times_two, platform="cpu"), reference(fallback))
    runs = {kernel: "add", fallback: "subtract", times_two: "multiply"}
    for first, expected in ((kernel, kernel), (refuses, fallback)):
        outer = Operation("outer", mosaic(first), xla(times_two, platform="cpu"), composed(lambda x: inner(x)))
        traced = jax.jit(outer).trace(1.0)
        for platform, run in (("cpu", times_two), ("cuda", expected)):
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            assert {name for name in runs.values() if f"stablehlo.{name}" in text} == {runs[run]}


@pytest.fixture
def device(monkeypatch):
    """A stand-in for this machine's first device, as JAX describes it."""
    described = SimpleNamespace(device_kind="NVIDIA H20", compute_capability="9.0", core_count=78)
    described.shared_memory_per_block_optin = 232_448
    monkeypatch.setattr(jax, "devices", lambda: [described])
    target_module._local_gpu.cache_clear()
    yield described
    target_module._local_gpu.cache_clear()


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
