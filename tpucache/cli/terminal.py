"""The output of commands: lines on standard output, errors as one line on standard error."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tpucache import process
from tpucache.errors import TpucacheError
from tpucache.process import PROG
from tpucache.progress import above_bars
from tpucache.text import printable, printable_lines, redact


def show(options: argparse.Namespace, report: dict[str, Any], lines: Sequence[str]) -> None:
    # json.dumps escapes all unprintable characters except DEL.
    for line in [json.dumps(report, indent=1).replace("\x7f", "\\u007f")] if options.json else lines:
        say(line)
    flush()


def escape_unprintable() -> None:
    """Names may contain characters that the encoding of standard output lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def escape_warnings() -> None:
    """Escape unprintable characters in the package's log messages, which name files, classes and columns."""
    logging.getLogger("tpucache").addFilter(_escape_record)


def _escape_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage()), ()
    return True


def say(line: str) -> None:
    """Print a line, escaped. Raises TpucacheError if that fails, BrokenPipeError for a closed pipe."""
    with _reported():
        print(printable_lines(line))


def flush() -> None:
    """A full disk often causes an error only here."""
    if sys.stdout is not None:
        with _reported():
            sys.stdout.flush()


def say_now(line: str) -> None:
    """Print a line above any progress bar while a command runs; the report at the end raises the error."""
    with contextlib.suppress(OSError, ValueError), above_bars():
        print(printable_lines(line), flush=True)


def note(line: str) -> None:
    process.tell(f"{PROG}: {line}")


def complain(error: object, status: int) -> int:
    return process.complain(redact(str(error)), status)


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        process.forget_output(sys.stdout)
        raise TpucacheError(
            f"standard output takes no more ({error.strerror}): the result of the command is kept, but its report "
            "is not written in full. Make room on the disk, or redirect the output"
        ) from error
