"""`module:name`, as options take it, -> the callable it names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tpucache.errors import UsageError


def load_callable(name: str) -> Callable[..., Any]:
    """Import the callable that `module:name` or `module:name.attribute` names. Raises UsageError."""
    module_name, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for part in path.split("."):
            target = getattr(target, part)
    except Exception as error:  # importing somebody's module raises whatever it raises
        raise UsageError(f"{name!r} cannot be imported as module:name: {error}") from error
    if not callable(target):
        raise UsageError(f"{name!r} is a {type(target).__name__}, not a callable")
    return target  # type: ignore[no-any-return]  # callable() narrows Any to nothing better
