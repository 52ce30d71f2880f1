"""Vision transformers."""

import dataclasses
import enum
from typing import ClassVar

from jaxinfer.models.config.checks import require_labels, require_positive
from jaxinfer.models.config.layers import BlockKind, UniformConfig
from jaxinfer.models.config.preprocessing import PreprocessingConfig

_PREPROCESSING = PreprocessingConfig()


class ImagePooling(enum.StrEnum):
    """How a vision transformer's token vectors become the one that its head takes."""

    CLS = "cls"  # norm(the class token)
    MEAN = "mean"  # norm(the mean of the patches)
    NORMED_MEAN = "normed_mean"  # the mean of norm(each patch)
    CLS_AND_MEAN = "cls_and_mean"  # norm(the class token) beside the mean of norm(each patch) (DINOv2's classifier)
    CLASS_TOKENS = "class_tokens"  # norm(each class token), beside one another (DeiT with a teacher)
    ATTENTION = "attention"  # a learned query attends to norm(each patch), and an MLP follows (SigLIP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionGrid:
    """The grid of patches that positions were learned for; other images have them interpolated (bicubic)."""

    side: int  # patches
    antialias: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "side")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViTConfig(UniformConfig):
    """One vision transformer, whose tokens are class tokens, registers and the patches of an image (arXiv:2010.11929).

    Without labels it has no head of classes, and gives vectors alone.
    """

    block: ClassVar[BlockKind] = BlockKind.SEQUENTIAL
    labels: tuple[str, ...]  # of the classes, in the order of the outputs
    image_size: int = 224  # pixels of a side; those beyond the last whole patch are left out
    patch_size: int = 16  # pixels of a patch's side
    pooling: ImagePooling = ImagePooling.CLS
    class_tokens: int = 1  # tokens that have positions before the patches': the class token, DeiT's for distillation
    registers: int = 0  # tokens without positions, between those and the patches (arXiv:2309.16588)
    position_grid: PositionGrid | None = None  # None: the patches of image_size
    pooling_heads: int = 0  # attention heads of ImagePooling.ATTENTION
    preprocessing: PreprocessingConfig = _PREPROCESSING

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "image_size", "patch_size")
        require_labels(self, self.labels, least=0)
        self.preprocessing.check_size(self.image_size)
        if self.image_size < self.patch_size:
            raise ValueError(f"ViTConfig.image_size={self.image_size} is less than patch_size={self.patch_size}.")
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
