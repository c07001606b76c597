"""Codecs, sources, tasks and backends ("parts") that other installed packages add by entry points in their metadata.

tpucache's own parts have priority: an entry point with the name of one of tpucache's parts is never used. A package's
code is imported only when one of its parts is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tpucache.errors import DependencyError, TpucacheError
from tpucache.imports import load

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
    """The codecs, sources, tasks or backends ("parts") by name: first tpucache's own, then those of other packages.

    A part is imported when its name is looked up. This raises DependencyError for a part that cannot be imported, is
    not of the right type, or is in two packages.
    """

    def __init__(
        self, group: str, own: Mapping[str, Part | str], check: Callable[[str, Any], Part] = lambda _name, part: part
    ) -> None:
        """Make the table of the parts that tpucache and other packages have in `group`, a key of GROUPS.

        `own` has tpucache's own parts by name. If a part is given as the text `module:name`, it is imported when it is
        looked up. `check` is called with the name and the object of an entry point, and returns the part, or raises
        TypeError for a wrong object.
        """
        self.own: Final = tuple(own)
        #: The modules of tpucache's own parts that are imported when they are looked up.
        self.modules: Final = tuple(part.partition(":")[0] for part in own.values() if isinstance(part, str))
        self._group, self._check = group, check
        self._parts: dict[str, Part] = {name: part for name, part in own.items() if not isinstance(part, str)}
        self._references = {name: part for name, part in own.items() if isinstance(part, str)}

    def __getitem__(self, name: str) -> Part:
        if name not in self._parts:
            if name in self._references:
                self._parts[name] = load(self._references[name])
            else:
                self._parts[name] = self._load(*installed(self._group)[name])
        return self._parts[name]

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in installed(self._group)

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name in installed(self._group) if name not in self.own)

    def __len__(self) -> int:
        return sum(1 for _ in self)  # list() would call this method again

    def use(self, name: str, work: Callable[[Part], Result]) -> Result:
        """Return `work(part)` for the part with this name.

        If the part is from another package, errors that it raises become DependencyErrors, except tpucache's errors.
        """
        part = self[name]
        if name in self.own:
            return work(part)
        try:
            return work(part)
        except TpucacheError:
            raise
        except Exception as error:
            raise self._unusable(installed(self._group)[name][0], error) from error

    def names(self, *first: str, where: Callable[[Part], bool] | None = None) -> Names:
        """Return the names to choose from: `first`, then the names of the parts for which `where` returns True.

        If `where` is None, the names of all parts are returned.
        """
        return Names(self, first, where)

    def _load(self, entry: EntryPoint, *others: EntryPoint) -> Part:
        if others:
            packages, kind = " and ".join(sorted(map(package_of, (entry, *others)))), GROUPS[self._group]
            raise DependencyError(f"{packages} both have the {kind} {entry.name!r}: uninstall one of them")
        try:
            return self._check(entry.name, entry.load())
        except Exception as error:  # importing another package may raise any error
            raise self._unusable(entry, error) from error

    def _unusable(self, entry: EntryPoint, error: Exception) -> DependencyError:
        return DependencyError(
            f"the {GROUPS[self._group]} {entry.name!r} of the package {package_of(entry)} cannot be used: "
            f"{type(error).__name__}: {error}. Install another version of the package, or uninstall it"
        )


class Names(Collection[str]):
    """The names of parts to choose from. `own` has the names in `first` and those of tpucache's own parts.

    Iterating also yields the names of other packages' parts. See `PartTable.names` for the arguments.
    """

    def __init__(self, table: PartTable[Part], first: tuple[str, ...], where: Callable[[Part], bool] | None) -> None:
        self._table, self._first = table, first
        self._where: Callable[[str], bool] = lambda name: where is None or where(table[name])
        self.own: Final = (*first, *(name for name in table.own if self._where(name)))

    def __contains__(self, name: object) -> bool:
        return name in self.own or (isinstance(name, str) and name in self._table and self._is_right(name))

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name in self._table if name not in self._table.own and self._is_right(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)  # list() would call this method again

    def __bool__(self) -> bool:
        return True

    def _is_right(self, name: str) -> bool:
        try:
            return self._where(name)
        except DependencyError:  # raised again when the part is used
            return True


@functools.cache
def installed(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name, sorted by name; several packages may use the same name."""
    from importlib.metadata import entry_points  # imports forty modules, which tpucache's own parts do not need

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in sorted(entry_points(group=group), key=lambda each: each.name):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


def package_of(entry: EntryPoint) -> str:
    """Return the name and version of the package that declares an entry point.

    If the package is unknown, return the entry point's value, such as `module:name`.
    """
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def package_versions(*groups: str) -> dict[str, str]:
    """Return the versions of all packages that have entry points in these groups, by the packages' names."""
    entries = [entry for group in groups for each in installed(group).values() for entry in each]
    return dict(sorted((entry.dist.name, entry.dist.version) for entry in entries if entry.dist))
