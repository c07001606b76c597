"""Commands that take a SOURCE in place of a cache: its cache is built while the command reads it."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tpucache.cli.arguments import explicit, local_path
from tpucache.cli.parser import CommandParser
from tpucache.errors import NotACacheError, SourceError, UsageError
from tpucache.signals import PROG
from tpucache.store.format import INDEX_NAME, MANIFEST_NAME, SAMPLES_NAME, WORK_NAME

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset
    from tpucache.loading.reading.record_reader import InMemory

_CODE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PATTERN: Final = re.compile(r"[*?\[]")
_OF_CACHES: Final = (MANIFEST_NAME, INDEX_NAME, SAMPLES_NAME, WORK_NAME)
#: Options of warmup that say how a cache is built, not what it holds.
_HOW: Final = ("jobs", "on_error", "build", "config")


class _BuildParser(CommandParser):
    """The parser of warmup's options in the text of --build."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, and say how to use the options that --build does not take."""
        raise UsageError(
            f"--build takes options of warmup that say what a cache holds ({PROG} warmup --help-all), and {message}. "
            f"For others run `{PROG} warmup SOURCE CACHE` first, then give CACHE in place of SOURCE"
        )


def add_source(command: argparse.ArgumentParser, where: str) -> None:
    """Add --cache and --build to a command that takes a source, too; `where` names the default place of its cache."""
    group = command.add_argument_group(
        "a SOURCE in place of a cache", "as warmup takes it; its cache is built meanwhile"
    )
    group.add_argument(
        "--cache",
        dest="cache_of_source",
        type=local_path,
        metavar="DIR",
        help=f"the folder for the cache of a SOURCE; default: {where}",
    )
    group.add_argument(
        "--build",
        metavar="OPTIONS",
        help="options of warmup for the cache of a SOURCE, such as '--variants 2'; a file of them is '--config "
        "FILE.toml'",
    )


def is_source(place: str | Path) -> bool:
    """Return whether a command is given a source: something that exists, and is neither a cache nor a part of one."""
    if isinstance(place, str):  # a URL
        return False
    if place.is_dir():
        with os.scandir(place) as entries:
            names = [entry.name for entry in entries]
        return bool(names) and not any(name in _OF_CACHES or name.endswith(".lmdb") for name in names)
    text = str(place)
    return place.is_file() or bool(_CODE.fullmatch(text) or _PATTERN.search(text))


class SourceArguments:
    """A source, and the options for its cache."""

    def __init__(self, source: Path, text: str | None, size: Any = None) -> None:
        """Take the text of --build, and the size of images where --build gives none. Raises UsageError, RecipeError."""
        from tpucache.cli.warming import add_cache_options, wanted

        parser = _BuildParser(prog=f"{PROG} --build")
        add_cache_options(parser)
        options = parser.parse_args(shlex.split(text or ""))
        self.names_size = "size" in explicit(options)
        if size is not None and not self.names_size:
            options.size = size
            options.explicit = explicit(options) | {"size"}
        options.source = str(source)
        self.path, self._options = source, options
        self.recipe, self._build_options = wanted(options)

    def default_cache(self, folder: Path) -> Path:
        """Return the default place of the cache below a folder: the same place for the same source and options."""
        said = {name: repr(value) for name, value in vars(self._options).items() if name not in (*_HOW, "explicit")}
        said |= {"source": os.path.realpath(self.path), "recipe": repr(sorted(self.recipe.to_dict().items()))}
        digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:8]
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", self.path.name).strip("._")[:40] or "source"
        return folder / f"cache-{plain}-{digest}"

    def open(self, cache: Path, in_memory: InMemory, *, is_named: bool) -> CachedDataset:
        """Open the cache, which is built while it is read. Raises what `open_or_build` raises.

        For a folder without samples the error says that it is not a cache, unless another option says that it
        `is_named` as a source.
        """
        from tpucache.adopt.growing import open_or_build
        from tpucache.cli.warming import selected_source

        source, chosen = selected_source(self._options), vars(self._build_options)
        try:
            return open_or_build(source, cache, self.recipe, **chosen, in_memory=in_memory)
        except SourceError as error:
            if is_named or not self.path.is_dir() or cache.exists():
                raise
            raise NotACacheError(
                f"{self.path} is not a cache: it has no {MANIFEST_NAME}. It is not a source, either: {error}"
            ) from error


def refuse_without_source(options: argparse.Namespace) -> None:
    """Raise UsageError for options about a source's cache where a cache is given."""
    given: Mapping[str, Any] = {"--cache": options.cache_of_source, "--build": options.build}
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} is for a source, and {options.cache} is a cache, or nothing: leave {name} out")
