"""What pages show: their blocks, and the commands in them, which can be run as they are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tpucache.cli import main

DOCS = Path(__file__).parents[2] / "docs"
PROG = re.compile("(?:python -m )?tpucache ")


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language and the text of every fenced block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(text: str, program: re.Pattern[str] = PROG) -> list[list[str]]:
    """Return the words after the name of a program of each command; a backslash continues a line."""
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line[found.end() :], comments=True) for line in lines if (found := program.match(line))]


def run_blocks(page: str, *more: str) -> None:
    """Write, run and import what a page shows, from top to bottom, in the current folder."""
    space = {"__name__": "__main__"}
    for language, text in blocks(DOCS / page):
        if module := re.match(r"# (\w+\.py)\n", text):
            Path(module[1]).write_text(text)
        elif language == "python":
            exec(compile(text, page, "exec"), space)
        for words in commands(text) if language in ("sh", "bash") else ():
            assert main([*words, *more]) == 0, words
