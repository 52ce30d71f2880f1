"""Which mesh and schedule suit a model on given devices, predicted before any device is rented.

Plain arithmetic on sizes; it reads data files of this folder, and imports nothing of jaxinfer but the pipeline
schedules next to it. Start at `search.py` (which plans there are, and their ranking), then `plans.py` (what a plan
takes), then `costs.py` (what a pass through some layers takes: a roofline, and alpha-beta links) and `exchanges.py`
(what devices send one another). `shapes.py` describes models, `hardware.py` devices, and `catalogue.py` reads both from
`data/`. `tiers.py` knows what comes from the host or a disk.
"""

from jaxinfer.sharding.planner.catalogue import Catalogue
from jaxinfer.sharding.planner.costs import Fetched, Format, Runner, Seconds, System, Tokens
from jaxinfer.sharding.planner.hardware import Device, Ways
from jaxinfer.sharding.planner.plans import Plan, Prediction, Workload, predict
from jaxinfer.sharding.planner.search import NothingFitsError, rank
from jaxinfer.sharding.planner.shapes import LayerShape, ModelShape

__all__ = [
    "Catalogue",
    "Device",
    "Fetched",
    "Format",
    "LayerShape",
    "ModelShape",
    "NothingFitsError",
    "Plan",
    "Prediction",
    "Runner",
    "Seconds",
    "System",
    "Tokens",
    "Ways",
    "Workload",
    "predict",
    "rank",
]
