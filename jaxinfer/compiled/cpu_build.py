"""Compiles this machine's CPU kernels: `python -m jaxinfer.compiled.cpu_build [FOLDER]`.

Set-ups run it, with progress; a process that needs the kernels starts it in the background. It ends at once if another
process is at it.
"""

import sys
from pathlib import Path

from jaxinfer.compiled.cpu_library import build_library, library_files
from jaxinfer.pallas_kernels.cpu.build import FOLDER


def main() -> None:
    """Compile, check and measure the kernels, and print which they are, or why there are none."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    try:
        with library_files().locked(seconds=0):
            pass
    except OSError:
        print("CPU kernels: another process compiles them.")
        return
    print(f"CPU kernels: {build_library(folder=folder)}")


if __name__ == "__main__":
    main()
