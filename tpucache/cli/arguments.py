"""Arguments of the command line: options of dataclasses, and options that several commands share."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Final, TypeVar

from tpucache.cli.parser import CommandParser, KeptSettings
from tpucache.errors import UsageError
from tpucache.ondevice.settings import AugmentSettings
from tpucache.options import Option, options_of
from tpucache.process import PROG

Settings = TypeVar("Settings")


def add_command(
    commands: Any,
    run: Callable[[argparse.Namespace], int],
    example: str,
    basic: Collection[str] | None = None,
) -> argparse.ArgumentParser:
    """Add a command that calls `run`, with the name and the docstring of `run`.

    `basic` are the flags that --help lists.
    """
    text = (run.__doc__ or "").strip()
    command: argparse.ArgumentParser = commands.add_parser(
        run.__name__,
        help=text,
        description=text,
        epilog=f"example: {PROG} {run.__name__} {example}",
        basic=basic,
    )
    command.set_defaults(command=run)
    return command


def add_options(
    group: Any,
    settings: type,
    only: Container[str] | None = None,
    without: Container[str] = (),
    parsers: Mapping[str, Callable[[str], Any]] | None = None,
    can_be_off: bool = False,
) -> None:
    """Add the options of a dataclass.

    `parsers` parse an option's text if its type is not enough; `can_be_off` adds --no-NAME.
    """
    for each in options_of(settings).values():
        if (only is None or each.name in only) and each.name not in without:
            keywords = _keywords(each, (parsers or {}).get(each.name))
            if can_be_off and bool in each.types:
                keywords["action"] = argparse.BooleanOptionalAction
            action = group.add_argument(each.flag, dest=each.name, help=each.help, **keywords)
            if "action" in keywords and action.default is None:  # given before, Python 3.11 would add it to the help
                action.default = False
            action.names_code = each.names_code  # which `CommandParser` asks about values of a settings file


#: Changes of images that have no option of their own: `--augment` sets them.
_CHANGES: Final = (
    *("vertical_flip", "shift", "rotate", "tilt", "brightness", "contrast", "saturation", "hue", "blur", "grey"),
    *("erase", "cutmix", "rand_augment", "trivial_augment", "magnitude", "views"),
)


def add_augmentation(group: Any, can_be_off: bool = False) -> None:
    """Add the options of AugmentSettings, of which `--augment` sets most."""
    add_options(group, AugmentSettings, without=_CHANGES, can_be_off=can_be_off)
    group.add_argument(
        "--augment",
        dest="changes",
        type=_changes,
        default={},
        metavar="NAME=X,NAME",
        help="further changes: vertical_flip, shift=PIXELS, rotate (by 90 degrees), tilt=DEGREES, brightness=X, "
        "contrast=X, saturation=X, hue=X, blur=PIXELS, grey=P, erase=P, cutmix=ALPHA, "
        "rand_augment=N, trivial_augment, magnitude=M (of rand_augment), views=N (of each sample, for contrastive "
        "training)",
    )


def _changes(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in _CHANGES:
            raise UsageError(f"{name!r} is none of {', '.join(_CHANGES)}")
        kind = options_of(AugmentSettings)[name].types[-1]
        try:
            found[name] = kind(float(value or 1))
        except (ValueError, OverflowError) as error:
            raise UsageError(f"{name} is a number, not {value!r}") from error
    return found


def augmentation(options: argparse.Namespace) -> AugmentSettings:
    return from_options(AugmentSettings, options, **options.changes)


def with_changes(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name in the form of a settings file, with those that `--augment` sets in `augment`."""
    others = {name: value for name, value in settings.items() if name not in _CHANGES}
    changes = ",".join(f"{name}={float(settings[name])}" for name in _CHANGES if name in settings)
    return {**others, "augment": changes} if changes else others


def from_options(settings: type[Settings], options: argparse.Namespace, **others: Any) -> Settings:
    known = options_of(settings)
    given = {name: value for name, value in vars(options).items() if name in known}
    return settings(**{**given, **others})


def _keywords(each: Option, parser: Callable[[str], Any] | None) -> dict[str, Any]:
    if bool in each.types:
        return {"action": "store_true"}
    if each.choices:
        return {"choices": each.choices, "metavar": listed(each.choices), "default": each.default}
    if each.default is MISSING:
        return {"required": True, "metavar": each.metavar}
    if isinstance(each.default, tuple) and parser is None:
        return {"action": "append", "default": [*each.default], "metavar": each.metavar}
    kind: Callable[[str], Any] | None = parser
    if kind is None:
        parse = local_path if each.types[-1] is Path else each.types[-1]
        kind = parse if each.minimum is None else at_least(each.minimum)
    return {"type": kind, "default": each.default, "metavar": each.metavar}


def listed(choices: Collection[Any]) -> str:
    """Return choices as the help shows them: only tpucache's own, if other packages can add some."""
    return "{" + ",".join(map(str, getattr(choices, "own", choices))) + "}"


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


def add_cache(
    command: argparse.ArgumentParser,
    metavar: str = "CACHE",
    text: str = "the folder of a cache that warmup built, or kaggle:slug for a mounted cache",
    parse: Callable[[str], Any] | None = None,
) -> None:
    command.add_argument("cache", metavar=metavar, type=parse or cache, help=text)
    add_json(command)


def add_cache_or_url(
    command: argparse.ArgumentParser,
    metavar: str = "CACHE",
    text: str = "the folder of a cache that warmup built, kaggle:slug for a mounted cache, or the URL of a cache",
    *,
    keeps: bool = False,
) -> None:
    add_cache(command, metavar, text, cache_or_url)
    group = command.add_argument_group("a cache at a URL", "gs://, s3://, https://, http://, hf://")
    if keeps:
        group.add_argument(
            "--cache-dir",
            type=local_path,
            metavar="DIR",
            help="keep downloaded records in this folder; default: $TPUCACHE_DIR, or tpucache in the user's cache "
            "folder",
        )
        group.add_argument(
            "--cache-gb",
            type=rate,
            metavar="N",
            help="keep at most N GB; default: all records, up to 80%% of the free disk",
        )


def keeping(options: argparse.Namespace) -> dict[str, Any]:
    """Return --cache-dir and --cache-gb as arguments of CachedDataset; UsageError if --cache-gb has no effect."""
    from tpucache.store.files import is_url

    most, folder = getattr(options, "cache_gb", None), getattr(options, "cache_dir", None)
    places = map(str, (options.cache, getattr(options, "valid", None)))
    if most is not None and folder is None and not any(map(is_url, places)):
        raise UsageError(
            f"--cache-gb limits the local copy of a cache at a URL, and {options.cache} is a folder of this machine: "
            "leave --cache-gb out, or add --cache-dir"
        )
    return {"cache_dir": folder, "cache_bytes": None if most is None else int(most * 1e9)}


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_config(command: argparse.ArgumentParser, kind: str = "", kept: KeptSettings | None = None) -> None:
    """Add --config, which `CommandParser` reads: a TOML file, or a folder (`kind`) whose settings `kept` reads."""
    if isinstance(command, CommandParser):
        command.kept = kept
    command.add_argument(
        "--config",
        type=local_path,
        metavar="FILE.toml",
        help=f"take options from a file{kind and f' or another {kind}'}; lines of a file look like `seed = 1`; "
        "options on the command line win",
    )


def add_reading(command: argparse.ArgumentParser) -> None:
    from tpucache.loading.ahead import ReadingOptions

    add_options(command, ReadingOptions)


def cache(text: str) -> Path:
    """Return the folder of a cache, given as a path or as kaggle:slug, a dataset that Kaggle has mounted."""
    from tpucache.loading.find import locate

    return locate(text)


def cache_or_url(text: str) -> str | Path:
    from tpucache.store.files import KAGGLE, is_url

    return text if is_url(text) and not text.startswith(KAGGLE) else cache(text)


def names(text: str) -> Path:
    return cache(text) if text.startswith("kaggle:") else local_path(text)


def size(text: str) -> int | tuple[int, int]:
    sides = [int(side) for side in text.lower().split("x")]
    if len(sides) > 2:
        raise UsageError(f"a size is N or HxW, not {text!r}")
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def colours(text: str) -> tuple[str, ...]:
    """Return the colours in a .csv as rrggbb: the last three cells of each line, perhaps after a header."""
    from tpucache.store.files import read_text

    try:
        lines = [line.split(",") for line in read_text(text, "utf-8-sig").splitlines() if line.strip()]
        found = lines if lines and all(cell.strip().isdecimal() for cell in lines[0][-3:]) else lines[1:]
        return tuple(bytes(int(cell) for cell in cells[-3:]).hex() for cells in found)
    except (OSError, ValueError) as error:
        raise UsageError(f"{text} is not a .csv of red, green and blue, 0 to 255: {error}") from error


def seconds(text: str) -> float:
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text.strip().lower())
    if not text or parts is None or not any(parts.groups()):
        raise UsageError(f"a time looks like 8h, 1h30m, 90m or 5400, not {text!r}")
    hours, minutes, rest = (int(part or 0) for part in parts.groups())
    return float(3600 * hours + 60 * minutes + rest)


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
