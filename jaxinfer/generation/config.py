"""The sizes of an engine."""

import dataclasses

from jaxinfer.compiled import powers, round_up

KV_DTYPES = ("int8",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How many requests an engine holds, and in what portions it runs them.

    Attributes:
      slots: most sequences that run at once. context: most tokens of one, prompt and output together.
      page_size: tokens in a page of the cache.
      token_budget: most prompt tokens in one step, beside a token of each sequence that generates.
      max_decode_steps: most tokens a sequence generates in one dispatch, without drafts.
      draft_tokens: most tokens that prompt lookup proposes in one pass; 0: no speculation.
      prefix_caching: whether requests share the pages of equal beginnings.
      kv_dtype: "int8" holds keys and values in a byte each; None: the model's own dtype.
      max_adapters: LoRA adapters that can run together; 0: none. max_lora_rank: the highest rank of one.
      adapter_bytes: host memory for adapters that are not on the device.
      overlap: whether the host makes the next step while the device runs one.
    """

    slots: int
    context: int
    page_size: int = 16
    token_budget: int = 512
    max_decode_steps: int = 16
    draft_tokens: int = 0
    prefix_caching: bool = True
    kv_dtype: str | None = None
    max_adapters: int = 0
    max_lora_rank: int = 16
    adapter_bytes: int = 1 << 30
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("slots", "page_size", "token_budget", "max_decode_steps", "max_lora_rank"):
            self._check(name, getattr(self, name) >= 1, ">= 1")
        self._check("context", self.context >= 2, ">= 2")
        self._check("draft_tokens", 0 <= self.draft_tokens < self.context, f"in [0, {self.context})")
        self._check("max_adapters", self.max_adapters >= 0, ">= 0")
        self._check("kv_dtype", self.kv_dtype in (None, *KV_DTYPES), f"None or one of {KV_DTYPES}")

    def _check(self, name: str, ok: bool, wanted: str) -> None:
        if not ok:
            raise ValueError(f"EngineConfig.{name} must be {wanted}, got {getattr(self, name)!r}.")

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens of a piece of a prompt: few, for short prompts and for what a known beginning leaves; or many."""
        most = min(self.token_budget, self.context)
        return tuple(dict.fromkeys((min(16, most), min(64, most))))

    def piece_width(self, tokens: int) -> int:
        """The width of a step whose first prompt has so many tokens to go."""
        return round_up(min(tokens, self.widths[-1]), self.widths)

    def most_pieces(self, width: int) -> int:
        """Pieces of this width in a step; narrow ones are for the few, since wide ones cost little more each."""
        most = max(1, self.token_budget // self.widths[-1])
        return most if width == self.widths[-1] else min(4, most)

    def piece_counts(self, width: int) -> tuple[int, ...]:
        """The numbers of pieces that programs are compiled for."""
        return powers(4 if width < self.widths[-1] else 2, 1, self.most_pieces(width))

    @property
    def batches(self) -> tuple[int, ...]:
        """The numbers of rows that programs without pieces are compiled for."""
        return powers(2, 1, self.slots)

    @property
    def mixed_batches(self) -> tuple[int, ...]:
        """The same beside pieces: few, since a row costs little there."""
        return (0, *powers(8, min(8, self.slots), self.slots))
