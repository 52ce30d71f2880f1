"""Fits all systems, and writes their constants to the planner's data file."""

import dataclasses

from benchmarks.deepspeed_figures.fits import fit
from benchmarks.deepspeed_figures.points import points
from jaxinfer.sharding.planner import Catalogue, System
from jaxinfer.sharding.planner.catalogue import DATA

FILE = DATA / "systems.toml"
HEAD = """\
# Constants of systems, at most six of which are fitted. Written by `python -m benchmarks.deepspeed_figures --fit`: the
# largest error of a system's points in benchmarks/data/deepspeed_inference.toml is as small as possible. Mixtures have
# `flops_share` and `token_s` of deepspeed-fp16.
"""
OF_DENSE = ("flops_share", "token_s")
"""Constants of mixtures that are not fitted: those of the same kernels in dense models."""


def fit_all() -> list[System]:
    """Fit every system of the catalogue."""
    systems = Catalogue.read().systems
    dense = fit(systems["deepspeed-fp16"], points("deepspeed-fp16"))
    made = [dense]
    for name, system in systems.items():
        if name == dense.name:
            continue
        if "flops_share" not in system.fitted:
            system = dataclasses.replace(system, **{constant: getattr(dense, constant) for constant in OF_DENSE})
        made.append(fit(system, points(name)))
    return made


def write(systems: list[System]) -> None:
    """Write the data file."""
    parts = [HEAD]
    for system in systems:
        lines = [f"[{system.name}]"]
        for field in dataclasses.fields(System):
            value = getattr(system, field.name)
            if field.name != "name" and value != field.default:
                lines.append(f"{field.name} = {_toml(value)}")
        parts.append("\n".join(lines) + "\n")
    FILE.write_text("\n".join(parts))


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).replace("'", '"') if isinstance(value, list) else f"{value:.3g}"
