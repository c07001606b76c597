"""Options: fields of a dataclass that carry their help and limits, from which the command line makes its own options.

A field is declared once, `epochs: int = option(5, "passes over the training samples", metavar="N", minimum=1)`. Its
choices are those of its type, where that is a Literal. Where the default is a tuple, each use of the command line's
option adds one value.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from tpucache.errors import UsageError

_KEY: Final = "option"


@dataclass(frozen=True)
class Option:
    """One field with its help: of `types`, or one of `choices`, or None where that is its default.

    The default of a field that has to be given is `dataclasses.MISSING`. `flag` is its option on the command line.
    """

    name: str
    flag: str
    default: Any
    help: str
    metavar: str | None
    minimum: int | None
    types: tuple[type, ...]
    choices: Collection[Any]

    def check(self, value: object) -> None:
        """Raise UsageError when a value is below the minimum, or is none of the choices."""
        if value is None and self.default is None:
            return
        if self.choices and value not in self.choices:
            raise UsageError(f"{self.name} is one of {', '.join(map(str, self.choices))}, not {value!r}")
        if self.minimum is not None and not (isinstance(value, (int, float)) and value >= self.minimum):
            raise UsageError(f"{self.name} is at least {self.minimum}, not {value}")


def option(
    default: Any,
    text: str,
    *,
    metavar: str | None = None,
    minimum: int | None = None,
    choices: Collection[str] = (),
    flag: str | None = None,
) -> Any:
    """Return a dataclass field with this default and help; `minimum` is the least number it may be.

    Without a default, `dataclasses.MISSING`, it has to be given. `choices` are for a type that does not have them
    itself. `flag` is what the command line's option is called if not like the field.
    """
    return dataclasses.field(default=default, metadata={_KEY: (text, metavar, minimum, choices, flag)})


def options_of(settings: type) -> Mapping[str, Option]:
    """Return the options of a dataclass by name, in their order; a field without help is not an option."""
    return _options_of(settings)


@functools.cache
def _options_of(settings: type) -> Mapping[str, Option]:
    hints = get_type_hints(settings)
    found = {}
    for item in dataclasses.fields(settings):
        if _KEY in item.metadata:
            text, metavar, minimum, given, flag = item.metadata[_KEY]
            types, choices = _kinds(hints[item.name])
            flag = f"--{flag or item.name.replace('_', '-')}"
            limits = metavar, minimum, types, given or choices
            found[item.name] = Option(item.name, flag, item.default, text, *limits)
    return found


def check_options(settings: Any) -> None:
    """Raise UsageError when a value of a dataclass is below its option's minimum, or is none of its choices."""
    for name, each in options_of(type(settings)).items():
        each.check(getattr(settings, name))


def by_name(function: Callable[..., Any], kind: Callable[..., Any]) -> Any:
    """Return a function that takes the fields of a dataclass by name, and calls one that takes an object of it, last.

    For a name that is no field it raises TypeError, as Python does, with the nearest name that is one.
    """
    shown = inspect.signature(function)
    *others, last = shown.parameters.values()
    fields = inspect.signature(kind).parameters
    signature = shown.replace(parameters=[*others, *fields.values()])

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            given = signature.bind(*arguments, **named).arguments
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}{_nearest(named, signature.parameters)}") from None
        options = kind(**{name: given.pop(name) for name in fields if name in given})
        return function(**given, **{last.name: options})

    call.__signature__ = signature  # type: ignore[attr-defined]  # inspect and help() read it
    return call


def _nearest(named: Collection[str], known: Collection[str]) -> str:
    """Return which known name is like the first one that is not known."""
    import difflib

    unknown = next((name for name in named if name not in known), "")
    found = difflib.get_close_matches(unknown, known, 1)
    return f": did you mean {found[0]!r}?" if found else ""


def _kinds(hint: Any) -> tuple[tuple[type, ...], tuple[Any, ...]]:
    """Return the types and the choices that a type hint allows, without None."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [member for member in members if get_origin(member) is Literal]
    choices = tuple(choice for literal in literals for choice in get_args(literal))
    types = tuple(member for member in members if isinstance(member, type) and member is not NoneType)
    return types, () if types else choices  # where other values are allowed, the literals are not all
