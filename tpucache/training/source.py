"""`train SOURCE`: the cache of a source is built while it is read."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tpucache.cli.parser import local_path, section, value
from tpucache.errors import NotACacheError, SourceError, UsageError
from tpucache.store.format import INDEX_NAME, MANIFEST_NAME, SAMPLES_NAME, WORK_NAME

if TYPE_CHECKING:
    from tpucache.loading.dataset import CachedDataset

_CODE: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_PATTERN: Final = re.compile(r"[*?\[]")
_CACHE_FILES: Final = (MANIFEST_NAME, INDEX_NAME, SAMPLES_NAME, WORK_NAME)
#: Options of warmup that do not change the content of a cache.
_WITHOUT_EFFECT: Final = ("jobs", "on_error", "build", "config")


SOURCE: Final = section(
    "a SOURCE in place of a cache (as for warmup; built while it is read)",
    value(
        "--cache",
        "DIR",
        "the folder for the cache of a SOURCE; default: a folder next to RUN",
        local_path,
        dest="cache_of_source",
    ),
    value(
        "--build",
        "OPTIONS",
        "options of warmup for the cache of a SOURCE, such as '--variants 2' or '--config FILE.toml'",
        code="",
    ),
)


def is_source(place: str | Path) -> bool:
    """Return whether `place` is a file, a pattern, `module:name`, or a folder with files but none of a cache."""
    if isinstance(place, str):  # a URL
        return False
    if place.is_dir():
        with os.scandir(place) as entries:
            names = [entry.name for entry in entries]
        return bool(names) and not any(name in _CACHE_FILES or name.endswith(".lmdb") for name in names)
    text = str(place)
    return place.is_file() or bool(_CODE.fullmatch(text) or _PATTERN.search(text))


class SourceArguments:
    """A source, and the options with which its cache is built."""

    def __init__(self, source: Path, text: str | None, size: Any = None) -> None:
        from tpucache.cli.warming import parse_build, wanted

        options = parse_build(text)
        self.names_size = "size" in options.explicit
        if size is not None and not self.names_size:
            options.size = size
            options.explicit = options.explicit | {"size"}
        options.source = str(source)
        self.path, self._options = source, options
        self.recipe, self._build_options = wanted(options)

    def default_cache(self, folder: Path) -> Path:
        left_out = (*_WITHOUT_EFFECT, "explicit")
        named_by = {name: repr(value) for name, value in vars(self._options).items() if name not in left_out}
        named_by |= {"source": os.path.realpath(self.path), "recipe": repr(sorted(self.recipe.to_dict().items()))}
        digest = hashlib.sha256(json.dumps(named_by, sort_keys=True).encode()).hexdigest()[:8]
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", self.path.name).strip("._")[:40] or "source"
        return folder / f"cache-{plain}-{digest}"

    def open(self, cache: Path, *, is_named: bool) -> CachedDataset:
        """Open the cache, which is built while it is read.

        Unless `is_named`, the path may also have been meant as a cache.
        """
        from tpucache.adopt.growing import open_or_build
        from tpucache.cli.warming import selected_source

        source, chosen = selected_source(self._options), vars(self._build_options)
        try:
            return open_or_build(source, cache, self.recipe, **chosen)
        except SourceError as error:
            if is_named or not self.path.is_dir() or cache.exists():
                raise
            raise NotACacheError(
                f"{self.path} is not a cache: it has no {MANIFEST_NAME}. It is not a source, either: {error}"
            ) from error


def refuse(given: Mapping[str, Any], why: str) -> None:
    for name, each in given.items():
        if each is not None:
            raise UsageError(f"{name} is {why}: leave {name} out")
