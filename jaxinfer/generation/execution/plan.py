"""`Plan`: what is decided once, from this process's clock and free memory, before an engine is built."""

import dataclasses
import enum

from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.buckets import Buckets, EncoderBuckets
from jaxinfer.generation.engine.config import EncoderEngineConfig, EngineConfig, SharedConfig
from jaxinfer.generation.engine.speculation import DECODE, PassCosts
from jaxinfer.generation.execution.platforms import buckets_of
from jaxinfer.models.files.loading import OpenedModel
from jaxinfer.streaming.config import Placement

MOVES = 4, 32
"""Pages that one program copies to the host's memory or from it: few sizes, since each is compiled."""


class Way(enum.Enum):
    """How a step goes through the layers; the value is the name of a decode pass in the record of costs."""

    WHOLE = DECODE  # one program has all layers
    RING = "ring"  # one program sends micro-batches through the stages of a pipeline
    CHAIN = "pass"  # several programs, since weights are fetched in between


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All in which two processes that run the same engine might differ. Plain data, which can be sent to another.

    Attributes:
      way: how a step goes through the layers.
      buckets: the sizes that a step is padded to.
      stages: how many stages the model's pipeline has; 1: it has none.
      num_pages: pages of a decoder's cache, of each lane; `memory.plan_memory` computes how many fit.
      host_pages: pages that the host's memory keeps; 0: none.
      slice_pages: pages of one layer that are on the devices at a time, with `kv_offload`; 0: all of all layers are.
      max_chunks: how many chunks of a step go through a streamed layer together; None: all.
      placement: the place of each layer, and how far ahead layers are fetched; None: all are on the devices.
    """

    way: Way
    buckets: Buckets | EncoderBuckets
    stages: int = 1
    num_pages: int = 0
    host_pages: int = 0
    slice_pages: int = 0
    max_chunks: int | None = None
    placement: Placement | None = None

    @classmethod
    def of_model(
        cls,
        model: OpenedModel,
        config: SharedConfig,
        *,
        num_pages: int = 0,
        host_pages: int = 0,
        disk_kv: bool = False,
        slice_pages: int = 0,
        max_chunks: int | None = None,
        placement: Placement | None = None,
    ) -> "Plan":
        """Plan the engine of a model. Raises ValueError for a config that its platform cannot run.

        disk_kv: whether a disk keeps pages. All else are the fields.
        """
        stages = model.rules.num_stages(model.mesh)
        if isinstance(config, EngineConfig):
            buckets = buckets_of(config, model.platform, streamed=placement is not None, stages=stages)
            buckets = dataclasses.replace(buckets, moves=MOVES if host_pages or disk_kv else ())
        else:
            assert isinstance(config, EncoderEngineConfig)
            buckets = EncoderBuckets.from_config(config, model.lanes)
        return cls(
            way=Way.CHAIN if placement is not None else Way.RING if stages > 1 else Way.WHOLE,
            buckets=buckets,
            stages=stages,
            num_pages=num_pages,
            host_pages=host_pages,
            slice_pages=slice_pages,
            max_chunks=max_chunks,
            placement=placement,
        )

    @property
    def decoder_buckets(self) -> Buckets:
        """The sizes of a decoder's steps."""
        assert isinstance(self.buckets, Buckets)
        return self.buckets

    def pass_costs(self, costs: Costs, num_speculative_tokens: int = 0) -> PassCosts:
        """Take the times of passes from a record."""
        chunks = self.decoder_buckets.chunks
        return PassCosts(costs, num_speculative_tokens, name=self.way.value, stages=self.stages, chunks=chunks)

    @property
    def pass_buckets(self) -> Buckets:
        """The sizes of a decoder's programs: those of its steps, but `max_chunks` at once."""
        chunks = [count for count in self.decoder_buckets.chunks if self.max_chunks is None or count <= self.max_chunks]
        return dataclasses.replace(self.decoder_buckets, chunks=tuple(chunks))
