"""The paper's two machines (its Table 1) as costs of executors, batches and loads.

The paper gives no K, B or seconds of a load. These are calibrated to its totals: see docs/experts.md.
"""

import dataclasses

from jaxinfer.experts.scheduling.executor_state import ExecutorConfig
from jaxinfer.experts.scheduling.experts import ExpertGraph
from jaxinfer.experts.scheduling.policy import Policy
from jaxinfer.experts.scheduling.profile import Profile, Profiles, Tier
from jaxinfer.experts.scheduling.scheduler import Scheduler

MB, GB = 10**6, 10**9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """The costs of an architecture's experts.

    Attributes:
      bytes: bytes of the weights.
      gpu, cpu: K and B in seconds, and the largest batch.
      activations: bytes of one image in a batch.
    """

    bytes: int
    gpu: tuple[float, float, int]
    cpu: tuple[float, float, int]
    activations: int


ARCHITECTURES = {
    "resnet101": Architecture(bytes=178_600_000, gpu=(0.021, 0.018, 6), cpu=(0.75, 0.10, 4), activations=268 * MB),
    "yolov5m": Architecture(bytes=84_900_000, gpu=(0.009, 0.014, 8), cpu=(0.33, 0.05, 4), activations=150 * MB),
    "yolov5l": Architecture(bytes=186_500_000, gpu=(0.017, 0.018, 6), cpu=(0.68, 0.10, 4), activations=220 * MB),
}
RESNET = ARCHITECTURES["resnet101"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """A machine with one GPU.

    Attributes:
      gpu_bytes: bytes of the GPU for executors, including their contexts.
      cpu_bytes: bytes of the host's memory for a CPU executor, or for a cache of experts.
      unified: whether both are one memory, so that a cache on the host would save nothing.
      disk: bytes per second.
      experts: ResNet101 experts that fit the GPU executors' pools in the best layout, for boards A and B.
      software: seconds of a load from disk on top of reading and copying: making the model, unpickling.
      cpu_batch: largest batch of ResNet101 on the CPU.
      batches: compiled batch sizes: a batch takes as long as the next of them; none: each size.
    """

    name: str
    gpu_bytes: int
    cpu_bytes: int
    unified: bool
    disk: float
    experts: tuple[int, int]
    software: float = 1.0
    cpu_batch: int = 4
    batches: tuple[int, ...] = ()

    @property
    def image(self) -> int:
        """The bytes of one image's activations."""
        return RESNET.activations


NUMA = Machine(name="NUMA", gpu_bytes=int(11.2 * GB), cpu_bytes=6 * GB, unified=False, disk=530e6, experts=(35, 34))
"""RTX 3080Ti with 12 GB; the system and frameworks have the rest of the host's 16 GB."""
UMA = Machine(name="UMA", gpu_bytes=16 * GB, cpu_bytes=4 * GB, unified=True, disk=3e9, experts=(60, 60), cpu_batch=5)
"""Apple M2 with 24 GB, of which a GPU may use two thirds; 4 are the system's.

Other costs are NUMA's: the paper has no figure to calibrate them by.
"""
EFFICIENT = dataclasses.replace(NUMA, name="NUMA, efficient loader", software=0.02)
"""A machine whose files are mapped and copied, without making a model: as our own loader does."""

CONTEXT = 400 * MB
"""Bytes of the GPU that an executor takes on top of experts and activations."""
COPY_SECONDS, COPY_RATE = 0.02, 6e9
"""Fixed seconds, and bytes per second, of a load to the GPU from the host's pageable memory."""
EFFICIENCY = (1.0, 1.15, 1.25, 1.22, 1.05, 0.9)
"""Speed of n executors together relative to one, for n from 1: they share one GPU.

From 4 on it is set so that throughput is best with 3 or 4 executors, as in the paper's Figure 17.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The division of a machine's memory.

    Attributes:
      gpus: number of GPU executors.
      cpus: number of CPU executors, 0 or 1.
      experts: room in all GPU executors' pools together, in ResNet101 experts.
      host_experts: room in the cache in the host's memory, taken from the CPU executor's.
    """

    gpus: int
    cpus: int
    experts: float
    host_experts: float = 0.0


def largest_pool(machine: Machine, gpus: int) -> int:
    """The number of ResNet101 experts that fit beside one image per executor."""
    return int((machine.gpu_bytes - gpus * (CONTEXT + machine.image)) // RESNET.bytes)


def best_layout(machine: Machine, board: str, gpus: int, cpus: int = 1) -> Layout:
    """The paper's layout for a board, found by its searches."""
    return Layout(gpus=gpus, cpus=cpus, experts=machine.experts["AB".index(board)])


def casual(machine: Machine) -> Layout:
    """The paper's untuned layout: 75% of the GPU's memory for experts."""
    experts = 0.75 * machine.gpu_bytes / RESNET.bytes
    return Layout(gpus=2 if machine.unified else 3, cpus=1, experts=experts)


def profiles(machine: Machine, gpus: int) -> Profiles:
    """Make the profiles of all architectures if `gpus` GPU executors run."""
    slowdown = gpus / EFFICIENCY[gpus - 1]
    made = {}
    for name, costs in ARCHITECTURES.items():
        copy = COPY_SECONDS + costs.bytes / COPY_RATE
        read = costs.bytes / machine.disk + machine.software
        k, b, max_batch = costs.gpu
        made[name, "gpu"] = Profile(
            k=k * slowdown,
            b=b,
            max_batch=max_batch,
            load={"disk": read + copy, "host": copy},
            activation_bytes=costs.activations,
            latency={size: k * slowdown * size + b for size in machine.batches},
        )
        k, b, max_batch = costs.cpu
        cpu_batch = machine.cpu_batch if name == "resnet101" else max_batch
        made[name, "cpu"] = Profile(
            k=k, b=b, max_batch=cpu_batch, load={"disk": read, "host": 0.0}, activation_bytes=costs.activations
        )
    return made


class SimulatedHardware:
    """Hardware that reads one file at a time; each executor makes and copies models by itself.

    Args:
      machine: the machine with the disk.
      profiles: the profiles of batches.
    """

    def __init__(self, machine: Machine, profiles: Profiles):
        self._machine, self._profiles, self._disk_free = machine, profiles, 0.0

    def load(self, architecture: str, size: int, processor: str, tier: Tier, now: float) -> float:
        copy = COPY_SECONDS + size / COPY_RATE if processor == "gpu" else 0.0
        if tier == "host":
            return now + copy
        self._disk_free = max(now, self._disk_free) + size / self._machine.disk
        return self._disk_free + self._machine.software + copy

    def execute(self, architecture: str, processor: str, batch: int) -> float:
        return self._profiles[architecture, processor].seconds(batch)


def executors(machine: Machine, layout: Layout) -> list[ExecutorConfig]:
    """Make the configs of GPU executors with equal parts of the memory, then the CPU's."""
    experts = int(layout.experts * RESNET.bytes)
    activations = machine.gpu_bytes - layout.gpus * CONTEXT - experts
    gpus = [
        ExecutorConfig(
            name=f"gpu{index}",
            processor="gpu",
            device="gpu",
            expert_bytes=experts // layout.gpus,
            activation_bytes=activations // layout.gpus,
        )
        for index in range(layout.gpus)
    ]
    if not layout.cpus:
        return gpus
    batch = machine.cpu_batch * machine.image
    rest = machine.cpu_bytes - int(layout.host_experts * RESNET.bytes) - batch
    cpu = ExecutorConfig(name="cpu", processor="cpu", device="cpu", expert_bytes=rest, activation_bytes=batch)
    return [*gpus, cpu]


def system(machine: Machine, layout: Layout, policy: Policy, graph: ExpertGraph) -> tuple[Scheduler, SimulatedHardware]:
    """Make a scheduler with its experts placed, and the hardware it runs on.

    A policy of one executor (Samba-CoE) has all of the GPU but one image's activations, and the host's memory as cache.
    """
    host = int(layout.host_experts * RESNET.bytes)
    if policy.one_executor:
        pool = (machine.gpu_bytes - CONTEXT - machine.image) / RESNET.bytes
        layout, host = Layout(gpus=1, cpus=0, experts=pool), 0 if machine.unified else machine.cpu_bytes
    costs = profiles(machine, layout.gpus)
    scheduler = Scheduler(graph, costs, executors(machine, layout), policy, host_bytes=host)
    scheduler.manager.place()
    return scheduler, SimulatedHardware(machine, costs)
