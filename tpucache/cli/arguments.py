"""Arguments of the command line: options of dataclasses, and arguments that several commands share."""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Final, TypeVar

from tpucache.cli.parser import Argument, CommandParser, KeptSettings
from tpucache.errors import UsageError
from tpucache.ondevice.settings import AugmentSettings
from tpucache.options import Option, options_of

Settings = TypeVar("Settings")
Parse = Callable[[str], Any]


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

    def add(target: Any) -> None:
        action = target.add_argument(
            *flags.split(", "), metavar=metavar, help=text, type=parse, default=default, **others
        )
        action.code = code  # which `CommandParser` asks about values of a settings file

    return add


def flag(name: str, text: str, dest: str | None = None, can_be_off: bool = False) -> Argument:

    def add(target: Any) -> None:
        action = argparse.BooleanOptionalAction if can_be_off else "store_true"
        target.add_argument(name, action=action, help=text, dest=dest).default = False  # before, 3.11 would show it

    return add


def section(title: str, text: str | None, *arguments: Argument) -> Argument:
    def add(target: argparse.ArgumentParser) -> None:
        group = target.add_argument_group(title, text)
        for argument in arguments:
            argument(group)

    return add


def fields_of(
    settings: type,
    only: Container[str] | None = None,
    without: Container[str] = (),
    can_be_off: bool = False,
    **parsers: Parse,
) -> Argument:
    """Return the options of a dataclass; `parsers` parse texts for which a type is not enough."""

    def add(target: Any) -> None:
        for each in options_of(settings).values():
            if (only is None or each.name in only) and each.name not in without:
                is_flag = bool in each.types
                argument = flag(each.flag, each.help, each.name, can_be_off) if is_flag else _valued(each, **parsers)
                argument(target)

    return add


def _valued(each: Option, **parsers: Parse) -> Argument:
    metavar, default, others = each.metavar, each.default, dict[str, Any](dest=each.name)
    kind = each.types[-1] if each.types else str
    parse = local_path if kind is Path else kind if each.minimum is None else at_least(each.minimum)
    if each.choices:
        metavar, others["choices"] = listed(each.choices), each.choices
    elif default is MISSING:
        default, others["required"] = None, True
    elif isinstance(default, tuple) and each.name not in parsers:
        default, others["action"] = [*default], "append"
    return value(each.flag, metavar, each.help, parsers.get(each.name, parse), default, each.code, **others)


def from_options(settings: type[Settings], options: argparse.Namespace, **others: Any) -> Settings:
    known = options_of(settings)
    given = {name: value for name, value in vars(options).items() if name in known}
    return settings(**{**given, **others})


def listed(choices: Collection[Any]) -> str:
    """Return choices as the help shows them: only tpucache's own, if other packages can add some."""
    return "{" + ",".join(map(str, getattr(choices, "own", choices))) + "}"


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
    "a cache at a URL",
    "gs://, s3://, https://, http://, hf://",
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

    most, folder = getattr(options, "cache_gb", None), getattr(options, "cache_dir", None)
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
