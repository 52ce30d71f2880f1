"""The part of a layer in which tokens see one another."""


class Mixer:
    """A kind of mixer: `AttentionConfig`, or `DeltaRuleConfig`."""
