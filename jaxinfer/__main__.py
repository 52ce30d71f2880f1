"""`python -m jaxinfer`: the command line."""

from jaxinfer.cli import app

if __name__ == "__main__":
    app(prog_name="jaxinfer")
