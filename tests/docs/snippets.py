"""Code in Markdown: the blocks of a page, the commands in them and in its prose, and how to check and run them."""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import io
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main
from markdown_it import MarkdownIt

from tests.terminal import COLUMNS, Played

ROOT = Path(__file__).parents[2]
LANGUAGES = {"python", "sh", "text", "toml"}
NEEDS = {
    "docker": "Docker, or a cluster",
    "clone": "a clone and what `make` sets up in it",
    "gpu": "a GPU",
    "hours": "more time than a test has",
    "network": "a network",
    "peers": "other engines (`make peers`)",
    "server": "a server that runs, or a terminal for one",
    "torch": "PyTorch",
}
"""Marks of blocks that are checked and not run: `<!-- needs: gpu -->` in the line before."""
UNCHECKED = {"cd", "curl", "docker", "git", "kubectl", "source"}
"""Programs whose arguments are not looked at."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
      line: the number of its first line in the page.
      needs: one of NEEDS, or "" if it runs anywhere.
      output: what running it prints, by the block `text` that follows it; None if there is none.
    """

    page: Path
    line: int
    language: str
    code: str
    needs: str = ""
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: Path, text: str) -> list[Block]:
    """Return the blocks of a page; blocks `text` belong to those before them."""
    blocks, needs, previous = [], "", None
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        before, previous = previous, token
        if token.type == "html_block" and (mark := re.search(r"<!-- needs: (.*?) -->", token.content)):
            needs = mark[1]
        if token.type not in ("fence", "code_block"):
            continue
        if token.info == "text" and before is not None and before.type == "fence" and blocks:
            blocks[-1] = dataclasses.replace(blocks[-1], output=token.content)
        elif token.info != "text":
            blocks.append(Block(page, token.map[0] + 2, token.info, token.content, needs))
        needs = ""
    return blocks


def commands_in_prose(text: str) -> Iterator[str]:
    """Yield the commands of ours among a page's code spans, which are checked and not run."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        for child in token.children or ():
            if child.type == "code_inline" and re.match(r"(jaxinfer|python -m benchmarks\.\w+|make) ", child.content):
                yield child.content.replace("\\|", "|")


def check(block: Block) -> None:
    """Check a block without running it: its syntax, and that its commands have the options that they are given."""
    assert not block.needs or block.needs in NEEDS, f"{block}: {block.needs!r} is none of {', '.join(NEEDS)}"
    assert block.language in LANGUAGES, f"{block}: {block.language!r} is none of {', '.join(sorted(LANGUAGES))}"
    match block.language:
        case "python":
            compile(block.code, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        case "toml":
            tomllib.loads(block.code)
        case "sh":
            for line in logical_lines(block.code):
                check_line(line)


def logical_lines(code: str) -> Iterator[str]:
    """Yield lines of shell; one whose quotation goes on in the next lines ends with it."""
    pending = ""
    for line in code.replace("\\\n", " ").splitlines():
        pending += line
        try:
            shlex.split(pending, comments=True)
        except ValueError:
            pending += "\n"
        else:
            yield pending
            pending = ""
    assert not pending, f"a quotation does not end: {pending}"


def check_line(line: str) -> None:
    """Check a line of shell: commands joined by `&&`."""
    words = shlex.split(line, comments=True)
    while words:
        end = words.index("&&") if "&&" in words else len(words)
        command, words = words[:end], words[end + 1 :]
        while re.match(r"[A-Z_]+=", command[0]):
            command = command[1:]
        check_command(*command)


def check_command(program: str, *args: str) -> None:
    """Check that a program of ours has these arguments."""
    program = program.removeprefix(".venv/bin/")
    match program, args:
        case "jaxinfer", _:
            parse_with_typer(args)
        case "python", ("-m", module, *rest):
            parse_with_argparse(module, rest)
        case "python", (script, *rest):
            assert (ROOT / script).is_file(), f"there is no {script}"
            parse_with_argparse(script.removesuffix(".py").replace("/", "."), rest)
        case "make", targets:
            known = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
            unknown = {target for target in targets if "=" not in target} - known
            assert not unknown, f"the Makefile has no {unknown}"
        case "pip", ("install" | "download", *rest):
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            asked = {name for word in rest for part in re.findall(r"\[(.*)\]", word) for name in part.split(",")}
            assert asked <= extras.keys(), f"there are no extras {asked - extras.keys()}"
        case "pytest", words:
            for path in (word for word in words if word.startswith("tests/")):
                assert (ROOT / path.partition("::")[0]).exists(), f"there is no {path}"
        case _:
            assert program in UNCHECKED, f"what is {program}?"


def parse_with_typer(args: Sequence[str]) -> None:
    """Parse arguments of `jaxinfer` and do nothing. A command that is only named, without arguments, is right."""
    from jaxinfer.cli import app

    root = command = typer.main.get_command(app)
    for word in args:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
    else:
        return
    command.callback = None  # of this call's commands alone
    with contextlib.redirect_stdout(io.StringIO()):
        root.main([*args], standalone_mode=False)


class _Parsed(Exception):  # noqa: N818  # ends a program that has parsed its arguments
    pass


def parse_with_argparse(module: str, args: Sequence[str]) -> None:
    """Run a program until it has parsed its arguments."""
    program = importlib.import_module(module)
    if hasattr(program, "__path__"):
        program = importlib.import_module(f"{module}.__main__")
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        parse(parser, *given, **named)
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module, *args])
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                program.main()
        except _Parsed:
            return
        except SystemExit:
            raise AssertionError(errors.getvalue()) from None
    raise AssertionError(f"{module} parses no arguments")


MARK = "=== block"
TYPIST = f"""
import json, subprocess, sys
names = {{"__name__": "__main__"}}
for language, page, line, code in json.loads(sys.argv[1]):
    print("{MARK}", flush=True)
    if language == "sh":
        subprocess.run(["bash", "-euo", "pipefail", "-c", code], check=True)
    else:
        exec(compile("\\n" * (line - 1) + code, page, "exec"), names)
"""
"""Runs blocks as their reader does: Python in one interpreter, and between them the shell's."""


def runs(block: Block) -> bool:
    """Return whether a block is run: it is code, and needs nothing that not everyone has."""
    return block.language in ("python", "sh") and not block.needs


def typed(blocks: Sequence[Block]) -> list[str]:
    """Return the arguments with which a Python interpreter runs the blocks of a page."""
    return ["-c", TYPIST, json.dumps([(block.language, str(block.page), block.line, block.code) for block in blocks])]


def check_played(blocks: Sequence[Block], played: Played, folder: Path) -> None:
    """Check what a terminal has shown of blocks `typed` in a folder: no failure, and the outputs of the page."""
    texts = played.written.split(MARK)[1:]
    at = blocks[max(len(texts) - 1, 0)]
    assert played.status == 0, f"{at}: status {played.status}\n{played.text}"
    for block, written in zip(blocks, texts, strict=True):
        text = dataclasses.replace(played, written=written).text
        assert "Traceback (most recent call last)" not in text, f"{block} prints\n{text}"
        assert block.output is None or shown(block.output, text), f"{block} prints\n{text}"
        wide = [line for line in printed_lines(written.replace(f"{folder}/", "")) if len(line) > COLUMNS]
        assert block.language != "sh" or not wide, f"{block} prints lines of more than {COLUMNS} columns: {wide}"


def printed_lines(written: str) -> list[str]:
    """Return the lines that were sent to a terminal, without colours and what was overwritten in its line."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    return [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in plain.split("\n")]


def shown(output: str, text: str) -> bool:
    """Return whether a text ends with an output, or with it and notes in brackets; `...` stands for anything."""
    pattern = re.escape(" ".join(output.split())).replace(r"\.\.\.", ".*")
    return re.fullmatch(rf"(.* )?{pattern}( \[.*\])?", " ".join(text.split())) is not None
