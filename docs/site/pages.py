"""Pages of the site that are files elsewhere, or none: README, the changelog, the command line's reference."""

import subprocess
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    pages = {
        "index.md": (ROOT / "README.md").read_text().replace("](CHANGELOG.md)", "](changelog.md)"),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "command-line.md": command_line(),
    }
    for name, content in pages.items():  # as if they were in docs/
        files.append(File.generated(config, name, content=content.replace("](docs/", "](")))
    return files


def command_line() -> str:
    """Return what `--help` says of all commands, by typer."""
    command = [sys.executable, "-m", "typer", "jaxinfer.cli", "utils", "docs", "--name", "jaxinfer"]
    pages = subprocess.run([*command, "--title", "Command line"], cwd=ROOT, check=True, capture_output=True, text=True)
    return pages.stdout
