"""Tile sizes of both kernels."""

TILE = 64  # tokens, or features, of a tile: 128 bytes in a 16-bit dtype, the widest swizzle
MMA_TOKENS = 32  # tokens per mma
OTHER_BYTES = 24 << 10  # of shared memory: one tile of the result, vectors, alignment
