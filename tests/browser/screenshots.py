"""Makes the pictures of the page in docs/page: python -m tests.browser.screenshots, after `make conformance`.

Letters are those of the fonts that the machine has; the pictures here are of one with Inter and JetBrains Mono.
"""

import subprocess
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser.servers import serving_the_page
from tests.conformance.conftest import ROOT, TOOLS

FOLDER = ROOT / "docs/page"
COLOURS = 128  # a page has few, and its pictures are small


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, serving_the_page(Path(folder)) as server:
        script = Path(__file__).with_name("pages.py")
        subprocess.run([TOOLS / "bin/python", script, "pictures", server.url, FOLDER], check=True)
    for file in FOLDER.glob("*.png"):
        Image.open(file).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    main()
