"""Fills jinja2 templates: every value is escaped, and a name in a template without a value is an error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tpucache.errors import DependencyError

if TYPE_CHECKING:
    from jinja2 import Environment

Escape = Callable[[object], str]


def fill(package: str, name: str, values: Mapping[str, object], escape: Escape) -> str:
    """Return the text of the template `name`, from the folder `templates` of a package, filled with values.

    `escape` converts each value to text. The template may include or extend templates of that package and of
    `tpucache.report`. Raises DependencyError without jinja2.
    """
    return _environment(package, escape).get_template(name).render(values)


def check_jinja() -> None:
    """Raise DependencyError if jinja2 is not installed."""
    try:
        import jinja2  # noqa: F401  # only a check
    except ImportError as error:
        raise DependencyError(
            f"jinja2 fills in pages and cards: {error}. `pip install jinja2`, or install tpucache[report]"
        ) from error


@functools.cache
def _environment(package: str, escape: Escape) -> Environment:
    check_jinja()
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def escaped(value: object) -> Markup:
        return value if isinstance(value, Markup) else Markup(escape(value))  # noqa: S704  # it is escaped

    return Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("tpucache.report")]),
        autoescape=True,
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
