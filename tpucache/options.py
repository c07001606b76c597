"""Options: fields of a dataclass with help and limits. The command line makes its options from them.

A field is declared once, as in `epochs: int = option(5, "passes over the training samples", metavar="N", minimum=1)`.
If the type of a field is a Literal, its values are the choices. If the default is a tuple, each use of the command
line's option adds one value.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from tpucache.errors import UsageError

_KEY: Final = "option"


@dataclass(frozen=True)
class Option:
    """A field with its help and limits.

    Its value has one of `types`, or is one of `choices`, or None if that is the default.
    """

    name: str
    flag: str
    default: Any
    help: str
    metavar: str | None
    minimum: int | None
    types: tuple[type, ...]
    choices: Iterable[Any]
    code: str | None

    def check(self, value: object) -> None:
        if value is None and self.default is None:
            return
        if self.choices and value not in self.choices:
            raise UsageError(f"{self.name} is one of {', '.join(map(str, self.choices))}, not {value!r}")
        if self.minimum is not None and not (isinstance(value, (int, float)) and value >= self.minimum):
            raise UsageError(f"{self.name} is at least {self.minimum}, not {value}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{self.name} is a finite number, not {value}")


def option(
    default: Any,
    text: str,
    *,
    metavar: str | None = None,
    minimum: int | None = None,
    choices: Iterable[str] = (),
    flag: str | None = None,
    code: str | None = None,
) -> Any:
    """Return a dataclass field that is an option; with the default MISSING it is required.

    If it can name the user's code, as `module:name`, `code` is the prefix of names that are a library's, or "".
    """
    return dataclasses.field(default=default, metadata={_KEY: (text, metavar, minimum, choices, flag, code)})


def options_of(settings: type) -> Mapping[str, Option]:
    return _options_of(settings)  # this wrapper exists because mypy regards a dataclass type as unhashable


@functools.cache
def _options_of(settings: type) -> Mapping[str, Option]:
    hints = get_type_hints(settings)
    found = {}
    for item in dataclasses.fields(settings):
        if _KEY in item.metadata:
            text, metavar, minimum, given, flag, code = item.metadata[_KEY]
            types, choices = _kinds(hints[item.name])
            name, flag = item.name, f"--{flag or item.name.replace('_', '-')}"
            found[name] = Option(name, flag, item.default, text, metavar, minimum, types, given or choices, code)
    return found


def check_options(settings: Any) -> None:
    for name, each in options_of(type(settings)).items():
        each.check(getattr(settings, name))


def by_name(function: Callable[..., Any], kind: Callable[..., Any]) -> Any:
    """Return `function` with the fields of the dataclass `kind` as keyword arguments, in place of its last argument."""
    shown = inspect.signature(function)
    *others, last = shown.parameters.values()
    fields = inspect.signature(kind).parameters
    signature = shown.replace(parameters=[*others, *fields.values()])

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            given = signature.bind(*arguments, **named).arguments
        except TypeError as error:
            unknown = next((name for name in named if name not in signature.parameters), "")
            raise TypeError(f"{function.__name__}() {error}{did_you_mean(unknown, signature.parameters)}") from None
        options = kind(**{name: given.pop(name) for name in fields if name in given})
        return function(**given, **{last.name: options})

    call.__signature__ = signature  # type: ignore[attr-defined]  # for inspect and help()
    return call


def did_you_mean(word: str, names: Iterable[str]) -> str:
    import difflib

    found = difflib.get_close_matches(word, list(names), 1)
    return f": did you mean {found[0]}?" if found else ""


def _kinds(hint: Any) -> tuple[tuple[type, ...], tuple[Any, ...]]:
    """Return the types of a hint apart from None, or its Literals if these are the only choices."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    literals = [member for member in members if get_origin(member) is Literal]
    choices = tuple(choice for literal in literals for choice in get_args(literal))
    types = tuple(member for member in members if isinstance(member, type) and member is not NoneType)
    return types, () if types else choices  # with other types, the literals are not the only choices
