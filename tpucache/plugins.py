"""What is imported by name: parts of other packages, wings, the user's code, and public names on first use."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from tpucache.errors import DependencyError, UsageError, calling

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


#: The arguments of `pip install` for modules whose package has another name, or is needed in one version.
_PACKAGES: Final = {
    "PIL": "pillow",
    "albumentations": "albumentations==2.0.8",
    "cv2": "opencv-python-headless",
    "google": "protobuf",
    "google_crc32c": "google-crc32c",
    "yaml": "PyYAML",
}


def package_of(module: str) -> str:
    """Return the argument of `pip install` for a module."""
    return _PACKAGES.get(module, module)


def lazy_names(package: str, hidden: str = "") -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package (PEP 562) whose names its stub imports.

    `__dir__` and `__all__` lack names from the module `hidden`.
    """
    spec: Any = sys.modules[package].__spec__
    stub = ast.parse(spec.loader.get_data(f"{spec.origin}i"))  # a package may be inside a zip
    homes = {
        each.name: str(line.module) for line in stub.body if isinstance(line, ast.ImportFrom) for each in line.names
    }
    shown = sorted(name for name, home in homes.items() if home != hidden)

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = load(f"{homes[name]}:{name}")
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: shown, shown


def load(reference: str) -> Any:
    """Import an object of tpucache, `module:name`. Raises DependencyError if its folder or file is not installed."""
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if message := missing_part(reference):
            raise DependencyError(message) from error
        raise


def missing_part(reference: str) -> str:
    """Return a message if the folder or file of tpucache with a module is not installed; otherwise ""."""
    from importlib.util import find_spec

    part = ".".join(reference.partition(":")[0].split(".")[:2])  # a folder or file of the package: tpucache.training
    found = find_spec(part)
    if found is not None and found.origin is not None:  # otherwise only a folder with compiled files is left
        return ""
    return f"{part} is missing, which is a part of tpucache: install the whole package again"


def load_callable(name: str) -> Callable[..., Any]:
    """Import the user's callable `module:name.attribute`. Raises UsageError."""
    module_name, _, path = name.partition(":")
    if not path:  # a module alone is not imported, as importing it runs its code
        raise UsageError(f"{name!r} is no function or class: name it as module:name")
    try:
        target: Any = importlib.import_module(module_name)
        for part in path.split("."):
            target = getattr(target, part)
    except Exception as error:  # importing a user's module may raise any error
        raise UsageError(f"{name!r} cannot be imported as module:name: {error}") from error
    if not callable(target):
        raise UsageError(f"{name!r} is a {type(target).__name__}, not a callable: name a function or a class")
    return target  # type: ignore[no-any-return]  # callable() narrows Any to nothing better


#: The groups of entry points, each with the word by which messages call its parts.
GROUPS: Final[Mapping[str, str]] = {
    "tpucache.codecs": "codec",
    "tpucache.sources": "source",
    "tpucache.tasks": "task",
    "tpucache.devices": "backend",
}

Part = TypeVar("Part")
Result = TypeVar("Result")


class PartTable(Mapping[str, Part]):
    """The parts of a group by name: tpucache's own, then those of other packages, imported when looked up."""

    def __init__(
        self, group: str, own: Mapping[str, Part | str], check: Callable[[str, Any], Part] = lambda _name, part: part
    ) -> None:
        """`own` may have texts `module:name`. `check` returns the part of an entry point, or raises TypeError."""
        self.own: Final = tuple(own)
        self._group, self._check, self._parts = group, check, dict(own)

    def __getitem__(self, name: str) -> Part:
        if isinstance(part := self._parts.get(name), str):
            part = self._parts[name] = cast(Part, load(part))
        elif part is None:
            found = installed(self._group)[name]
            if found.part is None:
                found.part = self._load(*found.entries)
            part = cast(Part, found.part)
        return part

    def __contains__(self, name: object) -> bool:
        return name in [*self]  # the names alone: no part is imported

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from self.others()

    def __len__(self) -> int:
        return sum(1 for _ in self)  # list() would call this method again

    def others(self) -> Iterator[str]:
        """Yield the names of other packages' parts."""
        return (name for name in installed(self._group) if name not in self.own)

    def use(self, name: str, work: Callable[[Part], Result]) -> Result:
        """Return `work(part)` of another package's part; its errors become DependencyErrors."""
        with self._calling(installed(self._group)[name].entries[0]):
            return work(self[name])

    def names(self, *first: str, where: Callable[[Part], bool] | None = None) -> Names:
        return Names(self, first, where)

    def _load(self, entry: EntryPoint, *others: EntryPoint) -> Part:
        if others:
            packages, kind = " and ".join(sorted(map(_package_of_entry, (entry, *others)))), GROUPS[self._group]
            raise DependencyError(f"{packages} both have the {kind} {entry.name!r}: uninstall one of them")
        with self._calling(entry):
            return self._check(entry.name, entry.load())

    def _calling(self, entry: EntryPoint) -> AbstractContextManager[None]:
        part = f"the {GROUPS[self._group]} {entry.name!r} of the package {_package_of_entry(entry)}"
        return calling(part, advice="Install another version of the package, or uninstall it")


class Names(Iterable[str]):
    """The names of parts to choose from, first `own`, tpucache's. A condition imports the parts of other packages."""

    def __init__(self, table: PartTable[Part], first: tuple[str, ...], where: Callable[[Part], bool] | None) -> None:
        self._is_chosen: Callable[[str], bool] = lambda name: where is None or where(table[name])
        self._others = table.others
        self.own: Final = (*first, *filter(self._is_right, table.own))

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from filter(self._is_right, self._others())

    def _is_right(self, name: str) -> bool:
        try:
            return self._is_chosen(name)
        except DependencyError:  # raised again when the part is used
            return True


class Installed:
    """The entry points of one name, of one or several packages, and the part once it is loaded."""

    def __init__(self) -> None:
        self.entries: list[EntryPoint] = []
        self.part: Any = None


@functools.cache
def installed(group: str) -> dict[str, Installed]:
    """Return what packages add to a group, by name."""
    from importlib.metadata import entry_points  # imports forty modules, which tpucache's own parts do not need

    found: dict[str, Installed] = {}
    for entry in sorted(entry_points(group=group), key=lambda each: each.name):
        found.setdefault(entry.name, Installed()).entries.append(entry)
    return found


def _package_of_entry(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def package_versions(*groups: str) -> dict[str, str]:
    entries = [entry for group in groups for each in installed(group).values() for entry in each.entries]
    return dict(sorted((entry.dist.name, entry.dist.version) for entry in entries if entry.dist))


#: The commands by their group of `--help`, then by their module: the names of its commands, each with a line of help.
COMMANDS: Final[Mapping[str, Mapping[str, Mapping[str, str]]]] = {
    "build": {
        "tpucache.cli.warming": {
            "warmup": "Build a cache, or finish a build that was interrupted.",
            "relabel": "Give a cache other labels, folds or columns.",
            "delete": "Make a version of a cache without some samples, or undo that.",
            "compact": "Write a cache anew, without deleted samples and versions.",
            "verify": "Compare every byte of a cache with its manifest, or repair it.",
        },
    },
    "look": {
        "tpucache.cli.inspecting": {
            "inspect": "Show what a cache contains, its size, and how it was made.",
            "preview": "Draw a contact sheet: samples down, variants across.",
            "report": "Write a page about a cache, its findings, or a run.",
            "bench": "Measure how fast this machine reads a cache.",
            "doctor": "Show what this machine has for tpucache, and what to fix.",
        },
        "tpucache.insight.commands": {
            "compare": "Find pictures that caches have in common.",
            "suspects": "List the samples whose labels are the least probable.",
        },
    },
    "train": {
        "tpucache.training.commands": {
            "train": "Train a model on a cache, or on a source.",
            "predict": "Predict every sample of a cache by trained models.",
        },
    },
    "share": {
        "tpucache.cli.publishing": {
            "publish": "Publish a cache as a Kaggle Dataset.",
            "fetch": "Copy a cache from a URL into a folder.",
            "push": "Copy a cache to a URL.",
            "cached": "List the caches that this machine keeps, or remove them.",
        },
    },
}

#: The functions of wings and of pages that others call, by name. Those of pages return a `report.page.Page`.
FUNCTIONS: Final[Mapping[str, str]] = {
    "report_cache": "tpucache.report.inspect:report_cache",
    "report_run": "tpucache.training.page:report_run",
    "report_findings": "tpucache.insight.page:report_findings",
    "hashes": "tpucache.insight.hashing:hashes",  # for publish --hashes and push --hashes
    "folds": "tpucache.insight.commands:make_folds",  # for relabel --make-folds
    "leak": "tpucache.insight.copies:find_leak",  # for train
    "upload_rate": "tpucache.training.feed:measure_xla",  # for doctor
}


def call(name: str, *arguments: Any, **named: Any) -> Any:
    """Call one of FUNCTIONS. Raises DependencyError if its folder is missing."""
    return load(FUNCTIONS[name])(*arguments, **named)


def is_there(name: str) -> bool:
    return not missing_part(FUNCTIONS[name])
