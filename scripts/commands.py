"""Running other programs: into a log, and with the reason when one fails."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]


class CommandError(Exception):
    """A program failed or cannot run here; the message is the reason, in one line."""


def say(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def make_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with a text as it is: the docstring of the program."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def run_logged(command: Sequence[str | Path], log: Path) -> None:
    """Run a program that writes into a log. Raises CommandError when it fails."""
    with log.open("w") as file:
        words = [str(word) for word in command]
        done = subprocess.run(words, check=False, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    if done.returncode:
        raise CommandError(reason(log))


def reason(log: Path) -> str:
    """Return the line of a log that most likely says why a program failed."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(error:|\w*(\.\w+)*(Error|Exception)\b)", line, re.IGNORECASE)]
    return f"{(errors or lines or ['ended without output'])[-1]} (see {log})"
