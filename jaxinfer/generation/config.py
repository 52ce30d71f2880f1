"""The sizes of an engine."""

import dataclasses

from jaxinfer.compiled import powers, round_up
from pallas_kernels.decode_attention import MAX_DECODE_TOKENS

KV_DTYPES = ("int8",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How many requests an engine holds, and in what portions it runs them.

    Attributes:
      slots: most sequences that run at once. context: most tokens of one, prompt and output together.
      page_size: tokens in a page of the cache.
      token_budget: most prompt tokens in one step, beside a token of each sequence that generates.
      piece_tokens: prompts go through the model in pieces of so many tokens.
      padding: the pieces of a step, rounded up to those compiled for, are at most so many times the real ones.
      max_decode_steps: most tokens a sequence generates in one dispatch, without drafts.
      draft_tokens: most tokens that prompt lookup proposes in one pass; 0: no speculation.
      prefix_caching: whether requests share the pages of equal beginnings.
      kv_dtype: "int8" holds keys and values in a byte each; None: the model's own dtype.
      max_adapters: LoRA adapters that can run together; 0: none. max_lora_rank: the highest rank of one.
      adapter_bytes: host memory for adapters that are not on the device.
      overlap: whether the host makes the next step while the device runs one.
      kernels: whether operations run as the kernels of `pallas_kernels` where a GPU takes them; else as plain XLA.
    """

    slots: int
    context: int
    page_size: int = 16
    token_budget: int = 512
    piece_tokens: int = 32
    padding: float = 1.25
    max_decode_steps: int = 16
    draft_tokens: int = 0
    prefix_caching: bool = True
    kv_dtype: str | None = None
    max_adapters: int = 0
    max_lora_rank: int = 16
    adapter_bytes: int = 1 << 30
    overlap: bool = True
    kernels: bool = True

    def __post_init__(self) -> None:
        for name in ("slots", "page_size", "token_budget", "piece_tokens", "max_decode_steps", "max_lora_rank"):
            self._check(name, getattr(self, name) >= 1, ">= 1")
        self._check("token_budget", self.token_budget >= self.piece_tokens, f">= piece_tokens={self.piece_tokens}")
        self._check("padding", self.padding >= 1, ">= 1")
        self._check("context", self.context >= 2, ">= 2")
        self._check("draft_tokens", 0 <= self.draft_tokens < self.context, f"in [0, {self.context})")
        self._check("max_adapters", self.max_adapters >= 0, ">= 0")
        self._check("kv_dtype", self.kv_dtype in (None, *KV_DTYPES), f"None or one of {KV_DTYPES}")

    def check_for(self, platform: str) -> None:
        """Raise ValueError for what a platform ("gpu") cannot run."""
        # Pieces of one prompt attend to one another; the kernel for so few tokens takes rows of different requests.
        enough = platform != "gpu" or self.piece_tokens > MAX_DECODE_TOKENS
        self._check("piece_tokens", enough, f"> {MAX_DECODE_TOKENS} on a GPU")

    def _check(self, name: str, ok: bool, wanted: str) -> None:
        if not ok:
            raise ValueError(f"EngineConfig.{name} must be {wanted}, got {getattr(self, name)!r}.")

    @property
    def piece_counts(self) -> tuple[int, ...]:
        """The numbers of pieces that programs are compiled for."""
        return powers(4, 1, max(1, self.token_budget // self.piece_tokens))

    def well_filled(self, pieces: int) -> int:
        """How many of so many pieces to take, lest a step be mostly padding."""
        if pieces == 0 or pieces >= self.piece_counts[-1]:
            return min(pieces, self.piece_counts[-1])
        if round_up(pieces, self.piece_counts) <= self.padding * pieces:
            return pieces
        return max(count for count in self.piece_counts if count <= pieces)

    @property
    def batches(self) -> tuple[int, ...]:
        """The numbers of rows that programs without pieces are compiled for."""
        return tuple(sorted({*powers(2, 1, self.slots), *powers(2, 24, self.slots)}))

    @property
    def mixed_batches(self) -> tuple[int, ...]:
        """The same beside pieces: few, since a row costs little there."""
        return (0, *powers(4, min(8, self.slots), self.slots))
