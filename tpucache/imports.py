"""Import objects by the text `module:name`, and the public names of a package when they are first used."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tpucache.errors import DependencyError, UsageError

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
    """Return the argument of `pip install` for a module that cannot be imported."""
    return _PACKAGES.get(module, module)


def lazy_names(
    package: str, file: str, hidden: str = ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package that imports its public names on first use (PEP 562).

    `file` is the package's `__init__.py`. The stub file `__init__.pyi` next to it imports all public names, and so says
    which module has which name. Names from the module `hidden` can be imported, too, but `__dir__` and `__all__` lack
    them.
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
    """Import the object of tpucache that `reference` names, `module:name`, and return it.

    Raises DependencyError if the module's folder or file is not installed.
    """
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if message := missing_part(reference):
            raise DependencyError(message) from error
        raise


def missing_part(reference: str) -> str:
    """Return a message if the folder or file of tpucache with the module of `reference` is not installed; otherwise "".

    `reference` is `module` or `module:name`.
    """
    from importlib.util import find_spec

    part = ".".join(reference.partition(":")[0].split(".")[:2])  # a folder or file of the package: tpucache.training
    found = find_spec(part)
    if found is not None and found.origin is not None:  # otherwise only a folder with compiled files is left
        return ""
    return f"{part} is missing, which is a part of tpucache: install the whole package again"


def load_callable(name: str) -> Callable[..., Any]:
    """Import and return the callable that `name` names: `module:name` or `module:name.attribute`.

    Raises UsageError if it cannot be imported, or is not callable.
    """
    module_name, _, path = name.partition(":")
    try:
        target: Any = importlib.import_module(module_name)
        for part in path.split("."):
            target = getattr(target, part)
    except Exception as error:  # importing a user's module may raise any error
        raise UsageError(f"{name!r} cannot be imported as module:name: {error}") from error
    if not callable(target):
        raise UsageError(f"{name!r} is a {type(target).__name__}, not a callable: name a function or a class")
    return target  # type: ignore[no-any-return]  # callable() narrows Any to nothing better
