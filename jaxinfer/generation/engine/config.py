"""The sizes of an engine."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypedDict

from msgspec import Meta

from jaxinfer.fields import Bytes, Size, SizeOrZero, check_fields, shown

KV_DTYPES = ("bfloat16", "int8")
SNAPSHOTS_PER_SEQUENCE = 2
"""Snapshots of recurrent states that the prefix cache keeps, for each sequence that can run: conversations that are
not running need theirs, too."""


class EngineOptions(TypedDict, total=False):
    """Options of `LLM` and `Embedder`: the fields of `EngineConfig` and `EncoderEngineConfig`."""

    page_size: int
    """Tokens in a page of the KV cache."""
    token_budget: int
    """How many prompt tokens go into one step, in addition to a token of each sequence that decodes."""
    chunk_size: int
    """Prompts go through the model in chunks of this many tokens (chunked prefill)."""
    max_decode_passes: int
    """How many passes through the model a decode step can make."""
    num_speculative_tokens: int
    """How many tokens the n-gram proposer suggests per pass; 0: no speculation."""
    prefix_caching: bool
    """Whether requests share the pages of equal beginnings."""
    kv_dtype: str | None
    """`bfloat16` holds keys and values in two bytes each, `int8` in one; None: the dtype that is computed in."""
    max_adapters: int
    """How many LoRA adapters can run together; 0: none."""
    max_lora_rank: int
    """The highest rank of an adapter."""
    adapter_bytes: int
    """Host memory for adapters that are not on the device; default: at most a quarter of the unreserved memory."""
    expert_load: bool
    """Whether the tokens that each expert of a mixture of experts gets are counted, for each request and in all."""
    overlap: bool
    """Whether the host schedules the next step while the device runs one."""
    level: int
    """0, or -r: each layer of an encoder merges r of its tokens, which is faster and less exact (OTAS)."""
    kernels: bool
    """Whether operations run as the kernels of `pallas_kernels` where a GPU takes them; else as plain XLA."""


_Context = Annotated[int, Meta(ge=2, lt=2**30, description="an integer >= 2, below 2**30")]
_Level = Annotated[
    int, Meta(le=0, gt=-(2**30), description="0 or less: prompts are for tasks of images (jaxinfer.elastic)")
]

_COSTS = {"costs": True}
"""Metadata of fields that decide how long programs of the same sizes take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedConfig:
    """Options that engines of decoders and of encoders share.

    Attributes:
      max_batch: how many sequences can run at once.
      context: how many tokens a sequence can have, prompt and output together.
      others: see `EngineOptions`.
    """

    kind: ClassVar[str]
    max_batch: Size
    context: _Context
    token_budget: Size
    overlap: bool = True
    kernels: bool = dataclasses.field(default=True, metadata=_COSTS)

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, max_batch: int, context: int) -> Self:
        """Apply a user's options. Raises ValueError for those of the other kind of model, unless they are off."""
        known = [field.name for field in dataclasses.fields(cls)]
        for other in (EngineConfig, EncoderEngineConfig):
            for field in dataclasses.fields(other):
                name, value = field.name, options.get(field.name, field.default)
                if name not in known and value != field.default:
                    raise ValueError(
                        f"{cls.__name__}.{name}={shown(value)} is for {other.kind}s, and this model is "
                        f"{'an' if cls.kind == 'encoder' else 'a'} {cls.kind}: leave it out."
                    )
        known_options = {name: value for name, value in options.items() if name in known}
        return cls(max_batch=max_batch, context=context, **known_options)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def deciding_costs(self) -> dict[str, Any]:
        """The fields that decide how long programs of the same sizes take."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.metadata}

    def check(self, name: str, ok: bool, expected: str) -> None:
        """Raise ValueError that names the field, unless `ok`."""
        if not ok:
            raise ValueError(f"{type(self).__name__}.{name} must be {expected}, got {getattr(self, name)!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(SharedConfig):
    """Sizes of an engine on a decoder: how many requests it holds, and in what portions it runs them.

    See `EngineOptions`.
    """

    kind = "decoder"
    token_budget: Size = 512
    page_size: Size = dataclasses.field(default=16, metadata=_COSTS)
    chunk_size: Size = dataclasses.field(default=32, metadata=_COSTS)
    max_decode_passes: Size = 16
    num_speculative_tokens: SizeOrZero = 0
    prefix_caching: bool = True
    kv_dtype: str | None = dataclasses.field(default=None, metadata=_COSTS)
    max_adapters: SizeOrZero = dataclasses.field(default=0, metadata=_COSTS)
    max_lora_rank: Size = dataclasses.field(default=16, metadata=_COSTS)
    adapter_bytes: Bytes = 1 << 30
    expert_load: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("token_budget", self.token_budget >= self.chunk_size, f">= chunk_size={self.chunk_size}")
        self.check("num_speculative_tokens", self.num_speculative_tokens < self.context, f"< context={self.context}")
        self.check("kv_dtype", self.kv_dtype in (None, *KV_DTYPES), f"None or one of {KV_DTYPES}")

    @property
    def of_programs(self) -> Self:
        """The config that programs depend on: host-only fields, which depend on free memory, have their defaults."""
        return dataclasses.replace(self, adapter_bytes=EngineConfig.adapter_bytes)

    @property
    def num_snapshots(self) -> int:
        """Snapshots that the prefix cache of a lane keeps if the model has recurrent states."""
        return SNAPSHOTS_PER_SEQUENCE * self.max_batch if self.prefix_caching else 0

    @property
    def pages_per_sequence(self) -> int:
        """Pages of a sequence as long as the context."""
        return -(-self.context // self.page_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderEngineConfig(SharedConfig):
    """Sizes of an engine on an encoder: how many texts it embeds at once. Its budget counts padding too.

    See `EngineOptions`.
    """

    kind = "encoder"
    token_budget: Size = 4096
    level: _Level = dataclasses.field(default=0, metadata=_COSTS)
