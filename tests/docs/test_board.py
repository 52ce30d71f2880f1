"""The board that docs/experts.md shows is the one in `examples/`."""

from pathlib import Path

from tests.docs.snippets import ROOT, read_blocks


def test_the_board_on_the_page_is_the_file():
    page = Path("docs/experts.md")
    boards = [block.code for block in read_blocks(page, (ROOT / page).read_text()) if block.language == "toml"]
    assert (ROOT / "examples/board/board.toml").read_text() in boards
