"""Options that several subcommands share."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sharding import MeshConfig

MeshOption = Annotated[
    str | None, typer.Option(help='Devices: "tensor=2,data=1", or a TOML file with a [mesh] table (default: one).')
]
DtypeOption = Annotated[
    str | None, typer.Option(help="Of the matrices: float32, bfloat16 or float16 (default: as stored).")
]
QuantizeOption = Annotated[str | None, typer.Option(help="int8: multiply in int8 (default: as stored).")]


def parse_mesh(text: str | None) -> "MeshConfig | None":
    """What `--mesh` says."""
    from sharding import MeshConfig

    if text is None:
        return None
    return MeshConfig.parse(text) if "=" in text else MeshConfig.read(text)
