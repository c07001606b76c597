"""Hashes the code of a custom augmentation: its module's file, and the user's own modules that it imports."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final

from tpucache.errors import RecipeError
from tpucache.plugins import load_callable

_INSTALLED: Final = ("site-packages", "dist-packages")
#: Keys of the hashes: of the module's own file, and of its helper modules' files by module name.
OWN: Final = "source_sha256"
HELPERS: Final = "helpers"

_imported: Final[dict[str, tuple[Any, str]]] = {}
#: In Python 3.11, two threads must not parse at the same time: https://github.com/python/cpython/issues/106905.
_parsing: Final = threading.Lock()


def code_digests(name: str) -> dict[str, Any]:
    """Return the SHA-256 hashes of the code of the callable `name`, given as `module:name`, as JSON values."""
    load_callable(name)
    module = name.partition(":")[0]
    digests = {found: _sha256(path) for found, path in _files(module).items()}
    own = digests.pop(module, "")
    return {OWN: own, HELPERS: dict(sorted(digests.items()))} if digests else {OWN: own}


def code_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names of the modules whose code differs between two definitions of one callable."""
    module = str(now.get("callable", "")).partition(":")[0]
    changed = [module] if before.get(OWN) != now.get(OWN) else []
    old, new = before.get(HELPERS, {}), now.get(HELPERS, {})
    return [*changed, *(name for name in sorted({*old, *new}) if old.get(name) != new.get(name))]


def check_imported(definition: Mapping[str, Any]) -> None:
    """Raise RecipeError if the code that this process has imported differs from the hashes in `definition`."""
    name = definition["callable"]
    load_callable(name)
    module = name.partition(":")[0]
    wanted = {module: definition.get(OWN, ""), **definition.get(HELPERS, {})}
    for found, path in _files(module).items():
        spec = getattr(sys.modules.get(found), "__spec__", None)
        if found not in _imported or _imported[found][0] is not spec:
            _imported[found] = (spec, _sha256(path))
        if wanted.get(found, _imported[found][1]) != _imported[found][1]:
            raise RecipeError(
                f"the code of {found} changed after this process imported it for the augmentation {name}: start a new "
                "process (in a notebook: restart the kernel) and run the same command again"
            )


def _files(module: str) -> dict[str, Path]:
    own = _file(_spec(module))
    if own is None:
        return {}
    files, waiting = {module: own}, [module]
    while waiting:
        current = waiting.pop()
        for name in _imports(current, files[current]):
            for found, path in _local_modules(name):
                if found not in files:
                    files[found] = path
                    waiting.append(found)
    return files


def _local_modules(name: str) -> Iterator[tuple[str, Path]]:
    """Yield the name and the file of each module that a dotted name contains, as long as the module is the user's
    own.
    """
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        module = ".".join(parts[:count])
        spec = _spec(module)
        path = _file(spec)
        places = [str(path)] if path else list(getattr(spec, "submodule_search_locations", None) or ())
        if not places or not _is_local(module, Path(places[0])):
            return
        if path:
            yield module, path


def _imports(module: str, path: Path) -> Iterator[str]:
    try:
        with _parsing:
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # compiled code
        return
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _spec(module: str) -> ModuleSpec | None:
    if not module or module.partition(".")[0] in sys.stdlib_module_names:
        return None
    if spec := getattr(sys.modules.get(module), "__spec__", None):
        return spec  # type: ignore[no-any-return]  # the `__spec__` of a module is a ModuleSpec
    found: ModuleSpec | None = None
    with contextlib.suppress(Exception):  # finding a module imports its packages, which may raise any error
        found = importlib.util.find_spec(module)
    return found


def _file(spec: ModuleSpec | None) -> Path | None:
    if spec is None or not spec.has_location or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return Path(spec.origin)


def _is_local(module: str, path: Path) -> bool:
    if module.partition(".")[0] == "tpucache" or any(part in _INSTALLED for part in path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in _standard_folders())


@functools.cache
def _standard_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
