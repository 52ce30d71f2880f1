"""Where every array lives.

Maps logical axis names ("heads") to mesh axes ("tensor"). No model code, no weights.
Start at `mesh.py` (which devices), then `rules.py` (which name goes where), then `collectives.py` (what model programs
exchange).
Axes: batch (B) = requests in one step; embed (D) = residual width; mlp (F) = hidden width; vocab (V) = token ids.
"""

from jaxinfer.sharding.mesh import MeshConfig, MeshFile, axes_text, check_mesh, check_rules, read_mesh
from jaxinfer.sharding.rules import ShardingRules

__all__ = ["MeshConfig", "MeshFile", "ShardingRules", "axes_text", "check_mesh", "check_rules", "read_mesh"]
