"""The command line: one short function a command, which imports what it runs inside itself."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence

from tpucache import __version__
from tpucache.cli import inspecting, predicting, publishing, training, warming
from tpucache.cli.terminal import PROG, Parser, complain, escape_unprintable
from tpucache.errors import TpucacheError, UnfinishedError, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done. 1: an expected failure, explained in one line on standard error. 2: wrong usage. 3: stopped in good order
    before it was done, by a time limit, Ctrl-C or SIGTERM; the same command continues.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # workers are stopped as after Ctrl-C
    escape_unprintable()
    try:
        return _run(_parser().parse_args(arguments))
    except UsageError as error:
        return complain(error, 2)
    except UnfinishedError as error:
        return complain(error, 3)
    except TpucacheError as error:
        return complain(error, 1)
    except KeyboardInterrupt as stop:
        return complain(stop if stop.args else "interrupted: run the same command again to continue", 3)
    except BrokenPipeError:  # the reader of a pipe went away: nobody is left to read a message
        sys.stderr.close()
        return 1


def _run(options: argparse.Namespace) -> int:
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except TpucacheError as error:
        if options.traceback:
            traceback.print_exception(error)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROG, description="Decode, resize and augment once; then read batches at memory speed.")
    parser.add_argument("--version", action="version", version=f"tpucache {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for group in (warming, inspecting, training, predicting, publishing):
        group.add(commands)
    return parser
