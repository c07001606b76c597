"""What commands read and print: parsers with two helps, options from a settings file, lines of output and of errors."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from tpucache import process
from tpucache.errors import TpucacheError, UsageError, redact
from tpucache.options import did_you_mean
from tpucache.process import PROG
from tpucache.progress import above_bars
from tpucache.text import printable, printable_lines

#: Adds an argument, or several, to a parser or to a section of its help.
Argument = Callable[[Any], object]
#: Returns the settings in a folder, in the form of a settings file. It may raise TpucacheError.
KeptSettings = Callable[[Path], Mapping[str, Any]]

#: Options that a settings file does not set.
_NOT_IN_FILES: Final = ("--help", "--help-all", "--config")
_OPTION: Final = re.compile(r"-[A-Za-z-]\S*")
#: Defaults that the help does not show, as text: 0 equals False.
_HIDDEN_DEFAULTS: Final = ("None", "False", "", "[]", argparse.SUPPRESS)


@dataclass(frozen=True)
class Command:
    """A command: a function, and its arguments. If there are `basic` flags, --help lists only these."""

    run: Callable[[argparse.Namespace], int]
    example: str
    arguments: Sequence[Argument]
    basic: Collection[str]


def command(
    example: str, *arguments: Argument, basic: Collection[str] = ()
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Return a decorator that makes a function a Command; --help shows `example`, and the function's docstring."""
    return lambda run: Command(run, example, arguments, basic)


class HelpFormatter(argparse.HelpFormatter):
    """Shows defaults; in a short help, the text of an option up to the first semicolon."""

    is_short = False

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if self.is_short and action.option_strings:
            text = text.partition(";")[0]
        return text if str(action.default) in _HIDDEN_DEFAULTS else f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """A parser whose errors have two lines: what is wrong, with passwords in URLs hidden, and where to find help."""

    def __init__(self, *, basic: Collection[str] = (), **keywords: Any) -> None:
        super().__init__(**keywords, formatter_class=HelpFormatter, add_help=False, allow_abbrev=False)
        self.actions: Final[Sequence[argparse.Action]] = self._actions
        self.basic: Final = basic
        self.commands: Mapping[str, CommandParser] = {}
        self.add_argument("-h", "--help", action="help", help="show the help")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(redact(message))}\nsee {self.prog} --help\n")

    def format_help(self) -> str:
        return self.to_help(is_short=True)

    def to_help(self, *, is_short: bool) -> str:
        formatter: Any = self._get_formatter()
        formatter.is_short = is_short
        formatter.add_usage(f"%(prog)s {' '.join(self._usage_words())}", [], [])
        formatter.add_text(self.description)
        for group in self._action_groups:
            listed = [each for each in group._group_actions if each.help and (self._is_basic(each) or not is_short)]
            if listed:
                formatter.start_section(group.title)
                formatter.add_text(None if is_short else group.description)
                formatter.add_arguments(listed)
                formatter.end_section()
        formatter.add_text(self.epilog)
        if is_short and self.basic:
            count = sum(bool(each.option_strings) for each in self.actions)
            formatter.add_text(f"all {count} options: {self.prog} --help-all")
        return str(formatter.format_help())

    def _is_basic(self, action: argparse.Action) -> bool:
        flags = action.option_strings
        return not (self.basic and flags) or action.required or not {*flags}.isdisjoint(self.basic)

    def _usage_words(self) -> Iterator[str]:
        for action in self.actions:
            name = str(action.metavar or action.dest.upper())
            if not action.option_strings:
                yield f"{name} ..." if action.nargs in ("+", argparse.PARSER) else name
            elif action.required:
                yield f"{action.option_strings[0]} {name}"
        yield "[options]"

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            if isinstance(error.__context__, UsageError):  # a ValueError, whose text argparse does not show
                error.message = str(error.__context__)
            raise

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        meant = did_you_mean(str(value), choices) or f": choose one of {', '.join(choices)}"
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {value!r}{meant}")
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{meant}")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is None or file is not sys.stdout:
            super()._print_message(message, file)
            return
        try:
            say(message.rstrip("\n"))  # argparse's own function would ignore a failed write
            flush()
        except BrokenPipeError:  # somebody has read enough of it
            process.forget_output(sys.stdout)


class CommandParser(Parser):
    """The parser of one command. `missing` is why the command cannot run."""

    def __init__(self, *, command: Command | None = None, missing: str = "", **keywords: Any) -> None:
        super().__init__(**keywords, basic=command.basic if command else ())
        self._missing = missing
        self.kept: KeptSettings | None = None  # reads a folder's settings, for --config
        self._file: tuple[str, Collection[str]] = ("", ())  # the settings file, and the flags that it sets
        if self.basic:
            self.add_argument("--help-all", action="store_true", help="show the help with all options")
        if command is not None:
            self.description = (command.run.__doc__ or "").strip()
            self.epilog = f"example: {self.prog} {command.example}"
            self.set_defaults(command=command.run)
            for add in command.arguments:
                add(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self._missing:
            self.exit(2, f"{self.prog}: {self._missing}\n")
        words = [*args]
        if "--build" in words:  # argparse would read a text such as "--exact" as an option of its own
            at = words.index("--build")
            words[at : at + 2] = ["=".join(words[at : at + 2])]
        given = self._given(words)
        if "help_all" in given:
            self._print_message(self.to_help(is_short=False), sys.stdout)
            self.exit()
        if path := given.get("config"):
            settings = self._read_settings(path, given)
            words, given = [*settings, *words], {**given, **self._given(settings)}
        found, unknown = super().parse_known_args(words, namespace)
        found.explicit = {*given}  # the names of the options that the user gave; a value may equal the default
        if unknown:
            names = " ".join(str(each.metavar or each.dest) for each in self.actions if not each.option_strings)
            self.error(
                f"{unknown[0]!r} is one word too many: the command takes {names or 'options'} only (quote a pattern, "
                "as in 'photos/*.jpg')"
            )
        return found, []

    def error(self, message: str) -> NoReturn:
        path, flags = self._file
        named = re.match(r"argument (--[\w-]+)", message)
        super().error(f"{path}: {message}" if named and named[1] in flags else message)

    def _given(self, words: Sequence[str]) -> dict[str, str]:
        """Return the names of the options among the words, with the text of each. An unknown option is an error.

        argparse would first report a required option that is missing.
        """
        known, found = self._option_string_actions, {}
        ours = itertools.takewhile(lambda word: word != "--", words)
        for word, after in itertools.zip_longest(ours, words[1:], fillvalue=""):
            flag, is_joined, text = word.partition("=")
            flag = word[:2] if word[:2] in known else flag
            if flag in known:
                found[known[flag].dest] = text if is_joined else after
            elif _OPTION.fullmatch(word):
                self.error(f"there is no option {flag}{self._meant(flag)}")
        return found

    def _meant(self, flag: str) -> str:
        names = [name.lstrip("-") for name in self._option_string_actions if len(name) > 2]
        return did_you_mean(flag.lstrip("-").lower().replace("_", "-"), names, "--")

    def _read_settings(self, path: str, given: Collection[str]) -> list[str]:
        """Return the settings in a file or folder as words of the command line, except those of `given`."""
        import tomllib

        from tpucache.store.files import read_file

        try:
            if self.kept is not None and Path(path).is_dir():
                settings = self.kept(Path(path))
            else:
                settings = tomllib.loads(read_file(Path(path)).decode())
            json.dumps(settings, default=str)  # fails for nesting and numbers that no message can show
        except (OSError, ValueError, RecursionError, TpucacheError) as error:
            self.error(f"--config {path} cannot be read: {error}")
        words: dict[str, list[str]] = {}
        for name, value in settings.items():
            flag = f"--{name.replace('_', '-')}"
            action: Any = self._option_string_actions.get(flag)
            if action is None or flag in _NOT_IN_FILES:
                self.error(f"{path}: there is no option {name!r}{self._meant(flag)}")
            if action.dest in given:
                continue
            texts = _to_words(flag, action, value)
            if texts is None:
                self.error(f"{path}: {name} = {reprlib.repr(value)} is not what {flag} takes")
            code = getattr(action, "code", None)
            if code is not None and any(":" in text.removeprefix(f"{flag}={code}") for text in texts):
                self.error(
                    f"{path}: {name} = {value!r} names code, which a file may not do: give {flag} on the command line"
                )
            words[flag] = texts
        self._file = path, words
        return [text for texts in words.values() for text in texts]


def _to_words(flag: str, action: argparse.Action, value: object) -> list[str] | None:
    """Return a value of a settings file as words, or None if the option does not accept it."""
    values = value if isinstance(value, (list, tuple)) else [value]
    if action.nargs == 0 and isinstance(value, bool):
        return [flag] if value else [off for off in action.option_strings if off == f"--no-{flag[2:]}"]
    if action.nargs == 0 or any(type(each) not in (str, int, float) for each in values):
        return None
    texts = [str(each) for each in values]
    return [f"{flag}={text}" for text in (texts if isinstance(action, argparse._AppendAction) else [",".join(texts)])]


def show(options: argparse.Namespace, report: dict[str, Any], lines: Sequence[str]) -> None:
    # json.dumps escapes all unprintable characters except DEL.
    for line in [json.dumps(report, indent=1).replace("\x7f", "\\u007f")] if options.json else lines:
        say(line)
    flush()


def escape_unprintable() -> None:
    """Escape what standard output cannot show, also in log messages: names of files, classes and columns."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
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
    """Print a line above any progress bar; the report at the end raises the error."""
    with contextlib.suppress(OSError, ValueError), above_bars():
        print(printable_lines(line), flush=True)


def note(line: str) -> None:
    process.tell(f"{PROG}: {line}")


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
