"""The output of commands: lines on standard output, errors as one line on standard error."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from tpucache.redact import redact

PROG: Final = "python -m tpucache"


class Parser(argparse.ArgumentParser):
    """A parser whose errors show no password of a URL that was given where none belongs."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong, and exit with status 2."""
        super().error(redact(message))


def show(options: argparse.Namespace, report: dict[str, Any], lines: Sequence[str]) -> None:
    """Print a report: one JSON object where asked for, lines otherwise."""
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        for line in lines:
            say(line)


def escape_unprintable() -> None:
    """Let standard output escape characters that its encoding lacks, as standard error does: names may contain any."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """Print a line, with any file names."""
    print(line.encode("utf-8", "backslashreplace").decode())


def note(line: str) -> None:
    """Print a line on standard error, apart from the report."""
    print(f"{PROG}: {line}".encode("utf-8", "backslashreplace").decode(), file=sys.stderr)


def complain(error: object, status: int) -> int:
    """Print an error as one line and return the exit status."""
    message = redact(" ".join(str(error).split()))
    print(f"{PROG}: {message}".encode("utf-8", "backslashreplace").decode(), file=sys.stderr)
    return status
