"""The command line. A short function runs each command; it imports its own modules, so that `--help` is fast."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from tpucache import process
from tpucache.cli.parser import CommandParser, Parser, Report, escape_unprintable, show
from tpucache.errors import DependencyError, RecipeError, SourceError, TpucacheError, UnfinishedError, UsageError
from tpucache.plugins import COMMANDS, load, missing_part, package_of
from tpucache.process import PROG
from tpucache.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 after an expected error, 2 for wrong usage, 3 if it was stopped and can continue."""
    escape_unprintable()
    words, options = sys.argv[1:] if arguments is None else [*arguments], argparse.Namespace(traceback=False)
    with process.stoppable():
        try:
            options = make_parser(next((word for word in words if not word.startswith("-")), "")).parse_args(words)
            options.arguments = words
            # Elapsed time counts from the start of the process, or, if another program calls `main`, from that call.
            shared = process.launched()
            options.began = shared["began"] if shared else process.BEGAN if arguments is None else time.monotonic()
            result: Report | int = options.command(options)
            return result if isinstance(result, int) else show(options, *result)
        except UnfinishedError as error:
            return process.complain(error, process.STOPPED)
        except KeyboardInterrupt as stop:
            return process.complain(stop if stop.args else process.INTERRUPTED, process.STOPPED)
        except BrokenPipeError:  # the program that read the output has ended: nobody would read a message
            process.forget_output(sys.stdout)
            return process.STOPPED if process.is_interrupted() else 1
        except Exception as error:  # noqa: BLE001  # raised again if nobody expects it
            if options.traceback:
                process.tell("".join(traceback.format_exception(error)).rstrip())
            return _explain(error)


def _explain(error: Exception) -> int:
    """Print an error, or what caused it, and return the exit status; raise an error that nobody expects."""
    if process.is_interrupted():  # a library made this error of the interrupt
        return process.complain(process.INTERRUPTED, process.STOPPED)
    text, is_expected = None, isinstance(error, TpucacheError)
    if not is_expected or isinstance(error, (DependencyError, RecipeError, SourceError)):  # a lack of memory caused it?
        text = process.shortage(error)
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("tpucache"):
        package = package_of(str(error.name).partition(".")[0])
        text = text or f"{error.name} is not installed, which this command needs: `pip install {package}`"
    if text is None and not is_expected:
        raise error
    return process.complain(text or error, 2 if isinstance(error, UsageError) else 1)


def make_parser(only: str | None = None) -> Parser:
    """Return the parser of all commands; with `only`, the modules of other commands are not imported."""
    parser = Parser(prog=PROG, description="Decode, resize and augment once; then read batches at memory speed.")
    parser.add_argument("--version", action="version", version=f"tpucache {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where in the code an error was raised")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    parser.commands = commands.choices
    for title, modules in COMMANDS.items():
        listed: Any = parser.add_argument_group(title)
        for module, texts in modules.items():
            missing = missing_part(module)
            for name, text in texts.items():
                command = None if missing or only not in (None, name) else load(f"{module}:{name}")
                commands.add_parser(name, help=missing or text, missing=missing, command=command)
                listed._group_actions.append(commands._choices_actions.pop())  # the line of --help
    return parser
