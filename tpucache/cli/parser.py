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
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from tpucache import process
from tpucache.errors import TpucacheError, UsageError, redact
from tpucache.options import did_you_mean
from tpucache.process import PROG
from tpucache.progress import above_bars
from tpucache.text import printable, printable_lines

#: A function that returns the settings in a folder, in the form of a settings file. It may raise TpucacheError.
KeptSettings = Callable[[Path], Mapping[str, Any]]

#: Options that a settings file does not set.
_NOT_IN_FILES: Final = ("--help", "--help-all", "--config")
_OPTION: Final = re.compile(r"-[A-Za-z-]\S*")
_HOLDS_OPTIONS: Final = "--build"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults; in a short help, the text of an option up to the first semicolon."""

    is_short = False

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_left_out = action.default is False or action.default in (None, "", [])
        text = action.help if is_left_out else super()._get_help_string(action)
        if not self.is_short or not action.option_strings or text is None or action.help is None:
            return text
        return f"{action.help.partition(';')[0]}{text.removeprefix(action.help)}"


class Parser(argparse.ArgumentParser):
    """A parser whose errors have two lines: what is wrong, with passwords in URLs hidden, and where to find help."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, formatter_class=HelpFormatter, add_help=False, allow_abbrev=False)
        self.actions: Final[Sequence[argparse.Action]] = self._actions
        self.commands: Mapping[str, CommandParser] = {}
        self.add_argument("-h", "--help", action="help", help="show the help")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(redact(message))}\nsee {self.prog} --help\n")

    def format_help(self) -> str:
        return self._to_help()

    def _to_help(self, actions: Collection[argparse.Action] | None = None, *ends: str) -> str:
        """Return a help text of all actions, or a short one of the given actions, with paragraphs `ends`."""
        formatter: Any = self._get_formatter()
        formatter.is_short = actions is not None
        formatter.add_usage(f"%(prog)s {' '.join(self._usage_words())}", [], [])
        formatter.add_text(self.description)
        for group in self._action_groups:
            listed = [each for each in group._group_actions if each.help and (actions is None or each in actions)]
            if listed:
                formatter.start_section(group.title)
                formatter.add_text(None if formatter.is_short else group.description)
                formatter.add_arguments(listed)
                formatter.end_section()
        for end in filter(None, (self.epilog, *ends)):
            formatter.add_text(end)
        return str(formatter.format_help())

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
        if file is not None and file is sys.stdout:
            say(message.rstrip("\n"))  # argparse's own function would ignore a failed write
        else:
            super()._print_message(message, file)


class CommandParser(Parser):
    """The parser of one command. --help lists the flags `basic` (None: all); `missing` is why it cannot run."""

    def __init__(self, *, basic: Collection[str] | None = None, missing: str = "", **keywords: Any) -> None:
        super().__init__(**keywords)
        self._missing, self.basic = missing, basic
        if basic is not None:
            self.add_argument("--help-all", action=_HelpAll, help="show the help with all options")
        self.kept: KeptSettings | None = None  # reads a folder's settings, for --config
        self._file: tuple[str, Collection[str]] = ("", ())  # the settings file, and the flags that it sets

    def format_help(self) -> str:
        if self.basic is None:
            return self._to_help([each for each in self.actions if "--help" not in each.option_strings])
        listed = [
            each
            for each in self.actions
            if not each.option_strings or each.required or any(flag in self.basic for flag in each.option_strings)
        ]
        count = sum(bool(each.option_strings) for each in self.actions)
        return self._to_help(listed, f"all {count} options: {self.prog} --help-all")

    def format_help_all(self) -> str:
        return self._to_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self._missing:
            self.exit(2, f"{self.prog}: {self._missing}\n")
        words = _joined(sys.argv[1:] if args is None else args)
        given = self._given(words)
        if "config" in given:
            finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            finder.add_argument("--config")
            settings = self._read_settings(finder.parse_known_args(words)[0].config, given)
            words, given = [*settings, *words], given | self._given(settings)
        found, unknown = super().parse_known_args(words, namespace)
        found.explicit = given  # the names of the options that the user gave; a value may equal the default
        path, flags = self._file
        for action in self.code_in(found, flags):
            self.error(
                f"{path}: {action.dest} = {getattr(found, action.dest)!r} names code, which a file may not do: give "
                f"{action.option_strings[0]} on the command line"
            )
        if unknown:
            names = " ".join(str(each.metavar or each.dest) for each in self.actions if not each.option_strings)
            self.error(
                f"{unknown[0]!r} is one word too many: the command takes {names or 'options'} only (quote a pattern, "
                "as in 'photos/*.jpg')"
            )
        return found, []

    def code_in(self, found: argparse.Namespace, flags: Container[str]) -> list[Any]:
        can_name: list[Any] = [each for each in self.actions if hasattr(each, "names_code")]
        return [
            each for each in can_name if each.option_strings[0] in flags and each.names_code(getattr(found, each.dest))
        ]

    def error(self, message: str) -> NoReturn:
        path, flags = self._file
        named = re.match(r"argument (--[\w-]+)", message)
        super().error(f"{path}: {message}" if named and named[1] in flags else message)

    def _given(self, words: Sequence[str]) -> frozenset[str]:
        """Return the names of the options among the words. An unknown option is an error.

        argparse would first report a required option that is missing.
        """
        known, found = self._option_string_actions, set()
        for word in itertools.takewhile(lambda word: word != "--", words):
            flag = word[:2] if word[:2] in known else word.partition("=")[0]
            if flag in known:
                found.add(known[flag].dest)
            elif _OPTION.fullmatch(word):
                self.error(f"there is no option {flag}{self._meant(flag)}")
        return frozenset(found)

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
            action = self._option_string_actions.get(flag)
            if action is None or flag in _NOT_IN_FILES:
                self.error(f"{path}: there is no option {name!r}{self._meant(flag)}")
            texts = _to_words(flag, action, value)
            if texts is None:
                self.error(f"{path}: {name} = {reprlib.repr(value)} is not what {flag} takes")
            if action.dest not in given:
                words[flag] = texts
        self._file = path, words
        return [word for texts in words.values() for word in texts]


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **keywords: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **keywords)

    def __call__(self, parser: Any, *_: Any) -> None:
        parser._print_message(parser.format_help_all(), sys.stdout)
        parser.exit()


def _joined(words: Iterable[str]) -> list[str]:
    """Join --build and its text with "=": argparse would read a text such as "--exact" as an option of its own."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == _HOLDS_OPTIONS:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _to_words(flag: str, action: argparse.Action, value: object) -> list[str] | None:
    """Return a value of a settings file as words, or None if the option does not accept it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            return None
        return [flag] if value else [off for off in action.option_strings if off == f"--no-{flag[2:]}"]
    values = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in values):
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


def complain(error: object, status: int) -> int:
    return process.complain(str(error), status)


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
