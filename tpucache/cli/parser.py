"""The parser of commands: a short and a full help, errors of two lines, and options from a settings file."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

from tpucache.cli.terminal import say
from tpucache.errors import TpucacheError
from tpucache.text import printable, redact

#: A function that returns the settings in a folder, in the form of a settings file. It may raise TpucacheError.
KeptSettings = Callable[[Path], Mapping[str, Any]]

#: Options that every command has. Only --help-all lists them.
_COMMON: Final = ("--help", "--help-all", "--traceback")
_OPTION: Final = re.compile(r"--?[A-Za-z]\S*")
#: An option that names the user's own code, module:name. timm:…, torch:… and the like are not code of the user.
_CODE: Final = re.compile(r"--[\w-]+=(?!(?:timm|torch|hub|kaggle):)[A-Za-z_][\w.]*:[A-Za-z_]")
#: Code as in _CODE, inside the text of an option that holds options of another command.
_CODE_IN_TEXT: Final = re.compile(r"(?:^|[\s='\"])(?!(?:timm|torch|hub|kaggle):)[A-Za-z_][\w.]*:[A-Za-z_]")
_HOLD_OPTIONS: Final = ("--build",)
_NEVER_CODE: Final = ("--watch",)  # its value looks like code: accuracy:max


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows each option's default. A short help shows the text of an option only up to the first semicolon."""

    is_short = False

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_left_out = action.default is False or action.default in (None, "", [])
        text = action.help if is_left_out else super()._get_help_string(action)
        if not self.is_short or not action.option_strings or text is None or action.help is None:
            return text
        first, rest = action.help.partition(";")[0], text.removeprefix(action.help)
        return f"{first}{rest}"


class Parser(argparse.ArgumentParser):
    """A parser whose errors have two lines: what is wrong, with passwords in URLs hidden, and where to find help."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, formatter_class=HelpFormatter, add_help=False)
        self.add_argument("-h", "--help", action="help", help="show the help")

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where to find help, and exit with status 2."""
        self.exit(2, f"{self.prog}: {printable(redact(message))}\nsee {self.prog} --help\n")

    def format_help(self) -> str:
        """Return the help with all options."""
        return self._to_help()

    def _to_help(self, actions: Collection[argparse.Action] | None = None, *ends: str) -> str:
        """Return a help text of all actions, or a short one of the given actions. `ends` are paragraphs at its end."""
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
        for action in self._actions:
            name = str(action.metavar or action.dest.upper())
            if not action.option_strings:
                yield f"{name} ..." if action.nargs in ("+", argparse.PARSER) else name
            elif action.required:
                yield f"{action.option_strings[0]} {name}"
        yield "[options]"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"there is no command {value!r}{_did_you_mean(value, choices) or _one_of(choices)}")
        meant = _did_you_mean(str(value), choices)
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{meant or _one_of(choices)}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print a help text or an error. argparse's own function would ignore a failed write."""
        if file is not None and file is sys.stdout:
            say(message.rstrip("\n"))
        else:
            super()._print_message(message, file)


class CommandParser(Parser):
    """The parser of one command.

    `basic` are the flags that --help lists; None lists all. --help-all always lists all. `missing` is the error for a
    command whose part of tpucache is not installed.
    """

    def __init__(self, *, basic: Collection[str] | None = None, missing: str = "", **keywords: Any) -> None:
        super().__init__(**keywords)
        self._missing = missing
        self.add_argument("--help-all", action=_HelpAll, help="show the help with all options")
        self._basic = basic
        self.kept: KeptSettings | None = None  # reads a folder's settings, for --config
        self._file: tuple[str, Collection[str]] = ("", ())  # the settings file, and the flags that it sets

    def format_help(self) -> str:
        """Return the help with the most used options."""
        listed = [each for each in self._actions if not each.option_strings or self._is_basic(each)]
        count = sum(bool(each.option_strings) for each in self._actions)
        return self._to_help(listed, f"all {count} options: {self.prog} --help-all")

    def format_help_all(self) -> str:
        """Return the help with all options."""
        return self._to_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the words of this command and the settings file of --config. An unknown word is an error."""
        if self._missing:
            self.exit(2, f"{self.prog}: {self._missing}\n")
        words = sys.argv[1:] if args is None else [*args]
        self._file = "", ()
        given = self._given(words)
        if "--config" in given:
            words = [*self._read_settings(given["--config"][-1], given), *words]
        words = _joined(words)
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            self.error(self._too_many(found, unknown))
        return found, []

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, with the settings file if the option is from that file, and exit with status 2."""
        path, flags = self._file
        named = re.match(r"argument (--[\w-]+)", message)
        super().error(f"{path}: {message}" if named and named[1] in flags else message)

    def _is_basic(self, action: argparse.Action) -> bool:
        flags = action.option_strings
        if self._basic is None:
            return not any(flag in _COMMON for flag in flags)
        return action.required or any(flag in self._basic for flag in flags)

    def _given(self, words: Sequence[str]) -> dict[str, list[str]]:
        """Return the list of values of each option among `words`, by the option's full flag. A switch has the value "".

        An unknown option is reported here, because argparse would first report a required option that is missing.
        """
        given: dict[str, list[str]] = {}
        rest = iter(words)
        for word in rest:
            if word == "--":
                break
            flag, equals, text = word.partition("=")
            if not flag.startswith("--") and word[:2] in self._option_string_actions:  # -oFILE
                flag, equals, text = word[:2], word[2:], word[2:]
            known = self._option_string_actions
            names = [flag] if flag in known else [name for name in known if flag[:2] == "--" and name.startswith(flag)]
            if not names and _OPTION.fullmatch(word):
                self.error(f"there is no option {flag}{self._meant(flag)}")
            if len(names) != 1:  # ambiguous: argparse reports it later
                continue
            if known[names[0]].nargs != 0 and not equals:
                text = next(rest, "")
            name = _flag(known[names[0]], names[0])
            given[name] = [*given.pop(name, ()), text]  # the option that was given last comes last
        return given

    def _meant(self, flag: str) -> str:
        names = [name.lstrip("-") for name in self._option_string_actions if len(name) > 2]
        return _did_you_mean(flag.lstrip("-").lower().replace("_", "-"), names, "--")

    def _too_many(self, found: argparse.Namespace, extra: Sequence[str]) -> str:
        taken = [action for action in self._actions if not action.option_strings]
        names = " ".join(str(action.metavar or action.dest) for action in taken)
        values = [getattr(found, action.dest) for action in taken]
        words = [word for value in values for word in (value if isinstance(value, list) else [value])]
        places = [Path(str(word)) for word in (*words, *extra)]
        for one, two in pairwise(places):
            if one.suffix and (one.parent, one.suffix) == (two.parent, two.suffix):
                return (
                    f"{one}, {two} and so on are given where {names} belong: the shell has put the names of files in "
                    f"place of a pattern. Quote the pattern, as in '{one.parent / '*'}{one.suffix}', or give the "
                    f"folder, {one.parent}"
                )
        return f"{extra[0]!r} is one word too many: the command takes {names or 'options'} only"

    def _read_settings(self, path: str, given: Mapping[str, Any]) -> list[str]:
        """Return the settings in the file or folder `path` as words of the command line.

        Settings of the options in `given` are left out: the command line itself has them. A file that cannot be read,
        an unknown option, a value that does not fit, and a value that names code are usage errors.
        """
        import tomllib

        from tpucache.store.files import read_file

        try:
            if self.kept is not None and Path(path).is_dir():
                settings = self.kept(Path(path))
            else:
                settings = tomllib.loads(read_file(Path(path)).decode())
        except (OSError, ValueError, TpucacheError) as error:
            self.error(f"--config {path} cannot be read: {error}")
        words: dict[str, list[str]] = {}
        for name, value in settings.items():
            flag = f"--{name.replace('_', '-')}"
            action = self._option_string_actions.get(flag)
            if action is None or flag in (*_COMMON, "--config"):
                self.error(f"{path}: there is no option {name!r}{self._meant(flag)}")
            texts = _to_words(flag, action, value)
            if texts is None:
                self.error(f"{path}: {name} = {value!r} is not what {flag} takes: see {self.prog} --help-all")
            if _flag(action, flag) in given:
                continue
            names_code = _CODE_IN_TEXT.search if flag in _HOLD_OPTIONS else _CODE.match
            if flag not in _NEVER_CODE and any(map(names_code, texts)):
                self.error(
                    f"{path}: {name} = {value!r} names code, which a file may not do: give {flag} on the command line"
                )
            words[flag] = texts
        self._file = path, [*words]
        return [word for texts in words.values() for word in texts]


class _HelpAll(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **keywords: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **keywords)

    def __call__(self, parser: Any, *_: Any) -> None:
        parser._print_message(parser.format_help_all(), sys.stdout)
        parser.exit()


def _flag(action: argparse.Action, given: str) -> str:
    return given if given.startswith("--no-") else action.option_strings[0]


def _joined(words: Sequence[str]) -> list[str]:
    """Join --build and its text with "=": argparse would read a text such as "--exact" as an option of its own."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] in _HOLD_OPTIONS:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _did_you_mean(word: str, names: Iterable[str], before: str = "") -> str:
    import difflib

    found = difflib.get_close_matches(word, names, 1)
    return f": did you mean {before}{found[0]}?" if found else ""


def _one_of(choices: Iterable[str]) -> str:
    return f": choose one of {', '.join(choices)}"


def _to_words(flag: str, action: argparse.Action, value: object) -> list[str] | None:
    """Return a value of a settings file as words of the command line, or None if the option does not accept it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            return None
        return [flag] if value else [off for off in action.option_strings if off == f"--no-{flag[2:]}"]
    values = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in values):
        return None
    texts = [str(each) for each in values]
    return [f"{flag}={text}" for text in (texts if isinstance(action, argparse._AppendAction) else [",".join(texts)])]
