"""The partition of a linear layer in the small-batch kernel."""

import dataclasses
import math

from jaxinfer.pallas_kernels.linear.mosaic.operands import Operand
from jaxinfer.pallas_kernels.mosaic import pl
from jaxinfer.pallas_kernels.mosaic.cluster import MAX_CLUSTER, check_cluster
from jaxinfer.pallas_kernels.mosaic.tuning import tuned
from jaxinfer.pallas_kernels.target import UnsupportedError, target_gpu
from jaxinfer.pallas_kernels.weights import GROUP

TILE_N = 64
"""Outputs of a thread block: four warps of 16 rows, the M of one mma.sync."""

_MAX_STAGES = 8
_IN_FLIGHT = 65_536  # bytes that the pipelines of an SM should hold
_BUSY_SMS = 0.9  # the part of the SMs that should have a thread block
_OTHER_BYTES = 2048 + 1024  # of shared memory: Mosaic's reductions and alignment


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tile sizes.

    Attributes:
      tile_k: inputs per pipeline stage. stages: pipeline stages. split: thread blocks (a cluster) over which the inputs
        are split.
    """

    tile_k: int
    stages: int
    split: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedLinear:
    """A linear layer and what is fused into it.

    Attributes:
      rows: rows of x. inputs: K. outputs: columns of the result.
      matrices: 2 with a gate, else 1; each output has this many rows of weights.
      operand: how weights of this format are multiplied.
      eps: of the norm; None without a norm.
      activation: a name that `activate` knows, or None.
    """

    rows: int
    inputs: int
    outputs: int
    matrices: int
    operand: Operand
    eps: float | None
    activation: str | None

    @property
    def columns(self) -> int:
        """Rows of x, padded to the N of an mma.sync."""
        return 8 if self.rows <= 8 else 16

    @property
    def x_resident(self) -> bool:
        """Whether x is computed once (normalised, quantised) and stays in SMEM; else its tiles are loaded with W's."""
        return self.eps is not None or self.operand.quantizes

    @property
    def resident_rows(self) -> int:
        """Rows of a resident x in shared memory. A single row is broadcast to all columns of the mma."""
        return 1 if self.rows == 1 else self.columns

    def resident_row_size(self, inputs: int) -> int:
        """Compute the elements of a resident row of x with this many inputs.

        After each row there is some padding: columns avoid bank conflicts, and rows stay aligned.
        """
        return inputs + max(8, 16 // self.operand.x.itemsize)

    def groups_per_tile(self, tile_k: int) -> int:
        """Compute the int4 groups, and so the scales of each output, in a tile of inputs."""
        return tile_k // GROUP if self.operand.per_scale == GROUP else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(FusedLinear):
    """The static parameters of a launch."""

    tiles: Tiles

    @property
    def groups(self) -> int:
        """int4 groups in a tile of inputs."""
        return self.groups_per_tile(self.tiles.tile_k)

    @property
    def iterations(self) -> int:
        """Tiles of inputs per split; past the end of the inputs TMA fills in zeros."""
        return pl.cdiv(self.inputs, self.tiles.tile_k * self.tiles.split)


def plan_layer(layer: FusedLinear) -> Plan:
    """Return the layer's plan. Raises UnsupportedError."""
    return Plan(**vars(layer), tiles=choose_tiles(layer))


def choose_tiles(layer: FusedLinear) -> Tiles:
    """Choose the tuned tile sizes of these shapes, or else the default ones. Raises UnsupportedError."""
    return _tuned_tiles(layer) or _default_tiles(layer)


def _tuned_tiles(layer: FusedLinear) -> Tiles | None:
    """The tuned tile sizes, if there are any."""
    operand, norm, gated = layer.operand, layer.eps is not None, layer.matrices == 2
    key = f"rows={layer.columns},K={layer.inputs},N={layer.outputs},{operand.dtype},{operand.weights},{norm=},{gated=}"
    sizes = tuned("small_batch_linear", key)
    if sizes is None:
        return None
    tiles = Tiles(**sizes)
    if layer.x_resident and layer.inputs % tiles.tile_k:
        raise UnsupportedError(f"tile_k must divide resident rows of {layer.inputs} inputs, got tile_k={tiles.tile_k}")
    check_cluster(tiles.split)
    return tiles


def _default_tiles(layer: FusedLinear) -> Tiles:
    """Return tiles with the largest stages that fit into shared memory. Raises UnsupportedError."""
    tile_k = _tile_k(layer)
    if tiles := _fewest_splits(layer, tile_k) or (None if layer.x_resident else _fewest_splits(layer, tile_k // 2)):
        return tiles
    raise UnsupportedError(
        f"{layer.columns} rows of {layer.inputs} inputs leave no room for weights in {target_gpu().shared_bytes} bytes "
        "of shared memory"
    )


def _fewest_splits(layer: FusedLinear, tile_k: int) -> Tiles | None:
    """The fewest splits that give most SMs a thread block, with as many stages as there is shared memory for.

    Each further split writes and reads partial sums, and every block prepares a resident x (docs/decisions/0029).
    """
    gpu, stage_bytes = target_gpu(), _stage_bytes(layer, tile_k)
    tiles_n, tiles_k = pl.cdiv(layer.outputs, TILE_N), pl.cdiv(layer.inputs, tile_k)
    tiles: Tiles | None = None
    for split in range(1, min(MAX_CLUSTER, tiles_k) + 1):
        iterations = pl.cdiv(tiles_k, split)
        if (split - 1) * iterations >= tiles_k:  # one would have no inputs
            continue
        fixed_bytes = _fixed_bytes(layer, iterations * tile_k)
        for blocks in (2, 1):  # per SM
            stages = min(_MAX_STAGES, (gpu.shared_bytes_of(blocks) - fixed_bytes) // stage_bytes)
            if stages * stage_bytes * blocks >= _IN_FLIGHT:
                tiles = Tiles(tile_k=tile_k, stages=min(stages, iterations), split=split)
                break
        if tiles is not None and tiles_n * split >= _BUSY_SMS * gpu.sms:
            return tiles
    return tiles


def _tile_k(layer: FusedLinear) -> int:
    """Compute the inputs of a stage: 16 KB of weights, which need few instructions per byte.

    Tiles divide a resident row.
    """
    tile_k = 256 * layer.operand.per_element // layer.operand.weights.itemsize
    return math.gcd(tile_k, layer.inputs) if layer.x_resident else tile_k


def _stage_bytes(layer: FusedLinear, tile_k: int) -> int:
    """The shared memory of a stage: weights, their int4 scales, and x unless it is resident."""
    operand = layer.operand
    weights = tile_k * operand.weights.itemsize // operand.per_element + 2 * layer.groups_per_tile(tile_k)
    x = 0 if layer.x_resident else layer.columns * tile_k * operand.x.itemsize
    return TILE_N * layer.matrices * weights + x


def _fixed_bytes(layer: FusedLinear, inputs: int) -> int:
    """The shared memory besides the stages, if a thread block has this many inputs."""
    results_and_residual = layer.columns * TILE_N * (3 * 2 + 2 * layer.operand.dtype.itemsize)
    x = layer.resident_rows * layer.resident_row_size(inputs) * layer.operand.x.itemsize if layer.x_resident else 0
    return results_and_residual + x + _OTHER_BYTES
