"""Sums of an engine's work so far, and its load of the moment."""

import dataclasses
from collections import Counter
from typing import NamedTuple

from jaxinfer.generation.engine.page_tier import TierStats
from jaxinfer.generation.outputs import ExpertLoad, FinishReason
from jaxinfer.serving.statistics import Statistics
from jaxinfer.streaming.statistics import StreamingStatistics


class SchedulerStats(NamedTuple):
    """The load of a scheduler: completions (a request has `n`) and pages of the KV cache.

    Attributes:
      running: completions that run.
      waiting: completions that wait.
      preemptions: how often one had to wait again, so far.
      used_pages: pages that running completions have.
      num_pages: all pages; 0 for an encoder, which has no cache.
    """

    running: int
    waiting: int
    preemptions: int = 0
    used_pages: int = 0
    num_pages: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineStats:
    """The work of the stages of a pipeline, so far.

    Attributes:
      slots: ticks of all stages.
      idle_slots: those in which a stage had no micro-batch.
    """

    slots: int = 0
    idle_slots: int = 0

    def __add__(self, other: "PipelineStats") -> "PipelineStats":
        return PipelineStats(slots=self.slots + other.slots, idle_slots=self.idle_slots + other.idle_slots)

    def __sub__(self, other: "PipelineStats") -> "PipelineStats":
        return PipelineStats(slots=self.slots - other.slots, idle_slots=self.idle_slots - other.idle_slots)

    @property
    def idle_share(self) -> float:
        """The share of slots that were idle (the pipeline's bubbles), from 0 to 1."""
        return _share(self.idle_slots, self.slots)


class ExecutorReport(NamedTuple):
    """The needs and the work of an executor so far.

    Attributes:
      workspace_bytes: workspace of the largest program compiled so far, on each device.
      pipeline: the work of a pipeline's stages; None without one.
      streaming: measurements of bringing layers to the devices; None if all are there.
    """

    workspace_bytes: int = 0
    pipeline: PipelineStats | None = None
    streaming: StreamingStatistics | None = None


@dataclasses.dataclass(kw_only=True)
class Counters:
    """The sums of `EngineStats`, as the engine counts them."""

    ended: Counter[FinishReason] = dataclasses.field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    expert_load: ExpertLoad | None = None
    steps: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A model's state of the moment, and its sums since it was loaded. Completions count: a request has `n`.

    Attributes:
      running: completions that run.
      waiting: completions that wait for room; of an `AsyncLLM`, those that wait for `max_requests`, too.
      ended: how many ended, by why.
      prompt_tokens: tokens of the prompts that have begun.
      cached_tokens: how many of these were in the cache.
      generated_tokens: output tokens.
      draft_tokens: tokens that the n-gram proposer suggested.
      accepted_tokens: suggested tokens that were right.
      used_pages: pages of the KV cache that running completions have.
      num_pages: all pages; 0 for an encoder, which has no cache.
      preemptions: how often a completion gave its pages to another, and waited again.
      steps: steps of the engine.
      compile_misses: programs that were compiled when a step needed them, rather than ahead.
      cpu_kernels: the instruction set of the CPU kernels that programs run; None: plain XLA, or a GPU.
      expert_load: where the tokens of all requests went in a mixture of experts; None before the first, and unless the
        engine has `expert_load=True`.
      pipeline: what the stages of a pipeline did; None without one.
      host_kv: pages of the prefix cache in the host's memory; None without `host_kv`.
      disk_kv: its pages on disk; None without `disk_kv`.
      requests: how the requests of an `AsyncLLM` have ended, where cancelled and late ones count too; else None.
      running_adapters: how many requests of an `AsyncLLM` run with each LoRA adapter.
      waiting_adapters: how many of them wait for each.
    """

    running: int
    waiting: int
    ended: dict[FinishReason, int]
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    draft_tokens: int
    accepted_tokens: int
    used_pages: int
    num_pages: int
    preemptions: int
    steps: int
    compile_misses: int
    cpu_kernels: str | None = None
    expert_load: ExpertLoad | None = None
    pipeline: PipelineStats | None = None
    host_kv: TierStats | None = None
    disk_kv: TierStats | None = None
    requests: Statistics | None = None
    running_adapters: dict[str, int] = dataclasses.field(default_factory=dict)
    waiting_adapters: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def cache_hit_rate(self) -> float:
        """The share of prompt tokens found in the prefix cache, from 0 to 1."""
        return _share(self.cached_tokens, self.prompt_tokens)

    @property
    def acceptance_rate(self) -> float:
        """The share of speculative tokens that were accepted, from 0 to 1."""
        return _share(self.accepted_tokens, self.draft_tokens)

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {reason}" for reason, count in self.ended.items()) or "none"
        cached = f"{self.cached_tokens} ({self.cache_hit_rate:.0%}) in the cache"
        lines = {
            "completions": f"{self.running} running, {self.waiting} waiting, ended: {ended}",
            "tokens": f"{self.prompt_tokens} of prompts, {cached}; {self.generated_tokens} generated",
            "cache": f"{self.used_pages} of {self.num_pages} pages in use, {self.preemptions} preemptions",
            "speculation": f"{self.accepted_tokens} of {self.draft_tokens} accepted ({self.acceptance_rate:.0%})",
            "steps": f"{self.steps}, {self.compile_misses} compile misses",
            "CPU kernels": self.cpu_kernels or "none",
        }
        if self.expert_load is not None:
            lines["experts"] = str(self.expert_load)
        if self.pipeline is not None:
            lines["pipeline"] = f"{self.pipeline.idle_share:.0%} of {self.pipeline.slots} ticks of stages idle"
        if self.host_kv is not None:
            lines["host pages"] = str(self.host_kv)
        if self.disk_kv is not None:
            lines["disk pages"] = str(self.disk_kv)
        if self.requests is not None:
            lines["requests"] = str(self.requests)
        return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
