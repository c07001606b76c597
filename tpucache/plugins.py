"""Parts that installed packages add: codecs, sources, tasks and devices, named by the entry points of their metadata.

tpucache's own parts come first: an entry point with the name of one of them is never used. The code of a package is
imported when a part of it is asked for, not before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tpucache.errors import DependencyError, TpucacheError
from tpucache.imports import load

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: The groups of entry points, and what a part of each is called in messages.
GROUPS: Final[Mapping[str, str]] = {
    "tpucache.codecs": "codec",
    "tpucache.sources": "source",
    "tpucache.tasks": "task",
    "tpucache.devices": "backend",
}

Part = TypeVar("Part")
Result = TypeVar("Result")


class Table(Mapping[str, Part]):
    """Parts of one kind by name: tpucache's own, then those of installed packages.

    Looking up a name imports that part alone; so does nothing else. Raises DependencyError for a part that cannot be
    imported, or is not what such a part has to be, and for one that two packages have.
    """

    def __init__(
        self, group: str, own: Mapping[str, Part | str], check: Callable[[str, Any], Part] = lambda _name, part: part
    ) -> None:
        """Take one of GROUPS and tpucache's own parts; a text `module:name` is imported when it is asked for.

        `check` takes a name and the object that its entry point refers to, and returns the part. It raises TypeError
        where the object is wrong.
        """
        self.own: Final = tuple(own)
        #: The modules of tpucache's own parts that are imported when they are asked for.
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
        return sum(1 for _ in self)  # a list would ask for the length first

    def use(self, name: str, work: Callable[[Part], Result]) -> Result:
        """Return what `work` makes of a part. What it raises of another package's part is a DependencyError."""
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
        """Return names to choose from: `first`, and those of the parts for which `where` holds, all if it is None."""
        return Names(self, first, where)

    def _load(self, entry: EntryPoint, *others: EntryPoint) -> Part:
        if others:
            packages, kind = " and ".join(sorted(map(package_of, (entry, *others)))), GROUPS[self._group]
            raise DependencyError(f"{packages} both have the {kind} {entry.name!r}: uninstall one of them")
        try:
            return self._check(entry.name, entry.load())
        except Exception as error:  # importing somebody's module raises whatever it raises
            raise self._unusable(entry, error) from error

    def _unusable(self, entry: EntryPoint, error: Exception) -> DependencyError:
        return DependencyError(
            f"the {GROUPS[self._group]} {entry.name!r} of the package {package_of(entry)} cannot be used: "
            f"{type(error).__name__}: {error}. Install another version of it, or uninstall it"
        )


class Names(Collection[str]):
    """The names of a table's parts that can be chosen; `own` are those that do not depend on what is installed."""

    def __init__(self, table: Table[Part], first: tuple[str, ...], where: Callable[[Part], bool] | None) -> None:
        self._table, self._first = table, first
        self._where: Callable[[str], bool] = lambda name: where is None or where(table[name])
        self.own: Final = (*first, *(name for name in table.own if self._where(name)))

    def __contains__(self, name: object) -> bool:
        return name in self.own or (isinstance(name, str) and name in self._table and self._is_right(name))

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from (name for name in self._table if name not in self._table.own and self._is_right(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)  # a list would ask for the length first

    def __bool__(self) -> bool:
        return True

    def _is_right(self, name: str) -> bool:
        try:
            return self._where(name)
        except DependencyError:  # using it says what is wrong with it
            return True


@functools.cache
def installed(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of a group by name, in the names' order; two packages may have one name."""
    from importlib.metadata import entry_points  # with forty modules that reading tpucache's own parts does not need

    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in sorted(entry_points(group=group), key=lambda each: each.name):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


def package_of(entry: EntryPoint) -> str:
    """Return the name and version of the package that has an entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def package_versions(*groups: str) -> dict[str, str]:
    """Return the versions by name of the installed packages that have parts in these groups."""
    entries = [entry for group in groups for each in installed(group).values() for entry in each]
    return dict(sorted((entry.dist.name, entry.dist.version) for entry in entries if entry.dist))
