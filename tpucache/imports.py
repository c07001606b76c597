"""Imports of names that options give, and of public names when they are first used."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tpucache.errors import DependencyError, UsageError

#: The packages of modules with another name in pip, or which are needed in one version.
_PACKAGES: Final = {
    "PIL": "pillow",
    "albumentations": "albumentations==2.0.8",
    "cv2": "opencv-python-headless",
    "google": "protobuf",
    "google_crc32c": "google-crc32c",
    "yaml": "PyYAML",
}


def package_of(module: str) -> str:
    """Return the argument of `pip install` for a module that cannot be imported."""
    return _PACKAGES.get(module, module)


def lazy_names(
    package: str, file: str, hidden: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package that imports its public names on first use.

    The stub file next to `file`, `__init__.pyi`, lists the names: it has one import for each (PEP 562). Names from the
    module `hidden` can be imported, too, but are not listed.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
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
    """Import the object at `module:name` in tpucache.

    Raises DependencyError if the part of tpucache with this module is not installed.
    """
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if message := missing_part(reference):
            raise DependencyError(message) from error
        raise


def missing_part(reference: str) -> str:
    """Return a message if the part of tpucache that a `module:name` belongs to is not installed; otherwise ""."""
    from importlib.util import find_spec

    part = ".".join(reference.partition(":")[0].split(".")[:2])  # a folder or file of the package: tpucache.training
    found = find_spec(part)
    if found is not None and found.origin is not None:  # otherwise only a folder with compiled files is left
        return ""
    return f"{part} is missing, a part of tpucache that this needs: install the whole package again"


def load_callable(name: str) -> Callable[..., Any]:
    """Import the callable at `module:name` or `module:name.attribute`. Raises UsageError."""
    module_name, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for part in path.split("."):
            target = getattr(target, part)
    except Exception as error:  # importing a user's module may raise any error
        raise UsageError(f"{name!r} cannot be imported as module:name: {error}") from error
    if not callable(target):
        raise UsageError(f"{name!r} is a {type(target).__name__}, not a callable")
    return target  # type: ignore[no-any-return]  # callable() narrows Any to nothing better
