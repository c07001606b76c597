"""tpucache's own wheel, made from the running package: no network, no build tools, the same bytes every time.

Its files are decided by a rule, not by the content of the package's folder: `py.typed`, and each module that
tpucache's own code imports, starting from `tpucache` and `tpucache.__main__`. A file that nothing imports stays out.
"""

from __future__ import annotations

import ast
import base64
import functools
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

from tpucache import version
from tpucache.errors import DependencyError
from tpucache.store.files import write_atomically
from tpucache.training.settings import TASKS

_NAME: Final = "tpucache"
# What pip wrote when it installed, and what describes that one installation only.
_LOCAL: Final = ("RECORD", "WHEEL", "INSTALLER", "REQUESTED", "direct_url.json")
_MODE: Final = 0o100644 << 16
# Modules that users import and tpucache itself does not, or only by a name that it makes.
_ROOTS: Final = (
    "tpucache",
    "tpucache.__main__",
    "tpucache.jax",
    *(f"tpucache.training.learn.tasks.{name}" for name in TASKS),
)


def wheel_name() -> str:
    """Return the file name of this tpucache's wheel."""
    return f"{_NAME}-{version.__version__}-py3-none-any.whl"


def write_wheel(folder: str | Path) -> Path:
    """Write this tpucache as a wheel into a folder and return its path. Raises what `wheel_bytes` raises, OSError."""
    path = Path(folder) / wheel_name()
    write_atomically(path, wheel_bytes())
    return path


def wheel_bytes() -> bytes:
    """Return this tpucache as a wheel; it holds Python alone and fits any machine.

    The package's files are those that run, the metadata those that pip installed; an editable installation serves as
    well. Format: the binary distribution format of the Python packaging guide, version 1.0. Raises DependencyError
    when tpucache was never installed, OSError.
    """
    info = f"{_NAME}-{version.__version__}.dist-info"
    files = dict(_package_files()) | {f"{info}/{name}": data for name, data in _metadata_files()}
    files[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: {_NAME} {version.__version__}\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    ).encode()
    record = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""]).encode()
    target = io.BytesIO()
    # Stored, not deflated: compressed bytes differ between releases of zlib.
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            member = zipfile.ZipInfo(name)  # its default date, 1980-01-01, is the same every time
            member.external_attr = _MODE
            archive.writestr(member, data)
    return target.getvalue()


def _package_files() -> Iterator[tuple[str, bytes]]:
    """Yield the package's own files: its modules, the lists of its public names, and the mark that it is typed."""
    package = Path(version.__file__).parent
    modules = _modules(package).values()
    paths = [package / "py.typed", *modules, *(path.with_suffix(".pyi") for path in modules)]
    for path in sorted(path for path in paths if path.is_file()):
        yield f"{_NAME}/{path.relative_to(package).as_posix()}", path.read_bytes()


@functools.cache
def _modules(package: Path) -> dict[str, Path]:
    """Return the file of each module that the package's own modules import, inside of functions or out of them."""
    found: dict[str, Path] = {}
    waiting = list(_ROOTS)
    while waiting:
        name = waiting.pop()
        path = _module_file(package, name)
        if path is not None and name not in found:
            found[name] = path
            for each in (path, path.with_suffix(".pyi")):
                waiting += _imported(ast.parse(each.read_bytes())) if each.is_file() else ()
            waiting.append(name.rpartition(".")[0])
    return found


def _module_file(package: Path, name: str) -> Path | None:
    place = package.parent.joinpath(*name.split(".")) if name.partition(".")[0] == _NAME else package / "nothing"
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the names of what a module may import; some are names in a module and no modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _metadata_files() -> Iterator[tuple[str, bytes]]:
    """Yield the files of the installation's .dist-info that belong into a wheel, METADATA first."""
    found = next((each for each in distributions(name=_NAME) if each.read_text("METADATA")), None)
    if found is None:  # what building leaves in a checkout, an .egg-info, is no installation
        raise DependencyError(
            "tpucache runs from a folder that was never installed, so its metadata is missing: `pip install` it first"
        )
    metadata = found.read_text("METADATA") or ""
    # An editable installation keeps stating the version it was installed at.
    yield "METADATA", re.sub(r"(?m)^Version: .*$", f"Version: {version.__version__}", metadata, count=1).encode()
    yield from sorted(_others(found))


def _others(found: Distribution) -> Iterator[tuple[str, bytes]]:
    for path in found.files or ():
        if path.parts[0].endswith(".dist-info") and path.name not in (*_LOCAL, "METADATA"):
            yield "/".join(path.parts[1:]), path.read_binary()


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
