"""What commands read and print: their parser, settings files, arguments that several share, and lines of output."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import math
import os
import re
import reprlib
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from tpucache import process
from tpucache.errors import TpucacheError, UsageError, redact
from tpucache.ondevice.settings import AugmentSettings
from tpucache.options import Option, did_you_mean, options_of
from tpucache.process import PROG
from tpucache.progress import above_bars
from tpucache.text import printable, printable_lines

Settings = TypeVar("Settings")
Parse = Callable[[str], Any]
#: What a command reports, as JSON values and as lines.
Report = tuple[dict[str, Any], Iterable[str]]
#: Runs a command. Returns its report, or the exit status if it has printed a report itself.
Run = Callable[[argparse.Namespace], Report | int]
#: Adds an argument, or several, to a parser or to a section of its help.
Argument = Callable[[Any], object]
#: Returns the settings in a folder, in the form of a settings file. It may raise TpucacheError.
KeptSettings = Callable[[Path], Mapping[str, Any]]

#: Options that a settings file does not set.
_NOT_IN_FILES: Final = re.compile("--(help|help-all|config|no-.*)")
#: What follows a first semicolon in the text of an option, up to its default.
_MORE: Final = re.compile(r";.*?(?= \(default: %|$)")
_OPTION: Final = re.compile(r"-[A-Za-z-]\S*")


@dataclass(frozen=True)
class Command:
    """A command: a function, and its arguments. If there are `basic` flags, --help lists only these."""

    run: Run
    example: str
    arguments: Sequence[Argument]
    basic: Collection[str]


def command(example: str, *arguments: Argument, basic: Collection[str] = ()) -> Callable[[Run], Command]:
    """Return a decorator that makes a function a Command; --help shows `example`, and the function's docstring."""
    return lambda run: Command(run, example, arguments, basic)


class Parser(argparse.ArgumentParser):
    """A parser whose errors have two lines: what is wrong, with passwords in URLs hidden, and where to find help."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, add_help=False, allow_abbrev=False)
        self.actions: Final[Sequence[argparse.Action]] = self._actions
        self.commands: Mapping[str, CommandParser] = {}
        self.add_argument("-h", "--help", action="help", help="show the help")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(redact(message))}\nsee {self.prog} --help\n")

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
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}{meant}")

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        try:
            say(message.rstrip("\n"))  # argparse's own function would ignore a failed write
        except BrokenPipeError:  # somebody has read enough of it
            process.forget_output(sys.stdout)


class CommandParser(Parser):
    """The parser of one command. `missing` is why the command cannot run."""

    kept: KeptSettings  # reads a folder for --config, which sets this

    def __init__(self, *, command: Command | None = None, missing: str = "", **keywords: Any) -> None:
        super().__init__(**keywords)
        self._missing, self.basic = missing, command.basic if command else ()
        if self.basic:
            self.add_argument("--help-all", action="help", help="show the help with all options")
        if command is not None:
            self.description = (command.run.__doc__ or "").strip()
            self.epilog = f"example: {self.prog} {command.example}"
            self.set_defaults(command=command.run)
            for add in (JSON, *command.arguments):
                add(self)
        needed = [word for each in self.actions if each.required for word in (*each.option_strings[:1], each.metavar)]
        self.usage = " ".join(["%(prog)s [options]", *map(str, needed)])

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        if self._missing:
            self.exit(2, f"{self.prog}: {self._missing}\n")
        words = [*args]
        if "--build" in words:  # argparse would read a text such as "--exact" as an option of its own
            at = words.index("--build")
            words[at : at + 2] = ["=".join(words[at : at + 2])]
        given = self._given(words)
        if "help" in given and self.basic:
            self._shorten_help()
        kept = self._read_settings(given["config"], given) if given.get("config") else {}
        found, unknown = super().parse_known_args(words, argparse.Namespace(**kept))
        found.explicit = {*given, *kept}  # the names of the options that the user gave; a value may equal the default
        if unknown:
            self.error(f"{unknown[0]!r} is one word too many (quote a pattern, as in 'photos/*.jpg')")
        return found, []

    def _shorten_help(self) -> None:
        """Leave in the help only the basic options, each up to the first semicolon."""
        for each in self.actions:
            if each.option_strings and each.help:
                is_basic = each.required or {*each.option_strings} & {*self.basic, "--help-all"}
                each.help = _MORE.sub("", each.help) if is_basic else argparse.SUPPRESS

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
                self.error(f"there is no option {flag}{did_you_mean(flag.lower().replace('_', '-'), known)}")
        return found

    def _read_settings(self, path: str, given: Collection[str]) -> dict[str, Any]:
        """Return the settings in a file or folder by the names of their options, except those of `given`."""
        import tomllib

        from tpucache.store.files import read_file

        try:
            folder = Path(path)
            settings = self.kept(folder) if folder.is_dir() else tomllib.loads(read_file(folder).decode())
            json.dumps(settings, default=str)  # fails for nesting and numbers that no message can show
        except (OSError, ValueError, RecursionError, TpucacheError) as error:
            self.error(f"--config {path} cannot be read: {error}")
        found = {}
        for name, value in settings.items():
            flag = f"--{name.replace('_', '-')}"
            action = self._option_string_actions.get(flag)
            if action is None or _NOT_IN_FILES.fullmatch(flag):
                meant = did_you_mean(flag.lower(), self._option_string_actions)
                self.error(f"{path}: there is no option {name!r}{meant}")
            if action.dest not in given:
                try:
                    found[action.dest] = self._parsed(flag, action, value)
                except argparse.ArgumentError as error:
                    self.error(f"{path}: {error}")
                action.required = False
        return found

    def _parsed(self, flag: str, action: Any, value: object) -> Any:
        """Return a value of a settings file as the option would have parsed its text. Raises ArgumentError."""
        values = value if isinstance(value, (list, tuple)) else [value]
        if action.nargs == 0 and isinstance(value, bool):
            return value
        if action.nargs == 0 or any(type(each) not in (str, int, float) for each in values):
            raise argparse.ArgumentError(action, f"it does not take {reprlib.repr(value)}")
        is_repeated = isinstance(action, argparse._AppendAction)
        texts = [*map(str, values)] if is_repeated else [",".join(map(str, values))]
        if action.code is not None and any(":" in text.removeprefix(action.code) for text in texts):
            raise argparse.ArgumentError(
                action, f"{value!r} names code, which a file may not do: give {flag} on the command line"
            )
        parsed = [self._get_value(action, text) for text in texts]
        for each in parsed:
            self._check_value(action, each)
        return parsed if is_repeated else parsed[0]


def value(
    flags: str,
    metavar: str | None,
    text: str,
    parse: Parse = str,
    default: Any = None,
    code: str | None = None,
    **others: Any,
) -> Argument:
    """Return an argument with a value; `flags` are as in the help, such as "-o, --output"."""
    if "choices" in others:  # the help shows only tpucache's own, if other packages can add some
        metavar = "{" + ",".join(getattr(others["choices"], "own", others["choices"])) + "}"
    if default not in (None, "", [], {}):
        text += " (default: %(default)s)"

    def add(target: Any) -> None:
        action = target.add_argument(
            *flags.split(", "), metavar=metavar, help=text, type=parse, default=default, **others
        )
        action.code = code  # which `CommandParser` asks about values of a settings file

    return add


def flag(name: str, text: str) -> Argument:
    return lambda target: target.add_argument(name, action="store_true", help=text)


def section(title: str, *arguments: Argument) -> Argument:
    """Return arguments that the help shows under a title."""

    def add(target: argparse.ArgumentParser) -> None:
        group = target.add_argument_group(title)
        for argument in arguments:
            argument(group)

    return add


def fields_of(settings: type, without: Collection[str] = (), can_be_off: bool = False, **parsers: Parse) -> Argument:
    """Return the options of a dataclass; `parsers` parse texts for which a type is not enough."""
    switch: Any = argparse.BooleanOptionalAction if can_be_off else "store_true"

    def add(target: Any) -> None:
        for name, each in options_of(settings).items():
            if bool in each.types and name not in without:
                action = target.add_argument(each.flag, dest=name, action=switch, help=each.help)
                action.default = False  # Python 3.11 would add one that is given before to the help
            elif name not in without:
                _valued(each, parsers.get(name))(target)

    return add


def _valued(each: Option, parse: Parse | None) -> Argument:
    default, others = each.default, dict[str, Any](dest=each.name)
    if each.choices:
        others["choices"] = each.choices
    elif default is MISSING:
        default, others["required"] = None, True
    elif isinstance(default, tuple) and parse is None:
        default, others["action"] = [*default], "append"
    if parse is None:
        kind = each.types[-1] if each.types else str
        parse = local_path if kind is Path else kind if each.minimum is None else at_least(each.minimum)
    return value(each.flag, each.metavar, each.help, parse, default, each.code, **others)


def from_options(settings: type[Settings], options: argparse.Namespace, **others: Any) -> Settings:
    known = options_of(settings)
    return settings(**{name: value for name, value in vars(options).items() if name in known} | others)


#: Changes of images that have no option of their own: `--augment` sets them.
_CHANGES: Final = tuple(name for name in options_of(AugmentSettings) if name not in ("flip", "mixup", "crop", "zoom"))


def augmentation_options(can_be_off: bool = False) -> tuple[Argument, Argument]:
    """Return the options of AugmentSettings, of which `--augment` sets most."""
    return fields_of(AugmentSettings, without=_CHANGES, can_be_off=can_be_off), value(
        "--augment",
        "NAME=X,NAME",
        "further changes: vertical_flip, shift=PIXELS, rotate (by 90 degrees), tilt=DEGREES, brightness=X, "
        "contrast=X, saturation=X, hue=X, blur=PIXELS, grey=P, erase=P, cutmix=ALPHA, "
        "rand_augment=N, trivial_augment, magnitude=M (of rand_augment), views=N (of each sample, for contrastive "
        "training)",
        _changes,
        {},
        dest="changes",
    )


def _changes(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        if name not in _CHANGES:
            raise UsageError(f"{name!r} is none of {', '.join(_CHANGES)}")
        try:
            found[name] = options_of(AugmentSettings)[name].types[-1](float(number or 1))
        except (ValueError, OverflowError) as error:
            raise UsageError(f"{name} is a number, not {number!r}") from error
    return found


def augmentation(options: argparse.Namespace) -> AugmentSettings:
    return from_options(AugmentSettings, options, **options.changes)


def with_changes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name in the form of a settings file, with those that `--augment` sets in `augment`."""
    others = {name: value for name, value in settings.items() if name not in _CHANGES}
    changes = ",".join(f"{name}={float(settings[name])}" for name in _CHANGES if name in settings)
    return {**others, "augment": changes} if changes else others


def cache_place(text: str) -> str | Path:
    from tpucache.store.files import is_kaggle, is_url

    return text if is_kaggle(text) or (is_url(text) and not text.startswith("file:")) else local_path(text)


def local_path(text: str) -> Path:
    from tpucache.store.files import check_is_local

    check_is_local(text)
    return Path(text)


def list_path(text: str) -> Path:
    """Return a list's path. Standard input, `-`, or a pipe of the shell, `<(…)`, is first read into memory."""
    if text != "-" and not text.startswith("/dev/fd/"):
        return local_path(text)
    copy = Path(f"/proc/self/fd/{os.memfd_create('list')}")
    try:
        copy.write_bytes(Path("/dev/stdin" if text == "-" else text).read_bytes())
    except OSError as error:
        raise UsageError(f"{text} cannot be read: {error}") from error
    return copy


def cache(text: str) -> Path:
    """Return the folder of a cache, given as a path or as kaggle:slug, a dataset that Kaggle has mounted."""
    from tpucache.loading.find import locate

    return locate(text)


def cache_or_url(text: str) -> str | Path:
    from tpucache.store.files import is_url

    return text if is_url(text) else cache(text)


def names(text: str) -> Path:
    return cache(text) if text.startswith("kaggle:") else local_path(text)


def size(text: str) -> int | tuple[int, ...]:
    sides = tuple(map(int, text.lower().split("x")))
    return sides[0] if len(sides) == 1 else sides


def colours(text: str) -> tuple[str, ...]:
    """Return the colours in a .csv as rrggbb: the last three cells of each line, perhaps after a header."""
    from tpucache.store.files import read_text

    try:
        rows = [line.split(",")[-3:] for line in read_text(text, "utf-8-sig").splitlines() if line.strip()]
        has_header = not all(cell.strip().isdecimal() for cell in rows[0])
        return tuple(bytes(map(int, cells)).hex() for cells in rows[has_header:])
    except (OSError, ValueError, IndexError) as error:
        raise UsageError(f"{text} is not a .csv of red, green and blue, 0 to 255: {error}") from error


def seconds(text: str) -> float:
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip().lower())
    if parts is None or not any(parts.groups()):
        raise UsageError(f"a time looks like 8h, 1h30m, 90m or 5400, not {text!r}")
    hours, minutes, rest = (float(part or 0) for part in parts.groups())
    return 3600 * hours + 60 * minutes + rest


def at_least(minimum: int) -> Callable[[str], int]:

    def number(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise UsageError(f"must be at least {minimum}, not {value}")
        return value

    return number


positive = at_least(1)
natural = at_least(0)


def rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise UsageError(f"must be a number above 0, not {text}")
    return value


JSON: Final = flag("--json", "print one JSON object instead of text")
CACHE: Final = value(
    "cache", "CACHE", "the folder of a cache that warmup built, or kaggle:slug for a mounted cache", cache
)
CACHE_OR_URL: Final = value(
    "cache",
    "CACHE",
    "the folder of a cache that warmup built, kaggle:slug for a mounted cache, or the URL of a cache",
    cache_or_url,
)
KEEPING: Final = section(
    "a cache at a URL (gs://, s3://, https://, http://, hf://)",
    value(
        "--cache-dir",
        "DIR",
        "keep downloaded records in this folder; default: $TPUCACHE_DIR, or tpucache in the user's cache folder",
        local_path,
    ),
    value("--cache-gb", "N", "keep at most N GB; default: all records, up to 80%% of the free disk", rate),
)


def keeping(options: argparse.Namespace) -> dict[str, Any]:
    """Return --cache-dir and --cache-gb as arguments of CachedDataset; UsageError if --cache-gb has no effect."""
    from tpucache.store.files import is_url

    most, folder = options.cache_gb, options.cache_dir
    places = map(str, (options.cache, getattr(options, "valid", None)))
    if most is not None and folder is None and not any(map(is_url, places)):
        raise UsageError(
            f"--cache-gb limits the local copy of a cache at a URL, and {options.cache} is a folder of this machine: "
            "leave --cache-gb out, or add --cache-dir"
        )
    return {"cache_dir": folder, "cache_bytes": None if most is None else int(most * 1e9)}


def config(kind: str, kept: KeptSettings) -> Argument:
    """Return --config, for a TOML file, or for a folder (`kind`) whose settings `kept` reads."""

    def add(target: CommandParser) -> None:
        target.kept = kept
        text = f"take options from a file or another {kind}; lines of a file look like `seed = 1`; options on the "
        value("--config", "FILE.toml", f"{text}command line win", local_path)(target)

    return add


def reading(target: Any) -> None:
    from tpucache.loading.ahead import ReadingOptions

    fields_of(ReadingOptions)(target)


def show(options: argparse.Namespace, report: dict[str, Any], lines: Iterable[str]) -> int:
    """Print a report as JSON or as lines; return the exit status 0."""
    # json.dumps escapes all unprintable characters except DEL.
    for line in [json.dumps(report, indent=1).replace("\x7f", "\\u007f")] if options.json else lines:
        say(line)
    return 0


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
    try:
        print(printable_lines(line), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        process.forget_output(sys.stdout)
        raise TpucacheError(
            f"standard output takes no more ({error.strerror}): the result of the command is kept, but its report "
            "is not written in full. Make room on the disk, or redirect the output"
        ) from error


def say_now(line: str) -> None:
    """Print a line above any progress bar; the report at the end raises the error."""
    with contextlib.suppress(OSError, ValueError), above_bars():
        print(printable_lines(line), flush=True)


def note(line: str) -> None:
    process.tell(f"{PROG}: {line}")
