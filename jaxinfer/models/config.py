"""The numbers that a model is made of: frozen configs that check themselves when they are made.

A family (`families/`) maps a Hugging Face `config.json` onto these; a model directory stores them as JSON.
Dimensions everywhere: batch (B), tokens (T), keys (S), embed (D), vocab (V), mlp hidden (F), heads (H), head_dim (K);
of images batch (B), height (H), width (W), channels (C).
"""

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import ClassVar

MAX_LAYERS = 4096
"""A config with more is damaged: it would take the memory of the machine before a weight is found missing."""
MAX_EXPERTS = 2**17
"""Likewise of experts, in all layers together."""


class NormKind(enum.StrEnum):
    """How a hidden vector is normalised."""

    LAYER = "layer"  # subtract the mean, divide by the deviation, scale and shift
    RMS = "rms"  # divide by the root mean square, scale


class PositionKind(enum.StrEnum):
    """How the model learns the position of a token."""

    LEARNED = "learned"  # a table added to the embeddings
    ROTARY = "rotary"  # queries and keys rotated by their position (RoPE, arXiv:2104.09864)
    ALIBI = "alibi"  # a bias on the scores, linear in the distance (arXiv:2108.12409)
    NONE = "none"  # by the causal mask alone (NoPE, arXiv:2305.19466); some layers of a model with rotary ones


class BlockKind(enum.StrEnum):
    """How attention and MLP are joined to the residual stream in one layer."""

    SEQUENTIAL = "sequential"  # x += attention(norm(x)); x += mlp(norm(x))
    PARALLEL = "parallel"  # x += attention(n) + mlp(n), with one n = norm(x) (GPT-J)
    PARALLEL_TWO_NORMS = "parallel_two_norms"  # x += attention(norm1(x)) + mlp(norm2(x)) (GPT-NeoX)
    SANDWICH = "sandwich"  # x += norm(attention(norm(x))); x += norm(mlp(norm(x))) (Gemma 2)
    REORDERED = "reordered"  # x += norm(attention(x)); x += norm(mlp(x)) (OLMo 2, arXiv:2501.00656, section 3.2)
    POST_NORM = "post_norm"  # x = norm(x + attention(x)); x = norm(x + mlp(x)) (BERT, OPT-350m)


class Activation(enum.StrEnum):
    """The MLP's nonlinearity."""

    GELU = "gelu"  # exact, with erf
    GELU_TANH = "gelu_tanh"  # the tanh approximation
    RELU = "relu"
    SILU = "silu"


class RouterKind(enum.StrEnum):
    """How a router's logits become scores of the experts."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"  # each by itself (DeepSeek V3)


class GroupScore(enum.StrEnum):
    """How a group of experts is scored by those in it."""

    MAX = "max"  # its best expert (DeepSeek V2)
    TOP_2_SUM = "top_2_sum"  # the sum of its two best, the selection bias included (DeepSeek V3)


class SharedMix(enum.StrEnum):
    """How the MLP that every token goes through is added to its experts."""

    ADD = "add"  # as it is (DeepSeek)
    GATED = "gated"  # times sigmoid(x g), with a gate g (Qwen2-MoE)
    RESIDUAL = "residual"  # both times their share of softmax(x C), with two coefficients (Residual-MoE)

    @property
    def gates(self) -> int:
        """The number of vectors that the weights are computed with."""
        return {SharedMix.ADD: 0, SharedMix.GATED: 1, SharedMix.RESIDUAL: 2}[self]


class Pooling(enum.StrEnum):
    """How the vectors of a text's tokens become one."""

    MEAN = "mean"  # average over the real tokens
    CLS = "cls"  # the first token's vector
    MAX = "max"  # the largest value of each feature
    LAST = "last"  # the last token's vector


class DenseActivation(enum.StrEnum):
    """The nonlinearity of a dense layer behind the pooling."""

    TANH = "tanh"
    GELU = "gelu"  # exact, with erf
    RELU = "relu"
    SILU = "silu"


class QKNormScope(enum.StrEnum):
    """The features that queries and keys are normalised over."""

    HEAD = "head"  # each head by itself, all with the same weights (Qwen3)
    HEAD_OWN_WEIGHTS = "head_own_weights"  # each head by itself, with weights of its own (Command R+)
    ALL_HEADS = "all_heads"  # all query heads together, all key heads together (OLMo 2)


class ImagePooling(enum.StrEnum):
    """How a vision transformer's token vectors become the one that its head takes."""

    CLS = "cls"  # norm(the class token)
    MEAN = "mean"  # norm(the mean of the patches)
    NORMED_MEAN = "normed_mean"  # the mean of norm(each patch)
    CLS_AND_MEAN = "cls_and_mean"  # norm(the class token) beside the mean of norm(each patch) (DINOv2's classifier)
    CLASS_TOKENS = "class_tokens"  # norm(each class token), beside one another (DeiT with a teacher)
    ATTENTION = "attention"  # a learned query attends to norm(each patch), and an MLP follows (SigLIP)


class Resampling(enum.StrEnum):
    """How images are resized."""

    LINEAR = "linear"  # between the nearest pixels, however much larger the image is
    BILINEAR = "bilinear"  # Pillow's, as the others: smaller images have a share of every pixel (antialiasing)
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{type(config).__name__}.{name} must be >= 1, got {getattr(config, name)}.")


def _require_sizes(config: object, *names: str) -> None:
    for name in names:
        sizes = getattr(config, name)
        if not sizes or min(sizes) < 1:
            raise ValueError(f"{type(config).__name__}.{name} must hold sizes >= 1, got {sizes}.")


def _require_layers(config: object, count: int) -> None:
    if count > MAX_LAYERS:
        raise ValueError(f"{type(config).__name__} has {count} layers; models of at most {MAX_LAYERS} are known.")


def _require_labels(config: "VisionConfig", *, least: int = 1) -> None:
    labels = config.labels
    if isinstance(labels, str) or len(labels) < least or not all(isinstance(x, str) for x in labels):
        raise ValueError(
            f"{type(config).__name__}.labels must be a tuple with the name of each class, got {config.labels!r}."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Normalisation, the same kind everywhere in a model."""

    kind: NormKind
    eps: float = 1e-5
    affine: bool = True  # whether scale and bias are of the checkpoint; else they are 1 and 0 (Galactica)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Frequency scaling that stretches rotary positions beyond the trained context."""

    kind: str  # linear: divide every frequency; llama3: divide the low ones, blend in between; yarn: arXiv:2309.00071
    # longrope: divide each by a factor of its own (arXiv:2402.13753)
    factor: float
    original_context: int = 0  # llama3, yarn and longrope: tokens of context in training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn and longrope: multiplies cos and sin
    short_factors: tuple[float, ...] = ()  # longrope: of each feature pair, in an engine of at most original_context
    long_factors: tuple[float, ...] = ()  # longrope: the same in an engine of a longer context
    longer: bool = True  # longrope: whether the engine's context is longer than original_context

    def __post_init__(self) -> None:
        if self.kind not in (known := ("linear", "llama3", "yarn", "longrope")):
            raise ValueError(f"RopeScaling.kind={self.kind!r} is not implemented; known: {', '.join(known)}.")
        if self.kind != "linear" and self.original_context < 1:
            raise ValueError(f"RopeScaling.original_context must be >= 1 for {self.kind}, got {self.original_context}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionsConfig:
    """Position information."""

    kind: PositionKind
    offset: int = 0  # learned: unused rows at the start of the table (OPT and RoBERTa: 2)
    theta: float = 10_000.0  # rotary: base wavelength
    rotary_dim: int = 0  # rotary: leading features of each head that are rotated, i paired with i + rotary_dim / 2
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.kind is PositionKind.ROTARY and (self.rotary_dim < 2 or self.rotary_dim % 2):
            raise ValueError(f"PositionsConfig.rotary_dim must be even and >= 2, got {self.rotary_dim}.")
        if self.scaling is not None and self.scaling.kind == "longrope":
            counts = {len(self.scaling.short_factors), len(self.scaling.long_factors)}
            if counts != {self.rotary_dim // 2}:
                raise ValueError(
                    f"RopeScaling.short_factors and long_factors must have a number for each of {self.rotary_dim // 2} "
                    f"feature pairs, got {sorted(counts)}."
                )

    def for_context(self, context: int) -> "PositionsConfig":
        """The positions of an engine whose requests have at most so many tokens, which LongRoPE depends on."""
        if self.scaling is None or self.scaling.kind != "longrope":
            return self
        longer = context > self.scaling.original_context
        return dataclasses.replace(self, scaling=dataclasses.replace(self.scaling, longer=longer))


NO_POSITIONS = PositionsConfig(kind=PositionKind.NONE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes and options of attention, grouped-query throughout."""

    q_heads: int
    kv_heads: int  # == q_heads: multi-head; 1: multi-query; between: grouped-query
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    scale: float | None = None  # multiplies the scores; None means head_dim ** -0.5
    scale_by_inverse_layer: bool = False  # and divide the scores of layer i by i + 1 (GPT-2)
    softcap: float | None = None  # scores become cap * tanh(scores / cap) (Gemma 2)
    windows: tuple[int | None, ...] = (None,)  # cycled over layers; None: all earlier tokens, w: the last w
    qk_norm: bool = False  # normalise queries and keys before rotation (Qwen3)
    qk_norm_scope: QKNormScope = QKNormScope.HEAD
    alibi: tuple[float, ...] | None = None  # the slope of each query head; None: those of `alibi_slopes`
    real_kv_heads: int | None = None  # those from here on are padding; None: none is
    real_q_heads: int | None = None  # how many are no padding; None: all

    def __post_init__(self) -> None:
        _require_positive(self, "q_heads", "kv_heads", "head_dim")
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads={self.q_heads} is not a multiple of kv_heads={self.kv_heads}: "
                "every KV head serves a whole group of query heads."
            )
        if not self.windows or any(w is not None and w < 1 for w in self.windows):
            raise ValueError(f"AttentionConfig.windows must hold None or sizes >= 1, got {self.windows}.")
        if self.real_kv_heads is not None and not 1 <= self.real_kv_heads <= self.kv_heads:
            raise ValueError(
                f"AttentionConfig.real_kv_heads={self.real_kv_heads} must be in [1, kv_heads={self.kv_heads}]."
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def slopes(self) -> tuple[float, ...]:
        """ALiBi's slope of each query head."""
        return alibi_slopes(self.q_heads) if self.alibi is None else self.alibi

    def score_scale(self, layer: int) -> float:
        """Compute the factor of the scores in one layer."""
        scale = self.head_dim**-0.5 if self.scale is None else self.scale
        return scale / (layer + 1) if self.scale_by_inverse_layer else scale

    def window(self, layer: int) -> int | None:
        """Return how many tokens a query of one layer sees, itself the last; None: all."""
        return self.windows[layer % len(self.windows)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How each token chooses its experts (DeepSeek V3, arXiv:2412.19437, section 2.1.2, has all of it)."""

    experts: int
    experts_per_token: int
    kind: RouterKind = RouterKind.SOFTMAX
    normalize: bool = True  # the weights of a token's experts are divided by their sum
    scale: float = 1.0  # then multiplies them
    selection_bias: bool = False  # a number for each expert is added to its score for the choice, not to its weight
    groups: int = 1  # of equally many experts
    groups_per_token: int = 1  # the best groups, of which a token's experts are
    group_score: GroupScore = GroupScore.MAX
    capacity_factor: float | None = None  # an expert takes this many times its even share of a pass's choices; the
    # later ones are dropped. None: it takes all

    def __post_init__(self) -> None:
        _require_positive(self, "experts", "experts_per_token", "groups", "groups_per_token")
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"RouterConfig.experts_per_token={self.experts_per_token} is more than experts={self.experts}."
            )
        if self.experts % self.groups or self.groups_per_token > self.groups:
            raise ValueError(
                f"RouterConfig.groups={self.groups} must divide experts={self.experts}, and "
                f"groups_per_token={self.groups_per_token} be at most groups."
            )
        group = self.experts // self.groups
        if self.groups_per_token * group < self.experts_per_token:
            raise ValueError(
                f"RouterConfig.groups_per_token={self.groups_per_token} groups have {self.groups_per_token * group} "
                f"experts, fewer than experts_per_token={self.experts_per_token}."
            )
        if self.groups > 1 and self.group_score is GroupScore.TOP_2_SUM and group < 2:
            raise ValueError(f"RouterConfig.group_score={self.group_score} needs groups of two experts or more.")
        if self.capacity_factor is not None and not self.capacity_factor >= 1.0:
            raise ValueError(f"RouterConfig.capacity_factor must be at least 1, got {self.capacity_factor}.")

    def capacity(self, tokens: int) -> int | None:
        """Return how many of the choices of `tokens` tokens each expert takes; None: all.

        >>> RouterConfig(experts=8, experts_per_token=2, capacity_factor=1.25).capacity(64)
        20
        """
        if self.capacity_factor is None:
            return None
        return min(tokens, math.ceil(tokens * self.experts_per_token / self.experts * self.capacity_factor))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
    """A mixture of experts (DeepSpeed Inference, section V): MLPs of the sizes of the `MlpConfig` that it is in."""

    router: RouterConfig
    shared_hidden: int = 0  # width of an MLP that every token goes through as well; 0: there is none
    shared_mix: SharedMix = SharedMix.ADD

    def __post_init__(self) -> None:
        if self.shared_hidden < 0:
            raise ValueError(f"MoeConfig.shared_hidden must be >= 0, got {self.shared_hidden}.")
        if self.shared_mix is not SharedMix.ADD and not self.shared_hidden:
            raise ValueError(f"MoeConfig.shared_mix={self.shared_mix} needs a shared MLP: shared_hidden >= 1.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """The feed-forward block."""

    hidden: int  # with experts: of each
    activation: Activation
    gated: bool = False  # multiply the activation by a second projection (SwiGLU, GeGLU)
    bias: bool = False
    moe: MoeConfig | None = None  # None: one MLP for all tokens

    def __post_init__(self) -> None:
        _require_positive(self, "hidden")

    @property
    def shared(self) -> "MlpConfig | None":
        """The MLP beside the experts that every token goes through."""
        if self.moe is None or not self.moe.shared_hidden:
            return None
        return dataclasses.replace(self, hidden=self.moe.shared_hidden, moe=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _LayersConfig:
    """The layers, whatever their tokens are made of."""

    embed: int
    layers: int
    attention: AttentionConfig
    mlp: MlpConfig
    norm: NormConfig

    def __post_init__(self) -> None:
        _require_positive(self, "embed", "layers")
        _require_layers(self, self.layers)
        if self.mlp.moe is not None and not isinstance(self, DecoderConfig):
            raise ValueError(f"{type(self).__name__}.mlp.moe is not implemented: only decoders have experts.")

    def mlp_in(self, layer: int) -> MlpConfig:
        """The MLP of one layer."""
        return self.mlp

    @property
    def layer_kinds(self) -> tuple[int, ...]:
        """For each layer the first one that computes the same with other weights."""
        first: dict[tuple[object, ...], int] = {}
        return tuple(first.setdefault(self._computed_by(layer), layer) for layer in range(self.layers))

    def _computed_by(self, layer: int) -> tuple[object, ...]:
        """All that layers may differ in besides their weights."""
        return self.attention.score_scale(layer), self.attention.window(layer), self.mlp_in(layer)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TransformerConfig(_LayersConfig):
    """A model of text."""

    vocab: int
    context: int  # maximal tokens of a request, prompt and output together
    positions: PositionsConfig
    padded_vocab: int | None = None  # rows of the embedding and the head; from `vocab` on no tokens. None: vocab
    pooling: Pooling = Pooling.MEAN  # of a text to embed
    normalize: bool = True  # the vector of a text to length 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "vocab", "context")
        if self.padded_vocab is not None and self.padded_vocab < self.vocab:
            raise ValueError(f"padded_vocab={self.padded_vocab} is less than vocab={self.vocab}.")
        if (rotary_dim := max(p.rotary_dim for p in self.all_positions)) > self.attention.head_dim:
            raise ValueError(f"rotary_dim={rotary_dim} is larger than head_dim={self.attention.head_dim}.")

    def positions_in(self, layer: int) -> PositionsConfig:
        """The positions that one layer goes by."""
        return self.positions

    @property
    def all_positions(self) -> tuple[PositionsConfig, ...]:
        """The positions that layers go by, each once."""
        return tuple(dict.fromkeys(self.positions_in(layer) for layer in range(self.layers)))

    @property
    def output_width(self) -> int:
        """The width of the vectors that the model returns."""
        return self.embed

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding, and of the head."""
        return self.vocab if self.padded_vocab is None else self.padded_vocab


_BY_LAYER = {PositionKind.ROTARY, PositionKind.NONE}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig(_TransformerConfig):
    """One decoder-only language model. Hashable, so it can be a static argument of `jax.jit`."""

    block: BlockKind = BlockKind.SEQUENTIAL
    layer_positions: tuple[PositionsConfig, ...] = ()  # rotary or none, cycled over layers; empty: `positions` in all
    layer_mlps: tuple[MlpConfig, ...] = ()  # cycled over layers; empty: `mlp` in all
    embed_norm: bool = False  # normalise the embeddings (BLOOM)
    embed_scale: float = 1.0  # multiply the embeddings (Gemma: sqrt(embed))
    word_embed: int | None = None  # width of the embeddings and the head, projected to and from embed (OPT-350m)
    final_norm: bool = True  # normalise after the last layer
    tied: bool = False  # the output projection is the embedding table
    head_bias: bool = False
    logit_softcap: float | None = None
    logit_scale: float = 1.0  # multiply the logits (Cohere)
    residual_scale: float = 1.0  # multiply what attention and MLP add; in sequential blocks (Granite)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_positions and {p.kind for p in (self.positions, *self.layer_positions)} - _BY_LAYER:
            raise ValueError(
                "DecoderConfig.layer_positions may be rotary or none, like positions then; got "
                f"{sorted({str(p.kind) for p in (self.positions, *self.layer_positions)})}."
            )
        scope = self.attention.qk_norm_scope
        if scope is QKNormScope.ALL_HEADS and self.norm.kind is not NormKind.RMS:
            raise ValueError(f"AttentionConfig.qk_norm_scope={scope} needs NormConfig.kind=rms, got {self.norm.kind}.")
        experts = sum(moe.router.experts for layer in range(self.layers) if (moe := self.mlp_in(layer).moe) is not None)
        if experts > MAX_EXPERTS:
            raise ValueError(f"DecoderConfig has {experts} experts; models of at most {MAX_EXPERTS} are known.")
        if self.moe_layers and self.block in (BlockKind.PARALLEL, BlockKind.PARALLEL_TWO_NORMS):
            raise ValueError(f"DecoderConfig.block={self.block} is not implemented with experts; use sequential.")
        if self.residual_scale != 1.0 and self.block is not BlockKind.SEQUENTIAL:
            raise ValueError(f"DecoderConfig.residual_scale={self.residual_scale} needs sequential blocks.")
        if self.word_embed is not None:
            _require_positive(self, "word_embed")
        if self.tied and self.head_bias:
            raise ValueError("DecoderConfig.head_bias needs an untied head (tied=False).")

    def _computed_by(self, layer: int) -> tuple[object, ...]:
        return *super()._computed_by(layer), self.positions_in(layer)

    def positions_in(self, layer: int) -> PositionsConfig:
        return self.layer_positions[layer % len(self.layer_positions)] if self.layer_positions else self.positions

    def mlp_in(self, layer: int) -> MlpConfig:
        return self.layer_mlps[layer % len(self.layer_mlps)] if self.layer_mlps else self.mlp

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(layer for layer in range(self.layers) if self.mlp_in(layer).moe is not None)

    def with_layers(self, layers: Sequence[int]) -> "DecoderConfig":
        """Return the config of a model that has these layers of this one, in this order; one may come several times."""
        return dataclasses.replace(
            self,
            layers=len(layers),
            attention=dataclasses.replace(self.attention, windows=tuple(self.attention.window(x) for x in layers)),
            layer_positions=tuple(self.positions_in(x) for x in layers) if self.layer_positions else (),
            layer_mlps=tuple(self.mlp_in(x) for x in layers) if self.layer_mlps else (),
        )

    def for_context(self, context: int) -> "DecoderConfig":
        """The config in an engine whose requests have at most so many tokens; weights and caches are as here."""
        return dataclasses.replace(
            self,
            positions=self.positions.for_context(context),
            layer_positions=tuple(positions.for_context(context) for positions in self.layer_positions),
        )

    @property
    def output_width(self) -> int:
        return self.embed if self.word_embed is None else self.word_embed


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """One dense layer behind an encoder's pooling (sentence-transformers' `Dense`)."""

    outputs: int
    activation: DenseActivation | None = None  # None: linear
    bias: bool = True

    def __post_init__(self) -> None:
        _require_positive(self, "outputs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig(_TransformerConfig):
    """One bidirectional encoder in BERT's arrangement (post-norm, learned positions)."""

    block: ClassVar[BlockKind] = BlockKind.POST_NORM  # the only one an encoder has
    token_types: int = 0  # rows of the segment table; 0: none (DistilBERT)
    dense: tuple[DenseConfig, ...] = ()  # between pooling and normalisation

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.positions.kind is not PositionKind.LEARNED:
            raise ValueError(f"EncoderConfig.positions.kind={self.positions.kind} is not implemented; use learned.")
        if any(window is not None for window in self.attention.windows):
            raise ValueError(
                f"EncoderConfig.attention.windows={self.attention.windows} is not implemented: an encoder's tokens "
                "see each other; use (None,)."
            )

    @property
    def output_width(self) -> int:
        """The width of a text's vector."""
        return self.dense[-1].outputs if self.dense else self.embed


STRIDES = (8, 16, 32)
"""Pixels of the image for one cell of each grid that a YOLO model predicts boxes in."""

_ANCHORS = (
    ((10.0, 13.0), (16.0, 30.0), (33.0, 23.0)),
    ((30.0, 61.0), (62.0, 45.0), (59.0, 119.0)),
    ((116.0, 90.0), (156.0, 198.0), (373.0, 326.0)),
)


IMAGENET_MEAN, IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Statistics of the pixels of ImageNet, for red, green and blue in [0, 1]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreprocessingConfig:
    """The way from an image of any size to the pixels of a classifier or a vision transformer.

    Images are resized, and their middle is cropped to the model's `image_size`; those of that size are taken as they
    are. Then the mean is subtracted from the pixels in [0, 1], and the rest divided by the deviation.
    """

    resampling: Resampling | None = Resampling.LINEAR  # None: images of other sizes are refused
    resized: int | None = None  # pixels of both sides before the crop; None: image_size
    keep_ratio: bool = False  # `resized` is the shorter side, and the longer one keeps its ratio to it
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)  # of red, green and blue
    deviation: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.deviation) != 3 or min(self.deviation) <= 0:
            raise ValueError(
                "PreprocessingConfig.mean and deviation need a number for each of red, green and blue, deviations > 0; "
                f"got {self.mean} and {self.deviation}."
            )

    def check_size(self, image_size: int) -> None:
        """Raise ValueError if resized images are smaller than what is cropped of them."""
        if self.resized is not None and self.resized < image_size:
            raise ValueError(
                f"PreprocessingConfig.resized={self.resized} is less than image_size={image_size}: a crop is part of "
                "the resized image."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """One image classifier: ResNet (arXiv:1512.03385)."""

    labels: tuple[str, ...]  # of the classes, in the order of the outputs
    stem: int = 64  # outputs of the first convolution
    widths: tuple[int, ...]  # outputs of each stage
    depths: tuple[int, ...]  # blocks of each stage
    bottleneck: bool  # blocks of 1x1, 3x3 and 1x1, a quarter as wide inside; else of two 3x3
    stride_in_first_conv: bool = False  # of a bottleneck, as in the paper; else in its 3x3 (v1.5)
    stride_in_first_stage: bool = False  # all stages have a stride of 2; else all but the first
    image_size: int = 224  # pixels of a side
    preprocessing: PreprocessingConfig = PreprocessingConfig(mean=IMAGENET_MEAN, deviation=IMAGENET_DEVIATION)

    def __post_init__(self) -> None:
        _require_positive(self, "stem", "image_size")
        self.preprocessing.check_size(self.image_size)
        _require_sizes(self, "widths", "depths")
        _require_layers(self, sum(self.depths))
        _require_labels(self)
        if len(self.widths) != len(self.depths):
            raise ValueError(f"ResNetConfig.widths={self.widths} and depths={self.depths} must be of one length.")
        if self.bottleneck and any(width % 4 for width in self.widths):
            raise ValueError(f"ResNetConfig.widths={self.widths} of bottlenecks must be multiples of 4.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class YoloConfig:
    """One object detector: YOLOv5, version 6 of its architecture and later, with three grids (P3 to P5)."""

    labels: tuple[str, ...]  # of the classes, in the order of the outputs
    widths: tuple[int, ...]  # outputs of the first convolution and of the four stages
    depths: tuple[int, ...]  # bottlenecks of each of the four stages; those of the neck have as many as the first
    image_size: int = 640  # pixels: images are letterboxed to image_size x image_size
    confidence: float = 0.25  # detections with at most this score are dropped
    iou: float = 0.45  # of two boxes of one class that overlap by more, the one with the lower score is dropped
    anchors: tuple[tuple[tuple[float, float], ...], ...] = _ANCHORS  # pixels (width, height), by grid

    def __post_init__(self) -> None:
        _require_sizes(self, "widths", "depths")
        _require_layers(self, sum(self.depths))
        _require_labels(self)
        if (len(self.widths), len(self.depths)) != (5, 4):
            raise ValueError(f"YoloConfig needs 5 widths and 4 depths, got {self.widths} and {self.depths}.")
        if any(width % 2 for width in self.widths[1:]):
            raise ValueError(f"YoloConfig.widths={self.widths} must be even from the second on.")
        if self.image_size < 1 or self.image_size % STRIDES[-1]:
            raise ValueError(f"YoloConfig.image_size must be a multiple of {STRIDES[-1]}, got {self.image_size}.")
        for name in ("confidence", "iou"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"YoloConfig.{name} must be in [0, 1], got {getattr(self, name)}.")
        if len(self.anchors) != len(STRIDES) or len({len(grid) for grid in self.anchors}) != 1:
            raise ValueError(f"YoloConfig.anchors needs as many boxes for each of 3 grids, got {self.anchors}.")
        if any(side <= 0 for grid in self.anchors for box in grid for side in box):
            raise ValueError(f"YoloConfig.anchors must be positive, got {self.anchors}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionGrid:
    """The grid of patches that positions were learned for; other images have them interpolated (bicubic)."""

    side: int  # patches
    antialias: bool = False

    def __post_init__(self) -> None:
        _require_positive(self, "side")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(_LayersConfig):
    """One vision transformer, whose tokens are class tokens, registers and the patches of an image (arXiv:2010.11929).

    Without labels it has no head of classes, and gives vectors alone.
    """

    block: ClassVar[BlockKind] = BlockKind.SEQUENTIAL
    positions: ClassVar[PositionsConfig] = PositionsConfig(kind=PositionKind.LEARNED)
    labels: tuple[str, ...]  # of the classes, in the order of the outputs
    image_size: int = 224  # pixels of a side; those beyond the last whole patch are left out
    patch_size: int = 16  # pixels of a patch's side
    pooling: ImagePooling = ImagePooling.CLS
    class_tokens: int = 1  # tokens that have positions before the patches': the class token, DeiT's for distillation
    registers: int = 0  # tokens without positions, between those and the patches (arXiv:2309.16588)
    position_grid: PositionGrid | None = None  # None: the patches of image_size
    pooling_heads: int = 0  # attention heads of ImagePooling.ATTENTION
    preprocessing: PreprocessingConfig = PreprocessingConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive(self, "image_size", "patch_size")
        _require_labels(self, least=0)
        self.preprocessing.check_size(self.image_size)
        if self.image_size < self.patch_size:
            raise ValueError(f"ViTConfig.image_size={self.image_size} is less than patch_size={self.patch_size}.")
        if any(window is not None for window in self.attention.windows):
            raise ValueError(f"ViTConfig.attention.windows={self.attention.windows} is not implemented; use (None,).")
        if min(self.class_tokens, self.registers) < 0:
            raise ValueError(f"ViTConfig.class_tokens={self.class_tokens} and registers={self.registers} must be >= 0.")
        by_class = (ImagePooling.CLS, ImagePooling.CLS_AND_MEAN, ImagePooling.CLASS_TOKENS)
        if self.pooling in by_class and not self.class_tokens:
            raise ValueError(f"ViTConfig.pooling={self.pooling} needs a class token, and class_tokens is 0.")
        by_attention = self.pooling is ImagePooling.ATTENTION
        if by_attention != (self.pooling_heads > 0) or (by_attention and self.embed % self.pooling_heads):
            raise ValueError(
                f"ViTConfig.pooling_heads={self.pooling_heads} must divide embed={self.embed} for attention pooling, "
                f"and be 0 for any other; pooling is {self.pooling}."
            )

    @property
    def grid_side(self) -> int:
        """The number of patches in a row of an image."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """The number of patches of an image."""
        return self.grid_side**2

    @property
    def first_patch(self) -> int:
        """The number of tokens before the patches: class tokens and registers."""
        return self.class_tokens + self.registers

    @property
    def tokens(self) -> int:
        """The number of tokens of an image: class tokens, registers, patches."""
        return self.first_patch + self.patches

    @property
    def feature_width(self) -> int:
        """The width of the vector that the head takes."""
        match self.pooling:
            case ImagePooling.CLS_AND_MEAN:
                return 2 * self.embed
            case ImagePooling.CLASS_TOKENS:
                return self.class_tokens * self.embed
            case _:
                return self.embed


TransformerConfig = DecoderConfig | EncoderConfig
ConvolutionalConfig = ResNetConfig | YoloConfig
VisionConfig = ConvolutionalConfig | ViTConfig
ModelConfig = TransformerConfig | VisionConfig


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Return ALiBi's slope of each head (arXiv:2108.12409, section 3): a geometric sequence from 2^(-8/n).

    If `heads` is not a power of two, the slopes of the next lower power come first, then every second slope of the
    next higher power.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    extra = [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]
    return tuple(slopes + extra)
