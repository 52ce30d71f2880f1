"""The gated delta rule: heads that remember in a state of fixed size."""

import dataclasses

from jaxinfer.models.config.checks import require_positive
from jaxinfer.models.config.mixer import Mixer


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaRuleConfig(Mixer):
    """Sizes of the gated delta rule (Gated DeltaNet, arXiv:2412.06464), with the convolution before it."""

    key_heads: int
    value_heads: int  # a multiple of key_heads: a key head serves a whole group of value heads
    key_dim: int
    value_dim: int
    conv: int = 4  # tokens that the causal convolution sees, itself the last
    negative_eigenvalues: bool = False  # beta is in (0, 2), not in (0, 1) (arXiv:2411.12537)
    norm_eps: float | None = None  # of the norm of a head's output; None: the model's

    def __post_init__(self) -> None:
        require_positive(self, "key_heads", "value_heads", "key_dim", "value_dim")
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"DeltaRuleConfig.value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}: "
                "every key head serves a whole group of value heads."
            )
        if self.norm_eps is not None and self.norm_eps < 0:
            raise ValueError(f"DeltaRuleConfig.norm_eps must be >= 0, got {self.norm_eps}.")
        if self.conv < 2:
            raise ValueError(f"DeltaRuleConfig.conv must be >= 2, got {self.conv}.")

    @property
    def features(self) -> int:
        """The query, key and values of one key head."""
        return 2 * self.key_dim + self.value_heads // self.key_heads * self.value_dim

    @property
    def outputs(self) -> int:
        """The width of all heads' outputs."""
        return self.value_heads * self.value_dim

    @property
    def state_values(self) -> int:
        """The number of values in the state of one sequence."""
        return self.value_heads * self.key_dim * self.value_dim + (self.conv - 1) * self.key_heads * self.features
